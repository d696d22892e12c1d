"""Saving without a moment in which the destination is half a checkpoint: write aside, fsync, rename last.

In a group, rank 0 calls `create_staging`, hands the path to the other ranks, which only write files into it, and after
all are done rank 0 calls `commit_staging`. One process alone uses `StagedDirectory`. An object store has no rename, and
so no staging directory: see `object_commit`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from raysharding.checkpoint.object_commit import prepare_objects, remove_objects
from raysharding.checkpoint.uri import is_remote
from raysharding.errors import CheckpointError

_STAGING_NAME: Final = re.compile(r"\.(.+)\.tmp-[0-9a-f]{12}")
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def new_token() -> str:
    """A random name part that keeps two saves to one destination apart."""
    return secrets.token_hex(6)


def staging_path(final: str | os.PathLike[str], token: str) -> str:
    """Absolute path of the temporary sibling of `final`: the same file system, so that a rename can commit it.

    Args:
        final: The destination. Where it is a symlink, the staging directory is beside its target.
        token: What `new_token` gave; the same on all ranks.
    """
    parent, name = os.path.split(os.path.realpath(final))
    return os.path.join(parent, staging_name(name, token))


def staging_name(name: str, token: str) -> str:
    """Name of a staging directory for a destination of this name."""
    return f".{name}.tmp-{token}"


def is_staging_path(path: str) -> bool:
    """Whether `path` is named as an uncommitted staging directory is."""
    return staged_name(os.path.basename(path)) is not None


def staged_name(name: str) -> str | None:
    """Name of the destination that a staging directory of this name is for; `None` where it is named as none."""
    match = _STAGING_NAME.fullmatch(name)
    return None if match is None else match[1]


def find_set_aside(final: str) -> str | None:
    """The previous checkpoint that a save to `final` set aside and did not live to replace, if there is one."""
    parent, name = os.path.split(os.path.realpath(final))
    pattern = re.compile(re.escape(f".{name}.old-") + "[0-9a-f]+")
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return None  # no parent directory: then nothing was set aside in it
    return next((os.path.join(parent, found) for found in names if pattern.fullmatch(found)), None)


def check_destination(final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a destination that a save must not replace. A missing or empty directory is always fine.

    Raises:
        CheckpointError: `final` exists and `overwrite` is not set, or it is not a checkpoint.
    """
    path = os.path.realpath(final)
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        raise CheckpointError("exists and is not a directory: a checkpoint is saved as a directory", path=path)
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror}", path=path) from error
    if not names:
        return
    if not overwrite:
        raise CheckpointError("exists already: pass overwrite=True, or save to another path", path=path)
    if ".git" in names or not any(name.endswith(".safetensors") for name in names):
        # Replacing removes all that the directory holds. Somebody's work is not a checkpoint.
        why = "holds a git repository" if ".git" in names else "holds no .safetensors file"
        what = f"{why}, so overwrite=True does not replace it: remove it yourself, or save to another path"
        raise CheckpointError(what, path=path)


def create_staging(final: str | os.PathLike[str], *, overwrite: bool, token: str | None = None) -> str:
    """Make the staging directory for `final`, and `final`'s parents where they are missing. One rank calls it.

    Returns:
        Absolute path of the empty staging directory; for a remote URI itself.

    Raises:
        CheckpointError: the destination is refused (`check_destination`), or the directory cannot be made.
    """
    if is_remote(os.fspath(final)):
        prepare_objects(os.fspath(final), overwrite=overwrite)
        return os.fspath(final)
    check_destination(final, overwrite=overwrite)
    path = staging_path(final, token or new_token())
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mkdir(path)
    except OSError as error:
        raise CheckpointError(f"cannot make a directory: {error.strerror}", path=path) from error
    return path


