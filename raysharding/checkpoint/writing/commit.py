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

import errno
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from raysharding.checkpoint.format import (
    ADAPTER_CONFIG_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    OPTIMIZER_FOLDER,
    SAVE_RECORD_NAME,
    SINGLE_NAME,
    TRAINING_FOLDER,
    lock,
    make_staging,
    new_token,
    renamed_staging,
    unlock,
)
from raysharding.checkpoint.storage import (
    DEFAULT_REMOTE,
    RemoteStorage,
    is_remote,
    join_path,
    mount_points_below,
    os_errors,
    remote_storage,
    storage_of,
)
from raysharding.checkpoint.writing.carry_over import (
    carry_over,
    check_carry,
    exchange,
    hand_back,
    keep_sidecars,
    swap_directories,
    sync,
    user_entries,
)
from raysharding.checkpoint.writing.file_plan import folders_of
from raysharding.checkpoint.writing.save_files import save_files
from raysharding.checkpoint.writing.save_record import own_sidecars, read_save_record
from raysharding.errors import CheckpointError

COMMITS: Final = (INDEX_NAME, ADAPTER_CONFIG_NAME, SINGLE_NAME)
"""Files that make a directory a checkpoint; other libraries save a single file."""
_OURS: Final = (MANIFEST_NAME, SAVE_RECORD_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER)
"""Entries that an interrupted removal of a save of ours may leave."""


def is_left_over(directory: str) -> bool:
    """Return True if a URI names objects of an uncommitted save. A local directory is committed by its name.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    if not is_remote(directory):
        return False
    storage = storage_of(directory)
    return all(storage.find(join_path(directory, name)).kind != "file" for name in COMMITS)


def remove_objects(directory: str) -> None:
    """Remove a checkpoint or part of one. No reader finds part of it meanwhile.

    Entries that no save of ours has written stay.

    Raises:
        CheckpointError: The store cannot be reached, or refuses.
    """
    storage = remote_storage(DEFAULT_REMOTE)
    copied = own_sidecars(directory)
    _remove_save(storage, directory)
    for name in (*copied, SAVE_RECORD_NAME):
        storage.remove(join_path(directory, name))
    for folder in (*reversed(folders_of(copied)), OPTIMIZER_FOLDER, TRAINING_FOLDER, ""):
        where = join_path(directory, folder) if folder else directory
        if storage.find(where).kind == "directory" and not storage.list_names(where):
            storage.remove_tree(where)  # a store may keep the marker of an empty directory


def _remove_save(storage: RemoteStorage, directory: str) -> None:
    """Remove the files of a save except its record; first those that make it a checkpoint."""
    if _remove_commits(storage, directory):
        record = join_path(directory, SAVE_RECORD_NAME)
        storage.each(storage.remove, [path for path in save_files(storage, directory) if path != record])


def _remove_commits(storage: RemoteStorage, directory: str) -> bool:
    """Remove the files that make a directory a checkpoint; return False if there is no directory."""
    if storage.find(directory).kind != "directory":
        return False
    for name in COMMITS:
        storage.remove(join_path(directory, name))
    return True


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
        _remove_commits(remote_storage(DEFAULT_REMOTE), staging)
        what = f"another save to it has removed {min(missing)}: save to a path of its own"
        raise CheckpointError(what, path=staging)


def check_destination(final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a destination that a save must not replace. A missing or empty directory is never refused.

    Args:
        final: A local path, or a normal URI.
        overwrite: Allow a checkpoint there.

    Raises:
        CheckpointError: `final` exists and `overwrite` is not set, it is not a checkpoint, or it is a mount point.
    """
    remote = is_remote(os.fspath(final))
    path = os.fspath(final) if remote else os.path.realpath(final)
    storage = storage_of(path)
    found = storage.find(path)
    if found.kind == "missing":
        return
    if found.kind != "directory":
        raise CheckpointError("exists and is not a directory: a checkpoint is saved as a directory", path=path)
    if not remote and path in mount_points_below(path):
        # Its siblings are on another file system, and a mount point cannot be renamed.
        what = "is a mount point, which no rename can replace, and a rename is what commits a save: save to a directory"
        raise CheckpointError(f"{what} in it, such as {os.path.join(path, 'model')}", path=path)
    names = storage.list_names(path)
    if not names:
        return
    if not overwrite:
        raise CheckpointError("exists already: pass overwrite=True, or save to another path", path=path)
    # A directory that holds other work is not a checkpoint.
    is_git = not remote and ".git" in names
    if is_git or not any(name.endswith(".safetensors") or (remote and name in _OURS) for name in names):
        why = "holds a git repository" if is_git else "holds no .safetensors file"
        what = f"{why}, so overwrite=True does not replace it: remove it yourself, or save to another path"
        raise CheckpointError(what, path=path)


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

    At a remote URI, removes the checkpoint that is there, and what an interrupted save left. Entries that no save
    writes stay; so do the small files that the old save copied: the new `SaveRecord`, which claims the URI, lists them.

    Returns:
        Absolute path of the empty staging directory; a remote URI itself.

    Raises:
        CheckpointError: The destination is refused (`check_destination`), holds entries of the user's that cannot be
            carried over (`check_carry`), or the directory cannot be created.
    """
    check_destination(final, overwrite=overwrite)
    if is_remote(uri := os.fspath(final)):
        storage = remote_storage(DEFAULT_REMOTE)
        _remove_commits(storage, uri)  # before the claim, with which they would be a save of this token
        replace(read_save_record(uri), token=token or new_token()).write(uri)
        _remove_save(storage, uri)
        return uri
    destination = os.path.realpath(final)
    try:
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        path = make_staging(destination, token or new_token())
    except OSError as error:
        what = f"cannot make a directory: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what += "; a save is written beside its destination before one rename commits it, so "
            what += f"{os.path.dirname(destination)} must be writable: save to a directory whose parent is"
        raise CheckpointError(what, path=destination) from error
    try:
        check_carry(destination, path)
    except BaseException:
        remove_staging(path)
        raise
    return path


def commit_staging(staging: str, final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Rename the staging directory to `final`. One rank calls this, after all ranks have closed their files.

    All files are synced to disk before the rename, and the rename before this returns. The old checkpoint is removed
    after the new one has replaced it; entries that no save wrote are carried over.

    Raises:
        CheckpointError: The destination is refused, another save has taken it meanwhile, or the disk failed. `final` is
            then unchanged, and `staging` still exists.
    """
    if is_remote(staging):
        return  # the index, written last, has committed it
    check_destination(final, overwrite=overwrite)
    path = os.path.realpath(final)
    replaced = None
    with os_errors(f"cannot commit {staging}", path):
        if overwrite and os.path.isdir(path):
            keep_sidecars(path, staging)
            _sync_tree(staging)
            replaced = _replace(staging, path)
        else:
            _sync_tree(staging)
            _rename_new(staging, path)
        sync(os.path.dirname(path))
    unlock(staging)
    if replaced is not None:
        try:
            _remove_replaced(replaced, path)
        except OSError as error:
            # The save itself succeeded. Network file systems keep files that a reader has opened.
            what = f"{path} is saved, but the checkpoint it replaced could not be removed from {replaced.path}"
            what += f": {error.strerror}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def remove_checkpoint(path: str) -> None:
    """Remove a local save in one step. Entries that no save of ours has written stay in its directory.

    Raises:
        CheckpointError: The directory holds entries that cannot be carried over (`check_carry`).
        OSError: The directory cannot be renamed or removed.
    """
    hidden = make_staging(path, new_token())
    try:
        if user_entries(path):
            replaced = _replace(hidden, path)
        else:
            lock(path)
            os.rename(path, hidden)
            replaced = _Replaced(hidden)
    except BaseException:
        unlock(path)
        remove_staging(hidden)
        raise
    unlock(hidden)
    _remove_replaced(replaced, path)


