"""Saving into an object store, which has no rename: the file that makes the others a checkpoint is written last.

That is the index, which a save here always has, or adapter_config.json: without it neither transformers nor this
package finds a checkpoint. What cannot be had is a replacement in one step.
"""

from __future__ import annotations

from typing import Final

from raysharding.checkpoint.names import (
    ADAPTER_CONFIG_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    OPTIMIZER_FOLDER,
    SAVE_RECORD_NAME,
    SINGLE_NAME,
    TRAINING_FOLDER,
)
from raysharding.checkpoint.remote_options import DEFAULT_REMOTE
from raysharding.checkpoint.remote_storage import RemoteStorage, remote_storage
from raysharding.checkpoint.save_files import save_files
from raysharding.checkpoint.save_record import own_sidecars
from raysharding.checkpoint.uri import is_remote, join_path, split_path
from raysharding.errors import CheckpointError

COMMITS: Final = (INDEX_NAME, ADAPTER_CONFIG_NAME, SINGLE_NAME)
"""What makes a directory a checkpoint; a save of somebody else's may be a single file."""
_OURS: Final = (MANIFEST_NAME, SAVE_RECORD_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER)
"""What only a save of ours leaves, where its removal broke off."""


def prepare_objects(directory: str, *, overwrite: bool) -> None:
    """Make room for a save. One rank calls it.

    With `overwrite` a checkpoint that is there is removed now, and what an interrupted save left. What no save writes
    stays, small files that the old one has copied with it, and so does its `SaveRecord`, which says which those are.

    Raises:
        CheckpointError: something is there, and `overwrite` is not set or it is no checkpoint; or the store is out of
            reach.
    """
    storage = remote_storage(DEFAULT_REMOTE)
    found = storage.find(directory)
    if found.kind == "file":
        raise CheckpointError("exists and is not a directory: a checkpoint is saved as a directory", path=directory)
    names = storage.list_names(directory) if found.kind == "directory" else []
    if not names:
        return
    if not overwrite:
        raise CheckpointError("exists already: pass overwrite=True, or save to another path", path=directory)
    if not any(name.endswith(".safetensors") or name in _OURS for name in names):
        what = "holds no .safetensors file, so overwrite=True does not replace it: remove it yourself, or save to "
        raise CheckpointError(what + "another path", path=directory)
    _remove_save(storage, directory)


def is_left_over(directory: str) -> bool:
    """Whether a path names objects that a save has not committed; local directories are committed by their name.

    Raises:
        CheckpointError: the store is out of reach.
    """
    if not is_remote(directory):
        return False
    storage = remote_storage(DEFAULT_REMOTE)
    return all(storage.find(join_path(directory, name)).kind != "file" for name in COMMITS)


def remove_objects(directory: str) -> None:
    """Remove a checkpoint, or what there is of one; nobody finds half of it meanwhile.

    What no save of ours has put there stays.

    Raises:
        CheckpointError: the store is out of reach, or refuses.
    """
    storage = remote_storage(DEFAULT_REMOTE)
    if storage.find(directory).kind != "directory":
        return
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
    for name in COMMITS:
        storage.remove_file(join_path(directory, name))
    found = save_files(storage, directory)
    paths = [join_path(join_path(directory, folder) if folder else directory, name) for folder, name in found]
    storage.each(storage.remove_file, [path for path in paths if split_path(path)[1] != SAVE_RECORD_NAME])
