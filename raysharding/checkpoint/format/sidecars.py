"""List and read the small files of a checkpoint's directory that a save copies beside the new weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from raysharding.checkpoint.format.header import parse_object
from raysharding.checkpoint.format.index import read_beside
from raysharding.checkpoint.format.names import MANIFEST_NAME, OPTIMIZER_FOLDER, SAVE_RECORD_NAME, TRAINING_FOLDER
from raysharding.checkpoint.storage import Storage, is_remote, join_path, storage_of
from raysharding.errors import CheckpointError

_MAX_BYTES: Final = 64 << 20
"""Size at which a file, or all files of one folder together, are large."""
_MAX_MODULE_BYTES: Final = 1 << 30
"""Size at which a file of a module is large."""
_MAX_ENTRIES: Final = 100
"""Most entries of a folder; one with more holds data."""
_MAX_DEPTH: Final = 3
_WEIGHTS: Final = re.compile(
    r"\.(safetensors|bin|pth?|ckpt|h5|msgpack|onnx|gguf|ot|npz|pkl|pickle|distcp|tflite)\b", re.IGNORECASE
)
"""Weights and optimizer state of any library, with their indexes."""
_NO_SIDECAR: Final = re.compile(
    r"^\.|^events\.out\.|\.(zip|tar|gz|parquet|arrow|py|pyc|so|sh|ipynb|log|lock|tmp|bak)\b", re.IGNORECASE
)
"""Data, code, logs, and what is hidden."""
_MODULES_NAME: Final = "modules.json"
_OURS: Final = (MANIFEST_NAME, SAVE_RECORD_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER)
"""Files and folders that a save writes itself."""


def list_sidecar_files(storage: Storage, directory: str) -> tuple[str, ...]:
    """Return the small files beside weights and in folders there, as sorted relative paths with `/` in them.

    They are those of tokenizers, processors and configs, README, LICENSE. Never weights or optimizer state, never code,
    never a file over 64 MiB or a symlink that leaves the checkpoint. A folder that holds weights is another checkpoint:
    nothing of it counts, unless modules.json of sentence-transformers names it as a part of the model; then its
    weights count too, up to 1 GiB. Nothing counts of a folder that is a symlink, is hidden, cannot be listed, or has
    over 100 entries or 64 MiB. A save copies these files beside the new weights.

    Raises:
        CheckpointError: The directory cannot be listed.
    """
    return tuple(sorted(_list_folder(storage, directory, "", _module_folders(storage, directory))))


def is_sidecar_name(name: str) -> bool:
    """Return True if a file of this relative path may be one of `list_sidecar_files`."""
    *folders, last = parts = name.split("/")
    return all(map(_is_plain, parts)) and (bool(folders) or not _WEIGHTS.search(last))


def read_sidecar(storage: Storage, directory: str, name: str) -> bytes:
    """Read one of `list_sidecar_files`.

    Raises:
        CheckpointError: The name cannot be one of them, or the file is gone or cannot be read.
    """
    if not is_sidecar_name(name):
        raise CheckpointError(f"{name!r} is no file that a save copies", path=directory)
    data = read_beside(storage, directory, name, _MAX_MODULE_BYTES)
    if data is None:
        raise CheckpointError("is gone since the directory was listed", path=join_path(directory, name))
    return data


class Sidecars:
    """The small files of a checkpoint's directory, in memory once they are read: a save does not need their origin.

    Files of over 64 MiB in all, as modules of sentence-transformers may have, are read anew each time.
    """

    def __init__(self, directory: str) -> None:
        """Read nothing yet.

        Args:
            directory: A normal path or URI.
        """
        self._directory = directory
        self._files: dict[str, bytes] | None = None

    def read(self) -> dict[str, bytes]:
        """Return name → content of `list_sidecar_files`; none of a local directory that this process does not see.

        Raises:
            CheckpointError: The files cannot be read; the next call tries again.
        """
        if self._files is None:
            directory = self._directory
            if not is_remote(directory) and not os.path.isdir(directory):
                return {}
            storage = storage_of(directory)
            names = list_sidecar_files(storage, directory)
            contents = storage.each(lambda name: read_sidecar(storage, directory, name), names)
            files = dict(zip(names, contents, strict=True))
            if sum(map(len, contents)) >= _MAX_BYTES:
                return files
            self._files = files
        return self._files


def _list_folder(storage: Storage, directory: str, folder: str, modules: frozenset[str]) -> Iterator[str]:
    """Yield the files of a folder, which is relative and empty for the directory itself, and those of its folders."""
    where = join_path(directory, folder) if folder else directory
    entries = storage.list_names(where)
    is_module = any(f"{folder}/".startswith(f"{module}/") for module in modules)
    if folder and not is_module and (len(entries) > _MAX_ENTRIES or any(map(_WEIGHTS.search, entries))):
        return
    names = [name for name in entries if _is_plain(name) and (is_module or not _WEIGHTS.search(name))]
    stats = storage.each(lambda name: storage.find(join_path(where, name)), names)
    sizes = {f"{folder}/{name}".lstrip("/"): one for name, one in zip(names, stats, strict=True)}
    limit = _MAX_MODULE_BYTES if is_module else _MAX_BYTES
    files = [path for path, one in sizes.items() if one.kind == "file" and one.num_bytes < limit]
    if not folder or is_module or sum(sizes[path].num_bytes for path in files) < _MAX_BYTES:
        yield from (path for path in files if _is_inside(storage, directory, path))
    for path, one in sizes.items():
        if one.kind == "directory" and path.count("/") < _MAX_DEPTH and _is_entered(join_path(directory, path)):
            yield from _list_folder(storage, directory, path, modules)


def _is_entered(folder: str) -> bool:
    """Return False for symlinks, which may lead in circles, and for folders such as `lost+found`."""
    return is_remote(folder) or (not os.path.islink(folder) and os.access(folder, os.R_OK | os.X_OK))


def _module_folders(storage: Storage, directory: str) -> frozenset[str]:
    """Return the folders that modules.json of sentence-transformers names; only compared with what is listed."""
    stat = storage.find(join_path(directory, _MODULES_NAME))
    if stat.kind != "file" or stat.num_bytes >= _MAX_BYTES or not _is_inside(storage, directory, _MODULES_NAME):
        return frozenset()
    data = read_beside(storage, directory, _MODULES_NAME, _MAX_BYTES)
    try:
        modules = parse_object(b'{"modules":%b}' % (data or b"[]"), strict=False)["modules"]
    except ValueError:
        return frozenset()
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return frozenset(path.strip("/") for path in paths if isinstance(path, str)) - {""}


def _is_plain(name: str) -> bool:
    """Return True for the name of a file or folder that may be copied, weights among them."""
    return bool(name) and name not in _OURS and not re.search(r"[\\\0]", name) and not _NO_SIDECAR.search(name)


def _is_inside(storage: Storage, directory: str, name: str) -> bool:
    try:
        storage.check_inside(directory, name)
    except CheckpointError:
        return False
    return True
