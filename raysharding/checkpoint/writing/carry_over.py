"""What is in a checkpoint's directory and no save wrote goes with the directory when a save replaces it.

Note [Carrying over]: one rename must commit, so the user's entries have to be in the new directory before it, and in
the old one until then: files get a second name by a hard link, directories are made anew around links to their files.
Killed at any moment, each file is where it was, and perhaps in a staging directory, too. After the rename the old
directories themselves change places with those that stand for them: who works in one goes on in it.

Renames that others see at once, and that outlast a loss of power.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from raysharding.checkpoint.format import new_token
from raysharding.checkpoint.storage import mount_points_below
from raysharding.checkpoint.writing.save_files import has_save_name, other_entries
from raysharding.checkpoint.writing.save_record import own_sidecars
from raysharding.errors import CheckpointError

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(first: str, second: str) -> bool:
    """Swap two directories in one step, and return True, where kernel, C library and file system can; else False.

    Raises:
        OSError: The kernel refused.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), first, None, second)


def sync_directory(path: str) -> None:
    """Put a directory's entries on the disk, without which a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no fsync of directories, such as some FUSE ones
            raise
    finally:
        os.close(descriptor)


_NUM_LISTED = 8


def check_carry(directory: str, staging: str, *, try_links: bool = True) -> list[str]:
    """Refuse a directory that a save cannot replace without losing what is not a save's.

    Args:
        directory: The destination; there may be none.
        staging: Where the new checkpoint will be written; left as it is.
        try_links: Whether each file is linked, and the link removed.

    Returns:
        What has to go with it: `user_entries`.

    Raises:
        CheckpointError: Lists what cannot be carried over, and why.
    """
    if not os.path.isdir(directory):
        return []
    obstacles = [f"{os.path.relpath(point, directory)} (a mount point)" for point in mount_points_below(directory)]
    try:
        entries = user_entries(directory)
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror}", path=error.filename) from error
    for entry in entries:
        if has_save_name(entry):
            obstacles.append(f"{entry} (not a save's, in the place of a save's)")
        elif try_links:
            obstacles += _without_links(directory, entry, os.path.join(staging, new_token()))
    if obstacles:
        more = f" and {len(obstacles) - _NUM_LISTED} more" if len(obstacles) > _NUM_LISTED else ""
        what = f"holds what is not a save's and cannot go with it: {', '.join(obstacles[:_NUM_LISTED])}{more}"
        raise CheckpointError(f"{what}; move that elsewhere, or save to another path", path=directory)
    return entries


def user_entries(directory: str) -> list[str]:
    """Return what is in a local directory and no save of ours has put there, as `other_entries` does."""
    copied = own_sidecars(directory)
    return [entry for entry in other_entries(directory) if entry not in copied]


def carry_over(directory: str, staging: str) -> set[str]:
    """Give the new directory what is the user's in the old one. See Note [Carrying over].

    Returns:
        Paths of the links in the new one.

    Raises:
        CheckpointError: As `check_carry`.
        OSError: Something cannot be linked.
    """
    entries = check_carry(directory, staging, try_links=False)
    try:
        for entry in entries:
            _link(os.path.join(directory, entry), os.path.join(staging, entry))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            check_carry(directory, staging)  # lists all that cannot be linked; what came since the first check is new
        raise
    return {path for entry in entries for path in _files(os.path.join(staging, entry))}


def keep_sidecars(directory: str, staging: str) -> None:
    """Copy the small files that the old save copied, and that the new one does not bring itself.

    Raises:
        OSError: The disk is full or failed.
    """
    for name in own_sidecars(directory):
        if not os.path.lexists(os.path.join(staging, name)):
            shutil.copy2(os.path.join(directory, name), staging)


def swap_directories(old: str, directory: str) -> set[str]:
    """Put the user's directories themselves into the new place, at once after the rename, and return which could be.

    Args:
        old: The old directory.
        directory: The new one.
    """
    swapped = set()
    for entry in other_entries(old):
        source, target = os.path.join(old, entry), os.path.join(directory, entry)
        with suppress(OSError):  # one that its user may not write to cannot be moved: its double stays
            if _is_directory(source) and _is_directory(target) and exchange(source, target):
                swapped.add(entry)
    return swapped


def hand_back(old: str, directory: str, *, carried: set[str], swapped: set[str]) -> None:
    """Put what came into the old directory, or into the doubles, during the renames into the new place.

    Args:
        old: The old directory, with the doubles of those that were swapped.
        directory: The new one.
        carried: What `carry_over` returned.
        swapped: What `swap_directories` returned.

    Raises:
        OSError: Something cannot be linked.
    """
    for entry in user_entries(old):
        source = os.path.join(old, entry)
        came = [path for path in _files(source) if path not in carried] if entry in swapped else [source]
        for path in came:
            _link(path, os.path.join(directory, os.path.relpath(path, old)))


def _without_links(directory: str, entry: str, probe: str) -> Iterator[str]:
    """Say of each file in an entry that cannot have a second name why; links are made as `probe`, and removed."""
    try:
        for path in _files(os.path.join(directory, entry)):
            if (why := _why_no_link(path, probe)) is not None:
                yield f"{os.path.relpath(path, directory)} (cannot be hard-linked: {why})"
    except OSError as error:
        yield f"{os.path.relpath(error.filename, directory)} (cannot be listed: {error.strerror})"


def _why_no_link(path: str, probe: str) -> str | None:
    try:
        os.link(path, probe, follow_symlinks=False)
        os.unlink(probe)
    except FileNotFoundError:
        return None  # the user has removed it meanwhile
    except OSError as error:
        return error.strerror
    return None


def _files(path: str) -> Iterator[str]:
    """Paths of all that is no directory at or below a path."""
    if not _is_directory(path):
        yield path
        return
    for place, folders, names in os.walk(path, onerror=_raise_unless_gone):
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (os.path.join(place, name) for name in (*names, *linked))


def _link(source: str, target: str) -> None:
    """Give a file a second name, in place of what else has that; make a directory anew around links to its files.

    What the user removes meanwhile is left out.
    """
    try:
        _link_present(source, target)
    except FileNotFoundError:
        if os.path.lexists(source):
            raise


def _link_present(source: str, target: str) -> None:
    status = os.lstat(source)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISDIR(status.st_mode):
        if is_new := not _is_directory(target):
            with suppress(FileNotFoundError):
                os.unlink(target)
            os.mkdir(target)
        for name in os.listdir(source):
            _link(os.path.join(source, name), os.path.join(target, name))
        if is_new:
            shutil.copystat(source, target)
            with suppress(PermissionError):
                os.chown(target, status.st_uid, status.st_gid)
        sync_directory(target)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samestat(status, os.lstat(target)):
            second = os.path.join(os.path.dirname(target), f".{new_token()}")
            os.link(source, second, follow_symlinks=False)
            os.replace(second, target)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
