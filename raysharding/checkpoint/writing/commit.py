"""Saving without a moment in which the destination is half a checkpoint: write aside, fsync, rename last.

In a group, rank 0 calls `create_staging`, hands the path to the other ranks, which only write files into it, and after
all are done rank 0 calls `commit_staging`. One process alone uses `StagedDirectory`. An object store has no rename, and
so no staging directory: see `prepare_objects`.

Saving into an object store, which has no rename: the file that makes the others a checkpoint is written last.

That is the index, which a save here always has, or adapter_config.json: without it neither transformers nor this
package finds a checkpoint. What cannot be had is a replacement in one step.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

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
    split_path,
    storage_of,
)
from raysharding.checkpoint.writing.carry_over import (
    carry_over,
    check_carry,
    exchange,
    hand_back,
    keep_sidecars,
    swap_directories,
    sync_directory,
    user_entries,
)
from raysharding.checkpoint.writing.save_files import save_files
from raysharding.checkpoint.writing.save_record import own_sidecars
from raysharding.errors import CheckpointError

COMMITS: Final = (INDEX_NAME, ADAPTER_CONFIG_NAME, SINGLE_NAME)
"""What makes a directory a checkpoint; a save of somebody else's may be a single file."""
_OURS: Final = (MANIFEST_NAME, SAVE_RECORD_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER)
"""What only a save of ours leaves, where its removal broke off."""


def is_left_over(directory: str) -> bool:
    """Whether a path names objects that a save has not committed; local directories are committed by their name.

    Raises:
        CheckpointError: the store is out of reach.
    """
    if not is_remote(directory):
        return False
    storage = storage_of(directory)
    return all(storage.find(join_path(directory, name)).kind != "file" for name in COMMITS)


def remove_objects(directory: str) -> None:
    """Remove a checkpoint, or what there is of one; nobody finds half of it meanwhile.

    What no save of ours has put there stays.

    Raises:
        CheckpointError: the store is out of reach, or refuses.
    """
    storage = remote_storage(DEFAULT_REMOTE)
    copied = own_sidecars(directory)
    _remove_save(storage, directory)
    for name in (*copied, SAVE_RECORD_NAME):
        storage.remove_file(join_path(directory, name))
    for folder in (OPTIMIZER_FOLDER, TRAINING_FOLDER, ""):
        where = join_path(directory, folder) if folder else directory
        if storage.find(where).kind == "directory" and not storage.list_names(where):
            storage.remove_tree(where)  # a store may keep the mark of an empty directory


def _remove_save(storage: RemoteStorage, directory: str) -> None:
    """Remove the files of a save but its record, first those that make it a checkpoint."""
    if storage.find(directory).kind != "directory":
        return
    for name in COMMITS:
        storage.remove_file(join_path(directory, name))
    found = save_files(storage, directory)
    paths = [join_path(join_path(directory, folder) if folder else directory, name) for folder, name in found]
    storage.each(storage.remove_file, [path for path in paths if split_path(path)[1] != SAVE_RECORD_NAME])


