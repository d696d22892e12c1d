"""Keeping the newest of a row of saves, and none of what killed ones have left."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from raysharding.checkpoint.format import MANIFEST_NAME, is_abandoned, staged_name, staging_name
from raysharding.checkpoint.storage import is_remote, join_path, split_path, storage_of
from raysharding.checkpoint.writing.commit import is_left_over, remove_abandoned, remove_checkpoint, remove_objects
from raysharding.errors import CheckpointError

_REMOVE_S: Final = 10.0
_NUMBERED: Final = re.compile(r"(.*?)(\d+)(\D*)")


def check_numbered(path: str | os.PathLike[str]) -> None:
    """Refuse a name that no others can be older than.

    Raises:
        ValueError: The last part of `path` holds no number.
    """
    if _split(_parted(path)[1]) is None:
        raise ValueError(f"keep_last keeps saves by the number in their names, and {os.fspath(path)!r} has none")


def remove_older(path: str | os.PathLike[str], keep_last: int) -> None:
    """Remove saves beside `path` whose names differ from its in the last number alone, the smallest numbers first.

    What is not a save of ours (it lacks a manifest), is a symlink, has a larger number, or cannot be removed, stays;
    the last is warned of. Of a save's directory what no save has put there stays. A directory goes in one step, of
    objects the index goes first: no reader finds half a checkpoint.

    Args:
        path: The save that was made last, a path or a normal URI; it stays.
        keep_last: How many stay, that one with them; 1 or more.
    """
    parent, name = _parted(path)
    own = _split(name)
    assert own is not None, "check_numbered comes first"
    older = [old for number, old in _alike(parent, own) if number < own[1]]
    for old in older[: max(0, len(older) + 1 - keep_last)]:
        _remove_or_warn(remove_objects if is_remote(old) else remove_checkpoint, old, path)


def remove_left_overs(path: str | os.PathLike[str]) -> None:
    """Remove staging directories that killed saves to `path`, or to smaller numbers of its row, have left.

    Each is as large as a checkpoint. Those of a live process stay; see Note [Liveness]. The ranks wait for this: what
    cannot be removed in 10 s is left to the next save. In an object store there are none.

    Args:
        path: The save that was made last, a path or a normal URI.
    """
    parent, name = _parted(path)
    until = time.monotonic() + _REMOVE_S
    for left_over in () if is_remote(parent) else _left_overs(parent, name):
        _remove_or_warn(remove_abandoned, left_over, path)
        if time.monotonic() > until:
            break


def remove_unfinished(path: str, token: str) -> None:
    """Remove the staging directory of one save, whose writer is known to be dead.

    Args:
        path: Where it was to go, a path or a normal URI.
        token: Of its staging directory.
    """
    parent, name = _parted(path)
    try:
        names = [] if is_remote(parent) else os.listdir(parent)
    except OSError:
        return  # out of this process's sight
    for found in names:
        if found.startswith(staging_name(name, token)):
            _remove_or_warn(remove_abandoned, os.path.join(parent, found), path)


def _remove_or_warn(remove: Callable[[str], None], old: str, saved: str | os.PathLike[str]) -> None:
    try:
        remove(old)
    except FileNotFoundError:
        return  # somebody else removes it
    except (OSError, CheckpointError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{saved} is saved, but the older {old} could not be removed: {said}", RuntimeWarning, 3)


def _left_overs(parent: str, name: str) -> Iterator[str]:
    """Abandoned staging directories for a name, or one of its row with a smaller number."""
    own = _split(name)
    for found in sorted(os.listdir(parent)):
        staged, path = staged_name(found), os.path.join(parent, found)
        if staged is not None and (staged == name or _is_older(_split(staged), own)) and is_abandoned(path):
            yield path


def _is_older(split: tuple[str, int, str] | None, own: tuple[str, int, str] | None) -> bool:
    """Return True if a name differs from one's own in a smaller last number alone."""
    if split is None or own is None:
        return False
    return (split[0], split[2]) == (own[0], own[2]) and split[1] < own[1]


def newest_after(path: str) -> str:
    """Return the newest save beside one that is gone, whose name differs in a larger last number alone.

    A save that removes older ones may be committed when who asked for it dies, or has not heard of it yet.

    Args:
        path: A save, a path or a normal URI. Where it is there, or nothing follows it, it is returned itself.

    Raises:
        CheckpointError: A store cannot be asked.
    """
    parent, name = split_path(path)
    own, storage = _split(name), storage_of(path)
    if own is None or is_checkpoint(path) or storage.find(parent).kind != "directory":
        return path
    newer = [other for number, other in _alike(parent, own) if number > own[1]]
    return newer[-1] if newer else path


def is_checkpoint(path: str) -> bool:
    """Return True if a checkpoint is at a path, a normal one or a URI.

    Where a save was removed, what the user put beside it may be left: that is none.

    Raises:
        CheckpointError: A store cannot be asked.
    """
    storage = storage_of(path)
    found = storage.find(path)
    if found.kind == "directory":
        return not is_left_over(path) and any(name.endswith(".safetensors") for name in storage.list_names(path))
    return found.kind != "missing"


def _alike(parent: str, own: tuple[str, int, str]) -> list[tuple[int, str]]:
    """Number and path of the saves in a directory that are named alike, by number."""
    found = []
    storage = storage_of(parent)
    for name in storage.list_names(parent):
        split, path = _split(name), join_path(parent, name)
        if split is None or (split[0], split[2]) != (own[0], own[2]):
            continue
        is_save = storage.find(join_path(path, MANIFEST_NAME)).kind == "file"
        if is_save and not is_left_over(path) and (is_remote(path) or not os.path.islink(path)):
            found.append((split[1], path))
    return sorted(found)


def _parted(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Directory and name, those of its target where a local path is a symlink."""
    given = os.fspath(path)
    return split_path(given if is_remote(given) else os.path.realpath(given))


def _split(name: str) -> tuple[str, int, str] | None:
    """A name around its last number; `None` where it has none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])
