"""Keeping the newest of a row of saves."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from typing import Final

from raysharding.checkpoint.commit import new_token, staging_path
from raysharding.checkpoint.index import MANIFEST_NAME

_NUMBERED: Final = re.compile(r"(.*?)(\d+)(\D*)")


def check_numbered(path: str | os.PathLike[str]) -> None:
    """Refuse a name that no others can be older than.

    Raises:
        ValueError: The last part of `path` holds no number.
    """
    if _NUMBERED.fullmatch(os.path.basename(os.path.realpath(path))) is None:
        raise ValueError(f"keep_last keeps saves by the number in their names, and {os.fspath(path)!r} has none")


def remove_older(path: str | os.PathLike[str], keep_last: int) -> None:
    """Remove saves beside `path` whose names differ from its in the last number alone, the smallest numbers first.

    What is not a save of ours (it lacks a manifest), is a symlink, has a larger number, or cannot be removed, stays;
    the last is warned of. A directory is renamed before anything in it goes: no reader finds half a checkpoint.

    Args:
        path: The save that was made last; it stays.
        keep_last: How many stay, that one with them; 1 or more.
    """
    parent, name = os.path.split(os.path.realpath(path))
    own = _split(name)
    assert own is not None, "check_numbered comes first"
    older = []
    for other in os.listdir(parent):
        found = _split(other)
        if found is None or (found[0], found[2]) != (own[0], own[2]) or found[1] >= own[1]:
            continue
        old = os.path.join(parent, other)
        if os.path.isfile(os.path.join(old, MANIFEST_NAME)) and not os.path.islink(old):
            older.append((found[1], old))
    older.sort()
    for _, old in older[: max(0, len(older) + 1 - keep_last)]:
        try:
            hidden = staging_path(old, new_token())
            os.rename(old, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            what = f"{path} is saved, but the older {old} could not be removed: {error.strerror}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def _split(name: str) -> tuple[str, int, str] | None:
    """A name around its last number; `None` where it has none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])