def check_destination(final: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a destination that a save must not replace. A missing or empty directory is always fine.

    Args:
        final: A local path, or a normal URI.
        overwrite: Replace a checkpoint that is there.

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
        # What is beside it is another file system, and a mount point cannot be renamed.
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


def create_staging(final: str | os.PathLike[str], *, overwrite: bool, token: str | None = None) -> str:
    """Make the staging directory for `final`, and `final`'s parents where they are missing. One rank calls it.

    Returns:
        Absolute path of the empty staging directory; for a remote URI itself.

    Raises:
        CheckpointError: the destination is refused (`check_destination`), holds what is not a save's and cannot go
            with it (`check_carry`), or the directory cannot be made.
    """
    check_destination(final, overwrite=overwrite)
    if is_remote(os.fspath(final)):
        _remove_save(remote_storage(DEFAULT_REMOTE), os.fspath(final))
        return os.fspath(final)
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
    """Make the staging directory the checkpoint at `final`. One rank calls it, after all ranks closed their files.

    Everything is on the disk before the rename, and the rename before this returns. The old checkpoint is removed
    after the new one is in its place, where what no save wrote is, too.

    Raises:
        CheckpointError: the destination is refused, was taken meanwhile by another save, or the disk failed. Then
            `final` is as it was, and `staging` is still there.
    """
    if is_remote(staging):
        return  # its index was written last
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
        sync_directory(os.path.dirname(path))
    unlock(staging)
    if replaced is not None:
        try:
            _remove_replaced(replaced, path)
        except OSError as error:
            # The save itself succeeded. Network file systems keep files that a reader has open.
            what = f"{path} is saved, but the checkpoint it replaced could not be removed from {replaced.path}"
            what += f": {error.strerror}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)


def remove_checkpoint(path: str) -> None:
    """Remove a local save in one step. What no save of ours has put into its directory stays there.

    Raises:
        CheckpointError: It holds what cannot be kept apart from it (`check_carry`).
        OSError: It cannot be renamed, or not be removed.
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
    """Remove a staging directory that a killed process has left.

    Raises:
        OSError: It cannot be renamed, or not be removed.
    """
    hidden = renamed_staging(staging, new_token())
    lock(staging)
    try:
        # A writer that lives after all must fail, and not commit what is being removed.
        os.rename(staging, hidden)
        _remove_tree(hidden)
    finally:
        unlock(staging)


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
    with os_errors(f"cannot commit {staging}", directory):
        _sync_tree(staging)
        for name in names:
            os.replace(os.path.join(staging, name), os.path.join(directory, name))
        for name in remove:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(staging)
        sync_directory(directory)


def remove_staging(staging: str) -> None:
    """Remove an uncommitted staging directory and all in it. A missing one is fine.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if is_remote(staging):
        remove_objects(staging)
        return
    try:
        with os_errors("cannot remove the unfinished save", staging), suppress(FileNotFoundError):
            _remove_tree(staging)
    finally:
        unlock(staging)


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


@dataclass(frozen=True)
class _Replaced:
    """A directory that another one has taken the place of."""

    path: str
    """Where it is now."""
    carried: set[str] = field(default_factory=set)
    """What `carry_over` returned."""
    swapped: set[str] = field(default_factory=set)
    """What `swap_directories` returned."""


def _replace(staging: str, path: str) -> _Replaced:
    """Put `staging` in the place of a directory, with what is the user's there; `_remove_replaced` must follow."""
    carried = carry_over(path, staging)
    sync_directory(staging)
    # It gets a name that those look for who remove what was left behind.
    lock(path)
    try:
        old = _rename_over(staging, path)
    except BaseException:
        unlock(path)
        raise
    return _Replaced(old, carried, swap_directories(old, path))


def _remove_replaced(replaced: _Replaced, path: str) -> None:
    """Remove what was at `path`."""
    try:
        hand_back(replaced.path, path, carried=replaced.carried, swapped=replaced.swapped)
        _remove_tree(replaced.path)
    finally:
        unlock(path)


def _remove_tree(directory: str) -> None:
    """Remove a directory and all in it, directories that their owner may not write to as well."""
    try:
        shutil.rmtree(directory)
    except PermissionError:
        for place, _, _ in os.walk(directory):
            os.chmod(place, 0o700)
        shutil.rmtree(directory)


def _rename_new(staging: str, path: str) -> None:
    """Rename to a place that is free. The kernel refuses one that another save took since it was checked."""
    try:
        os.rename(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "was made by another save meanwhile: pass overwrite=True, or save to another path"
            raise CheckpointError(what, path=path) from error
        raise


def _rename_over(staging: str, path: str) -> str:
    """Put `staging` in the place of the directory `path`; return where that is now."""
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
