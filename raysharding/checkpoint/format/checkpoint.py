"""`Checkpoint`: what the headers, the index and config.json say, without the payload."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any, Final, Self

from raysharding.checkpoint.format.header import header_sha256, parse_header, read_header_bytes
from raysharding.checkpoint.format.index import FileSet, read_json, resolve_files
from raysharding.checkpoint.format.locate import locate
from raysharding.checkpoint.format.names import ADAPTER_CONFIG_NAME, ADAPTER_NAME, SINGLE_NAME
from raysharding.checkpoint.format.tensor_info import DTYPE_OF_NAME, NAME_OF_DTYPE, TensorInfo
from raysharding.checkpoint.storage import (
    DEFAULT_REMOTE,
    RemoteOptions,
    Storage,
    join_path,
    normal_path,
    read_bytes,
    split_path,
    storage_of,
)
from raysharding.errors import CheckpointError

_MAX_TRIES: Final = 10
"""How often a checkpoint that a save replaces meanwhile is opened again."""


@dataclass(frozen=True)
class CheckpointFile:
    """One safetensors file, and what shows a change since its header was read."""

    path: str
    """Absolute local path, or a URI."""
    num_bytes: int
    """Size of the file, header included."""
    mtime_ns: int | None
    """Time of the last change in nanoseconds since the epoch; `None` where the file system has none."""
    header_sha256: str
    """SHA-256, in hex, of the header's length (8 bytes) and the header: differs where two nodes hold other files."""
    etag: str | None = None
    """The object store's identifier of the content's version; `None` for local files, and where the store has none."""

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        return split_path(self.path)[1]


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint, read from its headers alone. Takes a few hundred bytes for each tensor."""

    path: str
    """The path as the user gave it, or what `locate` found for it."""
    files: tuple[CheckpointFile, ...]
    """The safetensors files, sorted by name."""
    tensors: Mapping[str, TensorInfo]
    """Key in the files → place of the tensor; in file order, so reading them in turn reads each file forward."""
    config: Mapping[str, Any] | None
    """Parsed config.json of the weights' directory; `None` where there is none."""
    metadata: Mapping[str, str]
    """`__metadata__` of all files; where two files give a key, the first file's value."""
    adapter: Mapping[str, Any] | None = None
    """Parsed adapter_config.json of a peft adapter_model.safetensors, which holds adapters and no whole model."""
    is_random: bool = False
    """True if the weights are not read but initialised; there are no files and no tensors then."""
    generation_config: Mapping[str, Any] | None = None
    """Parsed generation_config.json; `None` where there is none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def directory(self) -> str:
        """Absolute path or URI of the directory that holds the files."""
        return split_path(self.files[0].path)[0] if self.files else normal_path(self.path)

    def moved(self, directory: str) -> Self:
        """Return the checkpoint with the same files in another directory, where another machine sees them."""
        files = (replace(file, path=join_path(directory, file.name), mtime_ns=None, etag=None) for file in self.files)
        return replace(self, path=directory, files=tuple(files))

    def to_json(self) -> bytes:
        """Encode as JSON (ASCII) for ranks that cannot see the files. `from_json` returns an equal `Checkpoint`."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain["files"] = [astuple(file) for file in self.files]
        plain["tensors"] = [(t.name, NAME_OF_DTYPE[t.dtype], t.shape, t.file, t.offset) for t in self.tensors.values()]
        return json.dumps(plain, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decode what `to_json` wrote.

        Raises:
            CheckpointError: `data` does not come from `to_json`.
        """
        try:
            plain = json.loads(data)
            tensors = {
                name: TensorInfo(name, DTYPE_OF_NAME[dtype], tuple(shape), file, offset)
                for name, dtype, shape, file, offset in plain.pop("tensors")
            }
            files = tuple(CheckpointFile(*file) for file in plain.pop("files"))
            return cls(files=files, tensors=tensors, **plain)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{len(data)} bytes are not an encoded Checkpoint ({error!r}); do all ranks run the same raysharding?"
            ) from error


def open_checkpoint(path: str | os.PathLike[str], *, remote: RemoteOptions = DEFAULT_REMOTE) -> Checkpoint:
    """Read and validate the index, every header and config.json. No payload byte is read.

    Args:
        path: A Hugging Face directory, one `.safetensors` file, or an index JSON: a local path, a `file://` URI, or
            one that `pyarrow.fs.FileSystem.from_uri` takes (`s3://`, `gs://`, `hdfs://`, `abfs://`), with its query; or
            a model of the Hugging Face hub, `org/name` or `hf://org/name@revision`, whose commit `path` then names.
        remote: How to read from a remote URI.

    Returns:
        The checkpoint: all tensors of all files, each key once, each within its file. If a save replaces the checkpoint
        meanwhile, the old or the new one, never a mixture. (In an object store, where files are replaced one by one,
        `FileReader.verify_unchanged` finds a mixture.)

    Raises:
        CheckpointError: Nothing is there, or its contents cannot be trusted; names the file and the tensor.
    """
    given = locate(os.fspath(path))
    normal = normal_path(given)
    storage = storage_of(normal, remote)
    for _ in range(_MAX_TRIES):
        before = storage.identity(normal)
        try:
            checkpoint = _read_checkpoint(storage, given)
        except CheckpointError:
            if storage.identity(normal) == before:
                raise
            continue
        if storage.identity(normal) == before:
            return checkpoint
    what = f"was replaced {_MAX_TRIES} times while it was opened: open it when its writer is done"
    raise CheckpointError(what, path=given)


def open_config(path: str | os.PathLike[str]) -> Checkpoint:
    """Read config.json alone, for a model with random weights.

    Args:
        path: A Hugging Face directory, a URI of one, or a hub id, as for `open_checkpoint`; with or without weights.

    Raises:
        CheckpointError: Nothing is there, or config.json cannot be read.
    """
    given = locate(os.fspath(path), weights=False)
    normal = normal_path(given)
    storage = storage_of(normal)
    stat = storage.find(normal)
    if stat.kind != "directory":
        what = "there is no such directory" if stat.kind == "missing" else "is no directory"
        raise CheckpointError(f"{what}: random weights need one with a config.json", path=given)
    config, generation_config = _configs(storage, normal)
    return Checkpoint(given, (), {}, config, {}, is_random=True, generation_config=generation_config)


def identify(path: str, *, remote: RemoteOptions = DEFAULT_REMOTE) -> CheckpointFile:
    """Return size, mtime and header hash of a safetensors file as this process sees it, without parsing the header.

    The result equals the entry in `Checkpoint.files` of a rank that sees the same file at this path.

    Args:
        path: A `CheckpointFile.path`.
        remote: How to read from a remote URI.

    Raises:
        CheckpointError: The file is missing, or no header can be read from it.
    """
    return _identify(storage_of(path, remote), path)[0]


def identify_files(paths: Sequence[str], *, remote: RemoteOptions = DEFAULT_REMOTE) -> tuple[CheckpointFile, ...]:
    """`identify` files of one directory, remote ones concurrently.

    Raises:
        CheckpointError: As `identify`, for the first file that cannot be read.
    """
    if not paths:
        return ()
    return tuple(storage_of(paths[0], remote).each(partial(identify, remote=remote), paths))


def _read_checkpoint(storage: Storage, given: str) -> Checkpoint:
    file_set = resolve_files(storage, given)
    if file_set.has_adapters:
        model = file_set.index_path or join_path(file_set.directory, SINGLE_NAME)
        what = f"holds a whole model and {ADAPTER_CONFIG_NAME}, by which transformers adds adapters to the model"
        both = f"{join_path(file_set.directory, ADAPTER_NAME)} with base={model!r} for both"
        raise CheckpointError(f"{what}: give {model} for the model alone, or {both}", path=given)
    paths = [join_path(file_set.directory, name) for name in file_set.names]
    read = storage.each(lambda numbered: _read_file(storage, numbered[1], numbered[0]), enumerate(paths))
    files = [file for file, _, _ in read]
    tensors = _merge(files, [infos for _, infos, _ in read])
    if file_set.weight_map is not None:
        _check_index(file_set, tensors)
    metadata: dict[str, str] = {}
    for _, _, own in read:
        metadata = own | metadata
    config, generation_config = _configs(storage, file_set.directory)
    adapter = None
    if file_set.names == (ADAPTER_NAME,):
        adapter = read_json(storage, file_set.directory, ADAPTER_CONFIG_NAME, strict=False)
    return Checkpoint(given, tuple(files), tensors, config, metadata, adapter, generation_config=generation_config)


def _configs(storage: Storage, directory: str) -> list[dict[str, Any] | None]:
    """Return config.json and generation_config.json, `None` for one that is not there."""
    return [read_json(storage, directory, name, strict=False) for name in ("config.json", "generation_config.json")]


def _read_file(storage: Storage, path: str, number: int) -> tuple[CheckpointFile, list[TensorInfo], dict[str, str]]:
    file, data = _identify(storage, path)
    return file, *parse_header(path, number, file.num_bytes, data)


def _identify(storage: Storage, path: str) -> tuple[CheckpointFile, bytes]:
    """Read the bytes of one file's header. Size and mtime come from the open file that they are read from."""
    with closing(storage.open(path)) as file:
        stat = file.stat
        data = read_header_bytes(path, stat.num_bytes, partial(read_bytes, file))
    return CheckpointFile(path, stat.num_bytes, stat.mtime_ns, header_sha256(data), stat.etag), data


def _merge(files: list[CheckpointFile], headers: list[list[TensorInfo]]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in chain(*headers):
        first = tensors.setdefault(info.name, info)
        if first is not info:
            what = f"is in this file and in {files[first.file].name} too: remove one"
            raise CheckpointError(what, path=files[info.file].path, tensor=info.name)
    return tensors


def _check_index(file_set: FileSet, tensors: Mapping[str, TensorInfo]) -> None:
    """Check in both directions that index and headers agree on which file holds which tensor."""
    assert file_set.weight_map is not None
    for name, file_name in file_set.weight_map.items():
        info = tensors.get(name)
        place = None if info is None else file_set.names[info.file]
        if place != file_name:
            what = f"index says it is in {file_name}, " + (f"but it is in {place}" if place else "but no file holds it")
            raise CheckpointError(what, path=file_set.index_path, tensor=name)
    for name, info in tensors.items():
        if name not in file_set.weight_map:
            what = f"is in {file_set.names[info.file]}, but the index does not list it"
            raise CheckpointError(what, path=file_set.index_path, tensor=name)
