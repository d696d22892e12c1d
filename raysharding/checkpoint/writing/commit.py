"""Atomic commits of a save: write into a staging directory, fsync, rename last.

In a group, rank 0 calls `create_staging` and sends the path to the other ranks, which only write files into the
directory; after all ranks are done, rank 0 calls `commit_staging`.

An object store has no rename, and so no staging directory: the file that makes the others a checkpoint is written last.
That file is the index, which a save into a store always has, or adapter_config.json: without it neither transformers
nor this package finds a checkpoint. A store has no replacement in one step.

Note [Two saves to one URI]: the save record claims the URI: the save that wrote it last goes on, and another one ends
in an error when it looks at the record. The names of the weight files hold the token of their save, so an aborted save
removes its own: all that is there only as long as the claim is its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from raysharding.checkpoint.format import (
    ADAPTER_CONFIG_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    OPTIMIZER_FOLDER,
    SAVE_RECORD_NAME,
    SINGLE_NAME,
    TRAINING_FOLDER,
    make_staging,
    new_token,
    renamed_staging,
    staging_path,
    unlock,
)
from raysharding.checkpoint.storage import Storage, is_mount_point, is_remote, join_path, os_errors, storage_of
from raysharding.checkpoint.writing.file_plan import folders_of
from raysharding.checkpoint.writing.save_files import save_files
from raysharding.checkpoint.writing.save_record import other_entries, own_sidecars, read_save_record
from raysharding.errors import CheckpointError, listed

COMMITS: Final = (INDEX_NAME, ADAPTER_CONFIG_NAME, SINGLE_NAME)
"""Files that make a directory a checkpoint; other libraries save a single file."""
_OURS: Final = (MANIFEST_NAME, SAVE_RECORD_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER)
"""Entries that an interrupted removal of a save of ours may leave."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def is_left_over(directory: str) -> bool:
    """Return True if a URI names objects of an uncommitted save. A local directory is committed by its name.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    if not is_remote(directory):
        return False
    storage = storage_of(directory)
    return all(storage.find(join_path(directory, name)).kind != "file" for name in COMMITS)


def remove_save(path: str) -> None:
    """Remove a save or part of one. Entries that no save has written stay in its directory.

    A local directory without such entries is removed in one step; else the files that make it a checkpoint go first.

    Raises:
        CheckpointError: The storage cannot be reached, or refuses.
        OSError: The directory cannot be renamed.
    """
    storage = storage_of(path)
    if not is_remote(path) and not other_entries(path):
        hidden = staging_path(path, new_token())
        os.rename(path, hidden)
        storage.remove_tree(hidden)
        return
    if storage.find(path).kind != "directory":
        return
    _remove_commits(storage, path)
    _remove_files(storage, path, own_sidecars(path))
    storage.remove(join_path(path, SAVE_RECORD_NAME))
    _remove_if_empty(storage, path)


def _remove_files(storage: Storage, directory: str, copied: Collection[str]) -> None:
    """Remove the files of a save and those that it copied, and folders that are empty then; all but its record."""
    files = {*save_files(storage, directory), *(join_path(directory, name) for name in copied)}
    storage.each(storage.remove, files - {join_path(directory, SAVE_RECORD_NAME)})
    for folder in (*reversed(folders_of(copied)), OPTIMIZER_FOLDER, TRAINING_FOLDER):
        _remove_if_empty(storage, join_path(directory, folder))


def _remove_if_empty(storage: Storage, directory: str) -> None:
    if storage.find(directory).kind == "directory" and not storage.list_names(directory):
        storage.remove_tree(directory)  # a store may keep the marker of an empty directory


def _remove_commits(storage: Storage, directory: str) -> None:
    """Remove the files that make a directory a save."""
    for name in (*COMMITS, MANIFEST_NAME):
        storage.remove(join_path(directory, name))


def check_claim(staging: str, token: str) -> None:
    """Check that a save still is the one that its URI is claimed for. A staging directory has one writer.

    Raises:
        CheckpointError: Another save has begun there.
    """
    if is_remote(staging) and read_save_record(staging).token != token:
        what = "another save to it has begun meanwhile, or it was removed: save to a path of its own"
        raise CheckpointError(what, path=staging)


def check_files(staging: str, names: Sequence[str]) -> None:
    """Check that the weights of a save are there once it is committed: another save to its URI may have removed them.

    Raises:
        CheckpointError: A file is missing; nothing is committed any more.
    """
    if is_remote(staging) and (missing := set(names) - set(storage_of(staging).list_names(staging))):
        _remove_commits(storage_of(staging), staging)
        what = f"another save to it has removed {min(missing)}: save to a path of its own"
        raise CheckpointError(what, path=staging)


def check_destination(final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a destination that a save must not replace. A missing or empty directory is never refused.

    Args:
        final: A local path, or a normal URI.
        overwrite: Allow a checkpoint there.

    Raises:
        CheckpointError: `final` exists and `overwrite` is not set, it is not a checkpoint, it holds entries that no
            save wrote (the error lists them), or it is a mount point.
    """
    remote = is_remote(os.fspath(final))
    path = os.fspath(final) if remote else os.path.realpath(final)
    storage = storage_of(path)
    stat = storage.find(path)
    if stat.kind == "missing":
        return
    if stat.kind != "directory":
        raise CheckpointError("exists and is not a directory: a checkpoint is saved as a directory", path=path)
    if not remote and is_mount_point(path):
        # Its siblings are on another file system, and a mount point cannot be renamed.
        what = "is a mount point, which no rename can replace, and a rename is what commits a save: save to a directory"
        raise CheckpointError(f"{what} in it, such as {os.path.join(path, 'model')}", path=path)
    names = storage.list_names(path)
    if not names:
        return
    if not overwrite:
        raise CheckpointError("exists already: pass overwrite=True, or save to another path", path=path)
    if others := other_entries(path):
        what = f"holds what no save wrote: {listed(others)}; overwrite=True replaces saves alone"
        raise CheckpointError(f"{what}: move these elsewhere, or save to another path", path=path)
    if not any(name.endswith(".safetensors") or (remote and name in _OURS) for name in names):
        what = "holds no .safetensors file, so overwrite=True does not replace it"
        raise CheckpointError(f"{what}: remove it yourself, or save to another path", path=path)


