"""Keeping the newest of a row of saves."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from typing import Final

from raysharding.checkpoint.commit import new_token, staged_name, staging_name
from raysharding.checkpoint.location import storage_of
from raysharding.checkpoint.names import MANIFEST_NAME
from raysharding.checkpoint.object_commit import is_left_over, remove_objects
from raysharding.checkpoint.uri import is_remote, join_path, split_path
from raysharding.errors import CheckpointError

_LEFT_S: Final = 3600.0
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
    the last is warned of. A directory is renamed before anything in it goes, of objects the index goes first: no reader
    finds half a checkpoint. On a file system one staging directory for such a name, or for `path`, goes with them, in
    which nothing has changed for an hour: a save, or a removal, whose process was killed has left it, as large as a
    checkpoint. One at a time, because the ranks wait for this.

    Args:
        path: The save that was made last, a path or a normal URI; it stays.
        keep_last: How many stay, that one with them; 1 or more.
    """
    parent, name = _parted(path)
    own = _split(name)
    assert own is not None, "check_numbered comes first"
    older = [old for number, old in _alike(parent, own) if number < own[1]]
    for old in older[: max(0, len(older) + 1 - keep_last)]:
        _remove_or_warn(old, path)
    for left_over in _unfinished(parent, own):
        if _remove_or_warn(left_over, path):
            break


def _remove_or_warn(old: str, saved: str | os.PathLike[str]) -> bool:
    try:
        _remove(old)
    except (OSError, CheckpointError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"{saved} is saved, but the older {old} could not be removed: {said}", RuntimeWarning, 3)
        return False
    return True


def _remove(save: str) -> None:
    if is_remote(save):
        remove_objects(save)
        return
    parent, name = os.path.split(save)
    # A staging directory, too: a writer that lives must fail, and not commit what is being removed. It stays where it
    # is found, whatever its destination may link to by now.
    hidden = os.path.join(parent, staging_name(staged_name(name) or name, new_token()))
    os.rename(save, hidden)
    shutil.rmtree(hidden)


def _unfinished(parent: str, own: tuple[str, int, str]) -> Iterator[str]:
    """Staging directories that nobody writes to, for names alike; those for larger numbers are left out."""
    for name in () if is_remote(parent) else sorted(os.listdir(parent)):
        split, path = _split(staged_name(name) or ""), os.path.join(parent, name)
        is_alike = split is not None and (split[0], split[2]) == (own[0], own[2]) and split[1] <= own[1]
        if is_alike and not os.path.islink(path) and _last_change(path) < time.time() - _LEFT_S:
            yield path


def _last_change(directory: str) -> float:
    """Latest time at which anything in a directory changed; now, where that cannot be told."""
    try:
        times = [os.stat(directory).st_mtime]
        for place, folders, files in os.walk(directory):
            times += [os.lstat(os.path.join(place, name)).st_mtime for name in (*folders, *files)]
    except OSError:  # it goes away meanwhile: somebody is at work in it
        return time.time()
    return max(times) if os.path.isdir(directory) else time.time()


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
    is_there = storage.find(path).kind != "missing" and not is_left_over(path)
    if own is None or is_there or storage.find(parent).kind != "directory":
        return path
    newer = [other for number, other in _alike(parent, own) if number > own[1]]
    return newer[-1] if newer else path


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