def remove_abandoned(staging: str) -> None:
    """Remove the staging directory of a killed process.

    Raises:
        OSError: The directory cannot be renamed or removed.
    """
    hidden = renamed_staging(staging, new_token())
    lock(staging)
    try:
        # A writer that is alive after all must fail rather than commit a directory that is being removed.
        os.rename(staging, hidden)
        _remove_tree(hidden)
    finally:
        unlock(staging)


def make_directory(path: str) -> None:
    """Create a directory and its missing parents, and sync them to disk.

    Raises:
        OSError: The directory cannot be created.
    """
    made = []
    parent = os.path.abspath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
        made.append(parent)
    os.makedirs(path, exist_ok=True)
    for parent in made:
        sync(parent)


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
        storage = remote_storage(DEFAULT_REMOTE)
        if token is None or read_save_record(staging).token == token:
            remove_objects(staging)
        elif storage.find(staging).kind == "directory":
            storage.each(storage.remove, [path for path in save_files(storage, staging) if token in path])
        return
    try:
        with os_errors("cannot remove the unfinished save", staging), suppress(FileNotFoundError):
            _remove_tree(staging)
    finally:
        unlock(staging)


@dataclass(frozen=True)
class _Replaced:
    """A directory that another one has replaced."""

    path: str
    """Its present path."""
    carried: set[str] = field(default_factory=set)
    """From `carry_over`."""
    swapped: set[str] = field(default_factory=set)
    """From `swap_directories`."""


def _replace(staging: str, path: str) -> _Replaced:
    """Replace a directory by `staging` and carry the user's entries over; `_remove_replaced` must follow."""
    carried = carry_over(path, staging)
    sync(staging)
    # The old directory gets the name of a staging directory: without a lock, another save would remove it.
    lock(path)
    try:
        old = _rename_over(staging, path)
    except BaseException:
        unlock(path)
        raise
    return _Replaced(old, carried, swap_directories(old, path))


def _remove_replaced(replaced: _Replaced, path: str) -> None:
    """Remove the directory that was at `path`."""
    try:
        hand_back(replaced.path, path, carried=replaced.carried, swapped=replaced.swapped)
        _remove_tree(replaced.path)
    finally:
        unlock(path)


def _remove_tree(directory: str) -> None:
    """Remove a directory with its contents, including directories that their owner may not write to."""
    try:
        shutil.rmtree(directory)
    except PermissionError:
        for place, _, _ in os.walk(directory):
            os.chmod(place, 0o700)
        shutil.rmtree(directory)


def _rename_new(staging: str, path: str) -> None:
    """Rename to a free path. The kernel refuses a path that another save has taken since the check."""
    try:
        os.rename(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "was made by another save meanwhile: pass overwrite=True, or save to another path"
            raise CheckpointError(what, path=path) from error
        raise


def _rename_over(staging: str, path: str) -> str:
    """Rename `staging` to the existing directory `path`; return the present path of that directory."""
    if exchange(staging, path):
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


def _sync_tree(directory: str) -> None:
    """Sync every file and directory below `directory` to disk. Cheap where their writers have done so already."""
    for parent, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


def _raise(error: OSError) -> None:
    raise error