def check_writable(directory: str) -> None:
    """Create a directory of saves if it is missing, and write and remove a small file in it.

    Args:
        directory: A normal path or URI.

    Raises:
        CheckpointError: This process cannot write there.
    """
    probe = join_path(directory, f".raysharding-probe-{new_token()}")
    storage = storage_of(directory)
    if not is_remote(directory):
        with os_errors("cannot be written to", directory):
            os.makedirs(directory, exist_ok=True)
    storage.put(probe, b"probe")
    storage.remove(probe)


def create_staging(final: str | os.PathLike[str], *, overwrite: bool, token: str | None = None) -> str:
    """Create the staging directory for `final`, and the parents of `final`. One rank calls this.

    At a remote URI, removes the checkpoint that is there, and what an interrupted save left; a new `SaveRecord` claims
    the URI. It lists the small files of the old save until they are gone.

    Returns:
        Absolute path of the empty staging directory; a remote URI itself.

    Raises:
        CheckpointError: The destination is refused (`check_destination`), or the directory cannot be created.
    """
    check_destination(final, overwrite=overwrite)
    if is_remote(uri := os.fspath(final)):
        storage, copied = storage_of(uri), own_sidecars(uri)
        _remove_commits(storage, uri)  # before the claim, with which they would be a save of this token
        replace(read_save_record(uri), token=token or new_token()).write(uri)
        _remove_files(storage, uri, copied)
        return uri
    destination = os.path.realpath(final)
    try:
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        return make_staging(destination, token or new_token())
    except OSError as error:
        what = f"cannot make a directory: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what += "; a save is written beside its destination before one rename commits it, so "
            what += f"{os.path.dirname(destination)} must be writable: save to a directory whose parent is"
        raise CheckpointError(what, path=destination) from error