def commit_staging(staging: str, final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Make the staging directory the checkpoint at `final`. One rank calls it, after all ranks closed their files.

    Everything is on the disk before the rename, and the rename before this returns. The old checkpoint is removed
    after the new one is in its place.

    Raises:
        CheckpointError: the destination is refused, was taken meanwhile by another save, or the disk failed. Then
            `final` is as it was, and `staging` is still there.
    """
    if is_remote(staging):
        return  # its index was written last
    check_destination(final, overwrite=overwrite)
    path = os.path.realpath(final)
    try:
        _sync_tree(staging)
        old = None
        if overwrite:
            old = _rename_over(staging, path)
        else:
            _rename_new(staging, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        raise CheckpointError(f"cannot commit {staging}: {error.strerror}", path=path) from error
    if old is not None:
        try:
            shutil.rmtree(old)
        except OSError as error:
            # The save itself succeeded. Network file systems keep files that a reader has open.
            what = f"{path} is saved, but the checkpoint it replaced could not be removed from {old}: {error.strerror}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def make_directory(path: str) -> None:
    """Make a directory and its parents where they are missing, and put them on the disk.

    Raises:
        OSError: it cannot be made.
    """
    made = []
    parent = os.path.abspath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
        made.append(parent)
    os.makedirs(path, exist_ok=True)
    for parent in made:
        sync_directory(parent)


def commit_files(staging: str, directory: str, names: Sequence[str], *, remove: Sequence[str] = ()) -> None:
    """Move files of a staging directory into a directory that holds others, and remove the staging directory.

    Everything is on the disk before the first rename, and the renames before this returns. Each file changes in one
    step, in the order given; with `commit_staging` all change in one.

    Args:
        staging: A directory on the same file system.
        directory: Where the files go; those of the same names are replaced, all others stay.
        names: The files in `staging`, the one that makes the others visible last.
        remove: Files of `directory` that are removed after the last rename; a missing one is fine.

    Raises:
        CheckpointError: the disk failed.
    """
    try:
        _sync_tree(staging)
        for name in names:
            os.replace(os.path.join(staging, name), os.path.join(directory, name))
        for name in remove:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(staging)
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"cannot commit {staging}: {error.strerror}", path=directory) from error


def remove_staging(staging: str) -> None:
    """Remove an uncommitted staging directory and all in it. A missing one is fine.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if is_remote(staging):
        remove_objects(staging)
        return
    try:
        shutil.rmtree(staging)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot remove the unfinished save: {error.strerror}", path=staging) from error


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


class StagedDirectory:
    """A save by one process. Leaving the `with` block without `commit` removes what was written.

    Args:
        final: The destination directory.
        overwrite: Replace a checkpoint that is there.

    Raises:
        CheckpointError: as `create_staging`.
    """

    def __init__(self, final: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.final = os.path.realpath(final)
        """Absolute path of the destination."""
        self.path = create_staging(final, overwrite=overwrite)
        """Absolute path to write files into."""
        self._overwrite = overwrite
        self._open = True

    def commit(self) -> None:
        """Make what was written the checkpoint at `final`; see `commit_staging`."""
        assert self._open, "commit after commit or abort"
        commit_staging(self.path, self.final, overwrite=self._overwrite)
        self._open = False

    def abort(self) -> None:
        """Remove what was written. After `commit`, or a second time, it does nothing."""
        if self._open:
            self._open = False
            remove_staging(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.abort()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the first failure stays the one that is raised


def _rename_new(staging: str, path: str) -> None:
    """Rename to a place that is free. The kernel refuses one that another save took since it was checked."""
    try:
        os.rename(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "was made by another save meanwhile: pass overwrite=True, or save to another path"
            raise CheckpointError(what, path=path) from error
        raise


def _rename_over(staging: str, path: str) -> str | None:
    """Put `staging` in the place of `path`; return where the old directory is now, if there was one."""
    if not os.path.isdir(path):
        os.rename(staging, path)
        return None
    if _exchange(staging, path):
        return staging
    parent, name = os.path.split(path)
    old = os.path.join(parent, f".{name}.old-{new_token()}")
    os.rename(path, old)
    try:
        os.rename(staging, path)
    except OSError:
        os.rename(old, path)
        raise
    return old


def _exchange(first: str, second: str) -> bool:
    """Swap two directories in one step, where kernel, C library and file system can; else return False."""
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


def _sync_tree(directory: str) -> None:
    """Put every file and directory below `directory` on the disk. Cheap where their writers did so already."""
    for parent, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(parent)


def _raise(error: OSError) -> None:
    raise error
