"""The text of a remote traceback: the user's frames, with the frames of libraries folded."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from raysharding import errors

_OWN = os.path.dirname(errors.__file__) + os.sep
_torch = find_spec("torch")  # imports nothing: the controller's process has no torch
assert _torch is not None, "a dependency of this package"
_TORCH = os.path.dirname(str(_torch.origin)) + os.sep
# Context managers and decorators through which raysharding and torch call the user's code.
_STANDARD = tuple(os.path.join(os.path.dirname(os.__file__), name) for name in ("contextlib.py", "functools.py"))


def format_folded(error: BaseException) -> str:
    """Format an exception, causes included, with one line for successive frames of raysharding and torch.

    A traceback without other frames is not folded: then the error is in the library itself.
    """
    formatted = traceback.TracebackException.from_exception(error)
    for one in _chain(formatted):
        if any(not _library(frame.filename) for frame in one.stack):
            one.stack = _Folded(one.stack)
    return "".join(formatted.format())


class _Folded(traceback.StackSummary):
    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        for is_library, frames in groupby(self, lambda frame: bool(_library(frame.filename))):
            run = list(frames)
            if is_library:
                names = ", ".join(dict.fromkeys(_library(frame.filename) for frame in run))
                lines.append(f"  … {len(run)} frame{'s' if len(run) > 1 else ''} of {names}\n")
            else:
                lines += traceback.StackSummary.from_list(run).format(**options)
        return lines


def _chain(formatted: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    if formatted is not None:
        yield formatted
        for other in (formatted.__cause__, formatted.__context__, *(formatted.exceptions or ())):
            yield from _chain(other)


def _library(filename: str) -> str:
    """Return the name under which a frame is folded; empty for the user's code."""
    if filename.startswith(_TORCH):
        return "torch." + filename.removeprefix(_TORCH).split(os.sep)[0].removesuffix(".py")
    return "raysharding" if filename.startswith((_OWN, *_STANDARD)) else ""
