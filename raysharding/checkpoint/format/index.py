"""Find the files of a checkpoint: resolve the user's path, check the index, read small files beside the weights.

No weight file is read here; `header.py` does that.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from raysharding.checkpoint.format.header import parse_object
from raysharding.checkpoint.format.names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    INDEX_NAME,
    SINGLE_NAME,
)
from raysharding.checkpoint.format.staging import find_set_aside, staged_name
from raysharding.checkpoint.storage import (
    Storage,
    is_remote,
    join_path,
    normal_path,
    read_bytes,
    require_file,
    split_path,
)
from raysharding.errors import CheckpointError, listed, shown

_MAX_NAME_CHARS: Final = 255
_SUFFIX: Final = ".safetensors"
_SHARD_NAME: Final = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?\.safetensors$")
"""One of several files. Without an index nothing shows that all are there: a save or a download may have ended."""
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX: Final = ".safetensors.index.json"
MAX_JSON_BYTES: Final = 256 << 20
"""Longest index, manifest or config.json that is read."""
_CONVERT: Final = (
    "convert it once with transformers: AutoModel.from_pretrained(path).save_pretrained(new_path) writes safetensors"
)


@dataclass(frozen=True)
class FileSet:
    """The files of one checkpoint."""

    directory: str
    """Absolute path or URI of the directory that holds all of them."""
    names: tuple[str, ...]
    """File names, sorted. All are regular files, or symlinks to regular files."""
    weight_map: dict[str, str] | None
    """Tensor → file name, as the index says; `None` where there is no index."""
    index_path: str | None
    """Absolute path or URI of the index, or `None`."""
    has_adapters: bool = False
    """True if a directory was given that holds peft's adapter_config.json beside a whole model."""


def resolve_files(storage: Storage, path: str) -> FileSet:
    """Find the files of the checkpoint at `path`.

    Args:
        storage: The storage of the path.
        path: A directory, a `.safetensors` file or an index JSON; a local path or a URI.

    Raises:
        CheckpointError: Nothing usable is there, the directory is ambiguous, or the index is malformed or unsafe.
    """
    normal = normal_path(path)
    stat = storage.find(normal)
    if stat.kind == "directory":
        return _resolve_directory(storage, normal)
    if stat.kind == "missing":
        raise _nothing_there(path, normal)
    directory, name = split_path(normal)
    if name.endswith(_INDEX_SUFFIX):
        return _read_index(storage, normal)
    if name.endswith(_SUFFIX):
        # The user named this file, so a symlink to another directory is the user's choice.
        require_file(stat, normal)
        return FileSet(directory, (name,), None, None)
    what = f"is neither a directory, nor a {_SUFFIX} file, nor a {_INDEX_SUFFIX}"
    if name.endswith(_PICKLED):
        what += f", and pickled weights are never read; {_CONVERT}"
    raise CheckpointError(what, path=path)


def read_json(
    storage: Storage, directory: str, name: str, called: str = "", *, strict: bool = True
) -> dict[str, Any] | None:
    """Parse a JSON file in `directory`; return `None` where there is none.

    Args:
        storage: The storage of the directory.
        directory: Path or URI.
        name: Name of the file.
        called: What an error calls the file besides its path, with a space behind it.
        strict: Refuse what Python's JSON dialect adds to JSON. Not for configs, which transformers reads in that
            dialect: those of Mamba hold Infinity.

    Raises:
        CheckpointError: The file cannot be read, or is not a JSON object.
    """
    data = read_beside(storage, directory, name, MAX_JSON_BYTES)
    try:
        return None if data is None else parse_object(data, strict=strict)
    except ValueError as error:
        raise CheckpointError(f"{called}{error}", path=join_path(directory, name)) from error


def read_beside(storage: Storage, directory: str, name: str, max_bytes: int) -> bytes | None:
    """Read a whole small file in `directory`, after checking its kind and size; return `None` where there is none."""
    storage.check_inside(directory, name)
    path = join_path(directory, name)
    stat = storage.find(path)
    if stat.kind == "missing":
        return None
    require_file(stat, path)
    with closing(storage.open(path)) as file:
        num_bytes = file.stat.num_bytes
        if num_bytes > max_bytes:
            what = f"has {num_bytes} bytes, which is over the cap of {max_bytes} bytes for a file beside the weights"
            raise CheckpointError(what, path=path)
        return read_bytes(file, 0, num_bytes)