def commit_staging(staging: str, final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Rename the staging directory to `final`. One rank calls this, after all ranks have closed their files.

    All files are synced to disk before the rename, and the rename before this returns. The old checkpoint is removed
    after the new one has replaced it, with what came into its directory since `create_staging`.

    Raises:
        CheckpointError: Another save has taken the destination meanwhile, or the disk failed. `final` is then
            unchanged, and `staging` still exists.
    """
    if is_remote(staging):
        return  # the index, written last, has committed it
    path, old = os.path.realpath(final), None
    with os_errors(f"cannot commit {staging}", path):
        _sync_tree(staging)
        sync(os.path.dirname(path))  # where that fails, it does so before the rename
        if overwrite and os.path.isdir(path):
            old = _rename_over(staging, path)
        else:
            _rename_new(staging, path)
    unlock(staging)
    try:
        sync(os.path.dirname(path))
        if old is not None:
            storage_of(old).remove_tree(old)
    except (OSError, CheckpointError) as error:
        # The save itself succeeded. Network file systems keep files that a reader has opened.
        undone = "its folder was not synced" if old is None else f"what is left of the old one is in {old}"
        warnings.warn(f"{path} is saved, but {undone}: {error}", RuntimeWarning, stacklevel=2)


def remove_abandoned(staging: str) -> None:
    """Remove the staging directory of a killed process, or a checkpoint that one has replaced.

    Raises:
        OSError: The directory cannot be renamed.
        CheckpointError: It cannot be removed.
    """
    hidden = renamed_staging(staging, new_token())
    # A writer that is alive after all must fail rather than commit a directory that is being removed.
    os.rename(staging, hidden)
    storage_of(hidden).remove_tree(hidden)


def commit_files(staging: str, directory: str, names: Sequence[str], *, remove: Sequence[str] = ()) -> None:
    """Move files of a staging directory into a directory that holds others, and remove the staging directory.

    All files are synced to disk before the first rename, and the renames before this returns. Files are replaced one
    by one, in the order given; `commit_staging` replaces all at once.

    Args:
        staging: A directory on the same file system.
        directory: The destination. Files of the same names are replaced, all others stay.
        names: The files in `staging`; last the one that makes the others visible.
        remove: Files of `directory` to remove after the last rename; a missing one is not an error.

    Raises:
        CheckpointError: The disk failed.
    """
    with os_errors(f"cannot commit {staging}", directory):
        _sync_tree(staging)
        for name in names:
            os.replace(os.path.join(staging, name), os.path.join(directory, name))
        for name in remove:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(staging)
        sync(directory)


def remove_staging(staging: str, token: str | None = None) -> None:
    """Remove an uncommitted staging directory with its contents. A missing one is not an error.

    Args:
        staging: A local path, or a URI.
        token: Of the save that has ended: at a URI that another one has claimed, only the files with its token go.

    Raises:
        CheckpointError: The directory cannot be removed.
    """
    if is_remote(staging):
        storage = storage_of(staging)
        if token is None or read_save_record(staging).token == token:
            remove_save(staging)
        elif storage.find(staging).kind == "directory":
            storage.each(storage.remove, [path for path in save_files(storage, staging) if token in path])
        return
    try:
        storage_of(staging).remove_tree(staging)
    finally:
        unlock(staging)


def _rename_new(staging: str, path: str) -> None:
    """Rename to a free path. The kernel refuses a path that is taken, also by a save since the check."""
    try:
        os.rename(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "was made by another save meanwhile: pass overwrite=True, or save to another path"
            raise CheckpointError(what, path=path) from error
        raise


def _rename_over(staging: str, path: str) -> str:
    """Rename `staging` to the existing directory `path`; return the present path of that directory."""
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


def _sync_tree(directory: str) -> None:
    """Sync every file and directory below `directory` to disk. Cheap where their writers have done so already."""
    for parent, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


def _raise(error: OSError) -> None:
    raise error
