"""Which files make up a checkpoint: the user's path resolved, the index checked, symlinks kept inside.

Nothing here looks into a weight file; that is `header.py`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from raysharding.checkpoint.commit import find_set_aside, is_staging_path
from raysharding.checkpoint.strict_json import parse_object
from raysharding.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MANIFEST_NAME: Final = "raysharding.manifest.json"
"""Checksums of one save (`manifest.py`). Here, so that it is never copied beside the weights of another."""
_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAX_INDEX_BYTES: Final = 256 << 20
_MAX_SIDECAR_BYTES: Final = 64 << 20
_SIDECAR_SUFFIXES: Final = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".spm", ".vocab")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CONVERT: Final = (
    "convert it once with transformers: AutoModel.from_pretrained(path).save_pretrained(new_path) writes safetensors"
)


@dataclass(frozen=True)
class FileSet:
    """The files of one checkpoint."""

    directory: str
    """Absolute path of the directory that holds all of them."""
    names: tuple[str, ...]
    """File names, sorted. All are regular files, or symlinks to such."""
    weight_map: dict[str, str] | None
    """Tensor → file name, as the index says; `None` where there is no index."""
    index_path: str | None
    """Absolute path of the index, or `None`."""


def local_path(path: str) -> str:
    """Absolute local path of what the user gave: a path, or a `file://` URI.

    Raises:
        CheckpointError: an empty path, another scheme, or another host.
    """
    if not path or "\0" in path:
        raise CheckpointError(f"the path {path!r} is none: give a directory, a {_SUFFIX} file or an index JSON")
    if _SCHEME.match(path) is None:
        return os.path.abspath(path)
    parts = urlsplit(path)
    if parts.scheme.lower() != "file":
        what = f"{parts.scheme}:// is not supported yet: copy the checkpoint to a local or mounted directory"
        raise CheckpointError(what, path=path)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise CheckpointError("is not a local file URI: write file:///absolute/path", path=path)
    return os.path.abspath(unquote(parts.path))


def resolve_files(path: str) -> FileSet:
    """Find the files that `path` stands for.

    Args:
        path: A directory, a `.safetensors` file or an index JSON; a local path or a `file://` URI.

    Raises:
        CheckpointError: nothing usable there, an ambiguous directory, or an index that is malformed or unsafe.
    """
    local = local_path(path)
    if os.path.isdir(local):
        return _resolve_directory(local)
    if not os.path.exists(local):
        raise _nothing_there(path, local)
    name = os.path.basename(local)
    if name.endswith(_INDEX_SUFFIX):
        return _read_index(local)
    if name.endswith(_SUFFIX):
        # The user named this very file, so a symlink that leads elsewhere is the user's choice.
        require_regular(local)
        return FileSet(os.path.dirname(local), (name,), None, None)
    what = f"is neither a directory, nor a {_SUFFIX} file, nor a {_INDEX_SUFFIX}"
    if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        what += f", and pickled weights are never read; {_CONVERT}"
    raise CheckpointError(what, path=path)


def read_config(directory: str) -> dict[str, Any] | None:
    """Parse config.json in `directory`; `None` where there is none.

    Python's JSON dialect is accepted here, as transformers accepts it: Mamba's configs hold Infinity.

    Raises:
        CheckpointError: not readable, not JSON, or not an object.
    """
    path = os.path.join(directory, "config.json")
    if not os.path.lexists(path):
        return None
    _require_inside(directory, "config.json")
    data = _read_small(path)
    try:
        config = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise CheckpointError("is nested too deep", path=path) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not UTF-8 ({error.reason} at byte {error.start})", path=path) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"is not JSON ({error})", path=path) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"is a JSON {type(config).__name__}, not an object", path=path)
    return config


def list_sidecar_files(directory: str) -> tuple[str, ...]:
    """Names of the tokenizer, config and generation files in `directory`; see `Checkpoint.sidecar_files`."""
    names = []
    for name in _list(directory):
        if not name.endswith(_SIDECAR_SUFFIXES) or name.endswith(".index.json") or name.startswith("."):
            continue
        if name == MANIFEST_NAME:
            continue
        try:
            status = os.stat(os.path.join(directory, name))
        except OSError:
            continue  # a dangling symlink, or removed since the listing: nothing to copy
        small = stat.S_ISREG(status.st_mode) and status.st_size < _MAX_SIDECAR_BYTES
        if small and _is_inside(directory, name):
            names.append(name)
    return tuple(names)


def _resolve_directory(directory: str) -> FileSet:
    if is_staging_path(directory):
        raise CheckpointError("is the temporary directory of an unfinished save: its files are partial", path=directory)
    names = _list(directory)
    if INDEX_NAME in names:
        files = _read_index(os.path.join(directory, INDEX_NAME))
        if SINGLE_NAME in names and SINGLE_NAME not in files.names:
            what = f"holds both {INDEX_NAME} and a {SINGLE_NAME} outside it: give the path of the one you mean"
            raise CheckpointError(what, path=directory)
        return files
    found = [name for name in names if name.endswith(_SUFFIX)]
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if SINGLE_NAME in found:
        found = [SINGLE_NAME]
    elif len(indexes) == 1:
        return _read_index(os.path.join(directory, indexes[0]))
    if len(found) != 1:
        raise _no_checkpoint(directory, names, found)
    _require_inside(directory, found[0])
    require_regular(os.path.join(directory, found[0]))
    return FileSet(directory, (found[0],), None, None)


def _nothing_there(path: str, local: str) -> CheckpointError:
    aside = find_set_aside(local)
    if aside is not None:
        what = f"no such directory, but an interrupted save left the previous checkpoint in {aside}: rename it back"
        return CheckpointError(what, path=path)
    what = "no such file or directory"
    if not os.path.isabs(path) and path.count("/") == 1:
        what += f"; if it is a model of the Hugging Face hub, give huggingface_hub.snapshot_download({path!r})"
    return CheckpointError(what, path=path)


def _no_checkpoint(directory: str, names: list[str], found: list[str]) -> CheckpointError:
    """Say what a directory without a usable checkpoint does hold, and what to do."""
    if found:
        listed = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        what = f"holds {len(found)} {_SUFFIX} files ({listed}) and no {INDEX_NAME}: give one file, or restore the index"
        return CheckpointError(what, path=directory)
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        what = f"holds no {_SUFFIX} file, only pickled weights ({', '.join(pickled[:8])}), which are never read"
        return CheckpointError(f"{what}; {_CONVERT}", path=directory)
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return CheckpointError(f"holds no {_SUFFIX} file; it holds {listed or 'nothing'}", path=directory)


def _read_index(path: str) -> FileSet:
    """Parse an index and check each file name in it. Whether the files hold those tensors is checked later."""
    directory, index_name = os.path.split(path)
    _require_inside(directory, index_name)
    data = _read_small(path)
    try:
        index = parse_object(data)
    except ValueError as error:
        raise CheckpointError(f"index {error}", path=path) from error
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("index has no weight_map with a tensor in it", path=path)
    names: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"index maps it to {name!r}, not to a file name", path=path, tensor=tensor)
        names.setdefault(name, tensor)
    for name, tensor in names.items():
        _check_name(path, name, tensor)
        _require_inside(directory, name)
        if not os.path.lexists(os.path.join(directory, name)):
            raise CheckpointError(f"index names the file {name!r}, which is missing", path=path, tensor=tensor)
        require_regular(os.path.join(directory, name))
    return FileSet(directory, tuple(sorted(names)), weight_map, path)


def _check_name(path: str, name: str, tensor: str) -> None:
    """Refuse a file name that is anything but a plain name of a safetensors file."""
    what = f"index names the file {name!r}"
    if "/" in name or "\\" in name or "\0" in name or name.startswith("."):
        what += ": only plain names of files beside the index are allowed, nothing that leaves its directory"
        raise CheckpointError(what, path=path, tensor=tensor)
    if not name.endswith(_SUFFIX):
        raise CheckpointError(f"{what}, which is not a {_SUFFIX} file; {_CONVERT}", path=path, tensor=tensor)


def _is_inside(directory: str, name: str) -> bool:
    """Whether `name` in `directory`, symlinks followed, stays in the directory or in its Hugging Face cache.

    The cache keeps `models--org--name/snapshots/<revision>/<file>` as symlinks to `models--org--name/blobs/<hash>`.
    """
    root = os.path.realpath(directory)
    target = os.path.realpath(os.path.join(directory, name))
    roots = [root]
    parts = root.split(os.sep)
    for depth in range(len(parts), 0, -1):
        if parts[depth - 1].startswith("models--"):
            roots.append(os.sep.join(parts[:depth]))
            break
    return any(os.path.commonpath((target, allowed)) == allowed for allowed in roots)


def _require_inside(directory: str, name: str) -> None:
    if not _is_inside(directory, name):
        target = os.path.realpath(os.path.join(directory, name))
        what = f"is a symlink to {target}, outside the checkpoint: copy or hard-link the file into the directory"
        raise CheckpointError(what, path=os.path.join(directory, name))


def require_regular(path: str) -> None:
    """Refuse what is not a regular file. Opening a named pipe, for one, would wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError("is not a regular file", path=path)


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror}", path=directory) from error


def _read_small(path: str) -> bytes:
    """Read a whole JSON file, after a look at what and how big it is."""
    require_regular(path)
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > _MAX_INDEX_BYTES:
                what = f"has {num_bytes} bytes, over the cap of {_MAX_INDEX_BYTES} for a JSON file"
                raise CheckpointError(what, path=path)
            return file.read()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
