"""What stays equal when a loss function is pickled anew for each call, and differs where its result may."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

_MAX_DEPTH = 6
"""Closures may hold themselves."""


def identity(value: Any, depth: int = _MAX_DEPTH) -> object:
    """Return a hashable stand-in for a function or a value that it holds: its code, its settings, its type.

    Settings are what selects a reduction or a mask: numbers but floats, strings, flags. Of floats and tensors (weights,
    a smoothing that is annealed) only the type counts, so a loss that holds a new one in each call is still the same.
    """
    kind = type(value)
    if value is None or isinstance(value, bool | int | str | bytes | enum.Enum | type):
        return kind, value
    if depth == 0:
        return kind
    inner = functools.partial(identity, depth=depth - 1)
    if isinstance(value, functools.partial):
        return kind, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, FunctionType):
        return value.__code__, inner(value.__defaults__), inner(value.__kwdefaults__), _closure(value, inner)
    if isinstance(value, MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, Mapping):
        return kind, tuple((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(inner(item) for item in value)
    return kind, getattr(value, "__qualname__", None), _state(value, inner)


def _closure(function: FunctionType, inner: Any) -> object:
    cells: list[object] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(inner(cell.cell_contents))
        except ValueError:
            # A name that is not bound yet.
            cells.append(None)
    return tuple(cells)


def _state(value: Any, inner: Any) -> object:
    """The attributes of a callable object; those of anything else (a tensor, an array) are not looked at."""
    if not callable(value) or isinstance(value, CodeType):
        return None
    return inner(getattr(value, "__dict__", None))