def _resolve_directory(storage: Storage, directory: str) -> FileSet:
    if not is_remote(directory) and staged_name(split_path(directory)[1]) is not None:
        raise CheckpointError("is the temporary directory of an unfinished save: its files are partial", path=directory)
    names = storage.list_names(directory)
    if INDEX_NAME in names:
        files = _read_index(storage, join_path(directory, INDEX_NAME))
        if SINGLE_NAME in names and SINGLE_NAME not in files.names:
            what = f"holds both {INDEX_NAME} and a {SINGLE_NAME} outside it: give the path of the one you mean"
            raise CheckpointError(what, path=directory)
        return replace(files, has_adapters=ADAPTER_CONFIG_NAME in names)
    weight_files = [name for name in names if name.endswith(_SUFFIX)]
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if SINGLE_NAME in weight_files:
        weight_files = [SINGLE_NAME]
    elif ADAPTER_NAME in weight_files and ADAPTER_CONFIG_NAME in names:
        weight_files = [ADAPTER_NAME]
    elif len(indexes) == 1:
        return _read_index(storage, join_path(directory, indexes[0]))
    if len(weight_files) != 1 or _SHARD_NAME.search(weight_files[0]):
        raise _no_checkpoint(directory, names, weight_files)
    storage.check_inside(directory, weight_files[0])
    path = join_path(directory, weight_files[0])
    require_file(storage.find(path), path)
    has_adapters = weight_files == [SINGLE_NAME] and ADAPTER_CONFIG_NAME in names
    return FileSet(directory, (weight_files[0],), None, None, has_adapters)


def _nothing_there(path: str, normal: str) -> CheckpointError:
    if is_remote(normal):
        what = "no such file or directory in the store: check bucket, path and, in the query, region and endpoint"
        return CheckpointError(what, path=path)
    aside = find_set_aside(normal)
    if aside is not None:
        what = f"no such directory, but an interrupted save left the previous checkpoint in {aside}: rename it back"
        return CheckpointError(what, path=path)
    what = "no such file or directory"
    if not os.path.isabs(path) and path.count("/") == 1:
        what += "; to read a model of the Hugging Face hub: pip install 'raysharding[hf]'"
    return CheckpointError(what, path=path)


def _no_checkpoint(directory: str, names: list[str], found: list[str]) -> CheckpointError:
    """Return the error for a directory without a usable checkpoint: what it holds, and the cure."""
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if found:
        what, cure = f"holds {len(found)} {_SUFFIX} files and no {INDEX_NAME}", "give one file, or restore the index"
    elif pickled:
        what, cure = f"holds no {_SUFFIX} file, only pickled weights, which are never read", _CONVERT
    else:
        what, cure = f"holds no {_SUFFIX} file", "give the directory or index of the weights"
    held = listed(found or pickled or names) or "nothing"
    return CheckpointError(f"{what}; it holds {held}: {cure}", path=directory)


def _read_index(storage: Storage, path: str) -> FileSet:
    """Parse an index and check each file name in it. The tensors are checked later, against the headers."""
    directory, index_name = split_path(path)
    index = read_json(storage, directory, index_name, "index ")
    if index is None:
        raise CheckpointError("is gone since the directory was listed", path=path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("index has no weight_map with a tensor in it", path=path)
    names: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"index maps it to {shown(name)}, not to a file name", path=path, tensor=tensor)
        names.setdefault(name, tensor)
    for name, tensor in names.items():
        _check_name(path, name, tensor)

    def check_file(name: str) -> None:
        storage.check_inside(directory, name)
        stat = storage.find(join_path(directory, name))
        if stat.kind == "missing":
            what = f"index names the file {name!r}, which is missing"
            raise CheckpointError(what, path=path, tensor=names[name])
        require_file(stat, join_path(directory, name))

    storage.each(check_file, names)
    return FileSet(directory, tuple(sorted(names)), weight_map, path)


def _check_name(path: str, name: str, tensor: str) -> None:
    """Refuse a name that is not the plain name of a safetensors file."""
    what = f"index names the file {shown(name)}"
    if re.search(r"[/\\\0]", name) or name.startswith(".") or len(name) > _MAX_NAME_CHARS:
        what += ": only plain names of files beside the index are allowed, nothing that leaves its directory"
        raise CheckpointError(what, path=path, tensor=tensor)
    if not name.endswith(_SUFFIX):
        raise CheckpointError(f"{what}, which is not a {_SUFFIX} file; {_CONVERT}", path=path, tensor=tensor)
