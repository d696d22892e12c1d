"""Fingerprints of rows and functions: a `predict` that goes on sees by them that it would compute something else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dis import get_instructions
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from raysharding.data.files import RowFiles, connected, reading
from raysharding.data.source import BlockSource, Columns, SequenceRows

_SAMPLES = 64
_VALUES = (bool, int, float, str, list, tuple, dict, torch.Tensor, torch.nn.Module, np.ndarray)


def fingerprint(values: Iterable[Any]) -> str:
    """Return 16 hex digits that are the same for the same values in every process.

    Args:
        values: Numbers, texts, tensors, arrays, functions, and collections of these. A function counts by its code, its
            defaults, what it closes over, and the values and functions of its own module that it names. Any other
            object counts by its `repr`, or without one of its own by its type and its attributes.
    """
    digest, seen = sha256(), set[int]()
    for value in values:
        digest.update(json.dumps(as_json(value, seen), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def rows_fingerprint(source: BlockSource) -> str:
    """Return the fingerprint of the rows. Of files it reads the first row, of rows that are not in memory up to 64.

    Args:
        source: The rows. Files count by their sizes, times of change and first row; rows in memory by all values;
            others by rows at equal distances.

    Raises:
        DataError: A row cannot be read.
    """
    rows = source.rows if isinstance(source, SequenceRows) else None
    if isinstance(rows, Columns | list | tuple):
        return fingerprint([rows.columns] if isinstance(rows, Columns) else rows)
    ends = source.block_rows.cumsum()
    places = np.unique(np.linspace(0, ends[-1] - 1, _SAMPLES).astype(np.int64)).tolist()
    facts: list[Any] = [int(ends[-1])]
    if isinstance(source, RowFiles):
        with reading(source.directory):
            found = connected(source.directory)[0].get_file_info(list(source.files))
        facts, places = [*facts, *((one.base_name, one.size, one.mtime_ns) for one in found)], places[:1]
    return fingerprint([facts, *_rows_at(source, places)])


def _rows_at(source: BlockSource, places: Iterable[int]) -> Iterator[Any]:
    sizes = source.block_rows
    ends = sizes.cumsum()
    for place in places:
        block = int(np.searchsorted(ends, place, side="right"))
        with closing(source.read(block)) as reader:
            reader.skip(int(place - ends[block] + sizes[block]))
            yield from reader.take(1)


def as_json(value: Any, seen: set[int] | None = None) -> Any:
    """Return a JSON value that tells a value of `fingerprint` from others.

    Args:
        value: The value.
        seen: The `id` of each function and object before it, which is left out: they may name each other.
    """
    seen = set() if seen is None else seen

    def parts(*values: Any) -> list[Any]:
        return [as_json(one, seen) for one in values]

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return dict(zip(map(str, value), parts(*value.values()), strict=True))
        case list() | tuple():
            return list(value) if all(type(one) in (int, float, str) for one in value) else parts(*value)
        case set() | frozenset():
            return sorted(map(json.dumps, parts(*value)))  # the order differs between processes
        case torch.Tensor():
            dense = (value if value.layout is torch.strided else value.to_dense()).detach().resolve_conj().resolve_neg()
            data = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return [str(value.dtype), list(value.shape), sha256(data.data).hexdigest()]
        case np.ndarray() if value.dtype != object:
            return [str(value.dtype), list(value.shape), sha256(value.tobytes()).hexdigest()]
        case np.ndarray():
            return parts(*value.tolist())
        case partial():
            return parts(value.func, value.args, value.keywords)
        case MethodType():
            return parts(value.__func__, value.__self__)
        case torch.nn.Module():
            return parts(repr(value), value.state_dict())
        case CodeType():
            return parts(value.co_code, value.co_names, value.co_consts)
    if id(value) in seen:
        return "seen"
    if isinstance(value, FunctionType):
        seen.add(id(value))
        return parts(value.__code__, value.__defaults__, value.__kwdefaults__, _closed(value), _named(value))
    if not isinstance(value, type) and (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return as_json(np.asarray(value), seen)
    text = repr(value)
    if " at 0x" not in text:
        return text
    seen.add(id(value))
    is_object = not isinstance(value, type) and hasattr(value, "__dict__")
    return parts(getattr(value, "__qualname__", type(value).__qualname__), vars(value) if is_object else None)


def _closed(function: FunctionType) -> list[Any]:
    """Return what a function closes over; nothing for a name that has no value yet."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _named(function: FunctionType) -> dict[str, Any]:
    """Return the values, and the functions of the same module, that a function names; also in functions within it."""
    codes = [function.__code__]
    for code in codes:  # grows
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    names = {
        one.argval for code in codes for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    found = {name: function.__globals__.get(name) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, _VALUES) or _is_beside(one, function)}


def _is_beside(value: Any, function: FunctionType) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == function.__module__
