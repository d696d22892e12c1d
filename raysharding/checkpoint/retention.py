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
    older = [old for number, old in _alike(parent, own) if number < own[1]]
    for old in older[: max(0, len(older) + 1 - keep_last)]:
        try:
            hidden = staging_path(old, new_token())
            os.rename(old, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            what = f"{path} is saved, but the older {old} could not be removed: {error.strerror}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def newest_after(path: str) -> str:
    """Return the newest save beside one that is gone, whose name differs in a larger last number alone.

    A save that removes older ones may be committed when who asked for it dies, or has not heard of it yet.

    Args:
        path: A save. Where it is there, or nothing follows it, it is returned itself.
    """
    parent, name = os.path.split(path)
    own = _split(name)
    if own is None or os.path.exists(path) or not os.path.isdir(parent):
        return path
    newer = [other for number, other in _alike(parent, own) if number > own[1]]
    return newer[-1] if newer else path


def _alike(parent: str, own: tuple[str, int, str]) -> list[tuple[int, str]]:
    """Number and path of the saves in a directory that are named alike, by number."""
    found = []
    for name in os.listdir(parent):
        split, path = _split(name), os.path.join(parent, name)
        is_alike = split is not None and (split[0], split[2]) == (own[0], own[2])
        if split is not None and is_alike and os.path.isfile(os.path.join(path, MANIFEST_NAME)):
            found += [] if os.path.islink(path) else [(split[1], path)]
    return sorted(found)


def _split(name: str) -> tuple[str, int, str] | None:
    """A name around its last number; `None` where it has none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])
