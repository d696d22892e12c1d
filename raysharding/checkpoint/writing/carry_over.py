"""Carry entries that no save wrote over to the new directory when a save replaces the old one; renames and syncs.

Note [Carrying over]: one rename must commit, so the user's entries have to be in the new directory before the rename,
and in the old one until then: files get a second name by a hard link, directories are created again with links to their
files. If the process is killed at any moment, each file is where it was, and perhaps in a staging directory as well.
After the rename the user's original directories are exchanged with their copies: a process that works in one stays in
the same directory.
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
from raysharding.checkpoint.writing.file_plan import folders_of, make_parents
from raysharding.checkpoint.writing.save_files import has_save_name, other_entries
from raysharding.checkpoint.writing.save_record import own_sidecars
from raysharding.errors import CheckpointError

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(first: str, second: str) -> bool:
    """Exchange two directories atomically. Return False where kernel, C library or file system cannot.

    Raises:
        OSError: The kernel refused the exchange.
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


def sync(path: str) -> None:
    """Sync a file, or a directory's entries, to disk; without this a loss of power may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without fsync of directories, such as some FUSE ones
            raise
    finally:
        os.close(descriptor)


_NUM_LISTED = 8


def check_carry(directory: str, staging: str, *, try_links: bool = True) -> list[str]:
    """Refuse a directory that a save cannot replace without losing entries of the user's.

    Args:
        directory: The destination, which may be missing.
        staging: The directory of the new checkpoint; left unchanged.
        try_links: Try to hard-link each file; the links are removed again.

    Returns:
        The entries to carry over: `user_entries`.

    Raises:
        CheckpointError: Lists the entries that cannot be carried over, and why.
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
    """Return the entries of a local directory that no save of ours has written or copied, as `other_entries` does."""
    copied = own_sidecars(directory)
    return [entry for entry in other_entries(directory, folders_of(copied)) if entry not in copied]


def carry_over(directory: str, staging: str) -> set[str]:
    """Link the user's entries of the old directory into the new one (Note [Carrying over]).

    Returns:
        Paths of the links in the new directory.

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
            check_carry(directory, staging)  # lists all that cannot be linked, including entries added since
        raise
    return {path for entry in entries for path in _files(os.path.join(staging, entry))}


def keep_sidecars(directory: str, staging: str) -> None:
    """Copy the small files that the old save copied and the new one lacks.

    Raises:
        OSError: The disk is full or failed.
    """
    for name in own_sidecars(directory):
        is_file_now = any(os.path.isfile(os.path.join(staging, folder)) for folder in folders_of([name]))
        if not is_file_now and not os.path.lexists(os.path.join(staging, name)):
            make_parents(staging, name)
            shutil.copy2(os.path.join(directory, name), os.path.join(staging, name))


def swap_directories(old: str, directory: str) -> set[str]:
    """Exchange the user's original directories with their copies, right after the rename; return those exchanged.

    Args:
        old: The old directory.
        directory: The new one.
    """
    swapped = set()
    for entry in user_entries(old):
        source, target = os.path.join(old, entry), os.path.join(directory, entry)
        with suppress(OSError):  # a directory that its user may not write to cannot be moved: the copy stays
            if _is_directory(source) and _is_directory(target) and exchange(source, target):
                swapped.add(entry)
    return swapped


def hand_back(old: str, directory: str, *, carried: set[str], swapped: set[str]) -> None:
    """Link into the new directory what was added to the old one, or to the copies, during the renames.

    Args:
        old: The old directory, with the copies of the exchanged directories.
        directory: The new one.
        carried: From `carry_over`.
        swapped: From `swap_directories`.

    Raises:
        OSError: Something cannot be linked.
    """
    for entry in user_entries(old):
        source = os.path.join(old, entry)
        came = [path for path in _files(source) if path not in carried] if entry in swapped else [source]
        for path in came:
            _link(path, os.path.join(directory, os.path.relpath(path, old)))


def _without_links(directory: str, entry: str, probe: str) -> Iterator[str]:
    """Yield each file of an entry that cannot be hard-linked, and why. Links are made at `probe` and removed."""
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
        return None  # the user has removed the file meanwhile
    except OSError as error:
        return error.strerror
    return None


def _files(path: str) -> Iterator[str]:
    """Yield the paths of all entries at or below a path that are not directories."""
    if not _is_directory(path):
        yield path
        return
    for place, folders, names in os.walk(path, onerror=_raise_unless_gone):
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (os.path.join(place, name) for name in (*names, *linked))


def _link(source: str, target: str) -> None:
    """Hard-link a file, replacing what has the target's name; create a directory again with links to its files.

    Skips what the user removes meanwhile.
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
        sync(target)
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
