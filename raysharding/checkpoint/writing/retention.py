"""Keep the newest saves of a numbered series; remove older ones, and what killed saves have left."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from raysharding.checkpoint.format import MANIFEST_NAME, is_abandoned, staged_name, staging_name
from raysharding.checkpoint.storage import HubPath, is_remote, join_path, split_path, storage_of
from raysharding.checkpoint.writing.commit import is_left_over, remove_abandoned, remove_save
from raysharding.errors import CheckpointError

_REMOVE_S: Final = 10.0
_NUMBERED: Final = re.compile(r"(.*?)(\d+)(\D*)")


def check_numbered(path: str | os.PathLike[str]) -> None:
    """Refuse a name without a number: no save can be older.

    Raises:
        ValueError: The last part of `path` holds no number.
    """
    if _split(_parted(path)[1]) is None:
        raise ValueError(f"keep_last keeps saves by the number in their names, and {os.fspath(path)!r} has none")


def remove_older(path: str | os.PathLike[str], keep_last: int, spare: str | None = None) -> None:
    """Remove saves beside `path` whose names differ from its in the last number alone, the smallest numbers first.

    A path that is not a save of ours (it lacks a manifest), is a symlink, has a larger number, or cannot be removed,
    stays; the last case is warned of. Entries of a save's directory that no save has written stay. A directory without
    such entries is removed in one step, others and objects with the index first: no reader finds part of a checkpoint.

    Args:
        path: The latest save, a path or a normal URI, which stays.
        keep_last: Number of saves to keep, including that one; 1 or more.
        spare: A save that stays and does not count: a run's best. Default: none.
    """
    parent, name = _parted(path)
    own = _split(name)
    assert own is not None, "check_numbered comes first"
    spared = None if spare is None else join_path(*_parted(spare))
    older = [old for number, old in _alike(parent, own) if number < own[1] and old != spared]
    for old in older[: max(0, len(older) + 1 - keep_last)]:
        _remove_or_warn(remove_save, old, path)


def remove_left_overs(path: str | os.PathLike[str]) -> None:
    """Remove staging directories of killed saves to `path`, or to smaller numbers of its series.

    Each is as large as a checkpoint. Those of a live process stay (Note [Liveness]). The ranks wait for this function,
    so what cannot be removed in 10 s is left to the next save. An object store has no staging directories.

    Args:
        path: The latest save, a path or a normal URI.
    """
    parent, name = _parted(path)
    until = time.monotonic() + _REMOVE_S
    for left_over in () if is_remote(parent) else _left_overs(parent, name):
        _remove_or_warn(remove_abandoned, left_over, path)
        if time.monotonic() > until:
            break


def remove_unfinished(path: str, token: str) -> None:
    """Remove the staging directory of one save whose writer is known to be dead.

    Args:
        path: The destination of the save, a path or a normal URI.
        token: Of the staging directory.
    """
    parent, name = _parted(path)
    try:
        names = [] if is_remote(parent) else os.listdir(parent)
    except OSError:
        return  # this process does not see the directory
    for found in names:
        if found.startswith(staging_name(name, token)):
            _remove_or_warn(remove_abandoned, os.path.join(parent, found), path)


def _remove_or_warn(remove: Callable[[str], None], old: str, saved: str | os.PathLike[str]) -> None:
    try:
        remove(old)
    except FileNotFoundError:
        return  # another process removes it
    except (OSError, CheckpointError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{saved} is saved, but the older {old} could not be removed: {said}", RuntimeWarning, 3)


def _left_overs(parent: str, name: str) -> Iterator[str]:
    """Yield abandoned staging directories for a name, or for a smaller number of its series."""
    own = _split(name)
    for found in sorted(os.listdir(parent)):
        staged, path = staged_name(found), os.path.join(parent, found)
        if staged is not None and (staged == name or _is_older(_split(staged), own)) and is_abandoned(path):
            yield path


def _is_older(split: tuple[tuple[str, str], int] | None, own: tuple[tuple[str, str], int] | None) -> bool:
    """Return True if a name differs from `own` only in a smaller last number."""
    return split is not None and own is not None and split[0] == own[0] and split[1] < own[1]


def newest_after(path: str) -> str:
    """Return the newest save whose name differs from that of a removed one only in a larger last number.

    A save that removes older ones may be committed although its caller died before, or has not been told yet.

    Args:
        path: A save, a path or a normal URI. Returned itself if it exists, or no newer save does.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    if HubPath.of_pinned(path) is not None:
        return path  # of the hub: no save
    parent, name = split_path(path)
    own, storage = _split(name), storage_of(path)
    if own is None or is_checkpoint(path) or storage.find(parent).kind != "directory":
        return path
    newer = [other for number, other in _alike(parent, own) if number > own[1]]
    return newer[-1] if newer else path


def newest_save(directory: str, prefix: str) -> str | None:
    """Return the complete save in a directory with the largest number in its name; `None` without a save.

    Args:
        directory: A path or a normal URI, which need not exist.
        prefix: What stands before the number, such as `step-`.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    if storage_of(directory).find(directory).kind != "directory":
        return None
    saves = (path for _, path in reversed(_alike(directory, ((prefix, ""), 0))))
    return next((path for path in saves if is_checkpoint(path)), None)


def is_checkpoint(path: str) -> bool:
    """Return True if there is a checkpoint at a normal path or URI.

    The user's entries, which the removal of a save leaves, are not a checkpoint.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    storage = storage_of(path)
    stat = storage.find(path)
    if stat.kind == "directory":
        return not is_left_over(path) and any(name.endswith(".safetensors") for name in storage.list_names(path))
    return stat.kind != "missing"


def _alike(parent: str, own: tuple[tuple[str, str], int]) -> list[tuple[int, str]]:
    """Return number and path of the saves in a directory whose names differ only in the number, by number."""
    saves = []
    storage = storage_of(parent)
    for name in storage.list_names(parent):
        split, path = _split(name), join_path(parent, name)
        if split is None or split[0] != own[0]:
            continue
        is_save = storage.find(join_path(path, MANIFEST_NAME)).kind == "file"
        if is_save and not is_left_over(path) and (is_remote(path) or not os.path.islink(path)):
            saves.append((split[1], path))
    return sorted(saves)


def _parted(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return directory and name of a path; of a local symlink, those of its target."""
    given = os.fspath(path)
    return split_path(given if is_remote(given) else os.path.realpath(given))


def _split(name: str) -> tuple[tuple[str, str], int] | None:
    """Split a name around its last number; return `None` where it has none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else ((match[1], match[3]), int(match[2]))
