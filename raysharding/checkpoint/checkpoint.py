"""`Checkpoint`: everything that the headers, the index and config.json say, and nothing of the payload."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from raysharding.checkpoint.header import Header, header_sha256, read_header, read_header_bytes
from raysharding.checkpoint.index import (
    FileSet,
    list_sidecar_files,
    local_path,
    read_config,
    require_regular,
    resolve_files,
)
from raysharding.checkpoint.tensor_info import DTYPE_OF_NAME, NAME_OF_DTYPE, TensorInfo
from raysharding.errors import CheckpointError

_MAX_TRIES: Final = 10
"""How often a checkpoint is opened anew where a save replaced it meanwhile."""


@dataclass(frozen=True)
class CheckpointFile:
    """One safetensors file, and what shows whether it changed since its header was read."""

    path: str
    """Absolute local path."""
    num_bytes: int
    """Size of the file, header included."""
    mtime_ns: int | None
    """Time of the last change in nanoseconds since the epoch; `None` where the file system has none."""
    header_sha256: str
    """SHA-256, in hex, of the header's length (8 bytes) and the header: tells files of one path on two nodes apart."""


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint, from its headers alone. A few hundred bytes for each tensor."""

    path: str
    """The path as the user gave it."""
    files: tuple[CheckpointFile, ...]
    """The safetensors files, sorted by name."""
    tensors: Mapping[str, TensorInfo]
    """Key in the files → where the tensor lies; in file order, so reading them in turn reads each file forward."""
    config: Mapping[str, Any] | None
    """Parsed config.json from beside the weights, or `None` where there is none."""
    metadata: Mapping[str, str]
    """`__metadata__` of all files; where two files give a key, the first file's value."""

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all tensors, as they are in the files."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def directory(self) -> str:
        """Absolute path of the directory that holds the files."""
        return os.path.dirname(self.files[0].path)

    def to_json(self) -> bytes:
        """Encode as JSON (ASCII), for the ranks that cannot see the files. `from_json` gives an equal `Checkpoint`."""
        tensors = [[t.name, NAME_OF_DTYPE[t.dtype], t.shape, t.file, t.offset] for t in self.tensors.values()]
        fields = {
            "path": self.path,
            "files": [[file.path, file.num_bytes, file.mtime_ns, file.header_sha256] for file in self.files],
            "tensors": tensors,
            "config": self.config,
            "metadata": self.metadata,
        }
        return json.dumps(fields, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decode what `to_json` wrote.

        Raises:
            CheckpointError: `data` is not what `to_json` writes.
        """
        try:
            fields = json.loads(data)
            tensors = {
                name: TensorInfo(name, DTYPE_OF_NAME[dtype], tuple(shape), file, offset)
                for name, dtype, shape, file, offset in fields["tensors"]
            }
            files = tuple(CheckpointFile(*file) for file in fields["files"])
            return cls(fields["path"], files, tensors, fields["config"], fields["metadata"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{len(data)} bytes are not an encoded Checkpoint ({error!r}); do all ranks run the same raysharding?"
            ) from error

    def sidecar_files(self) -> tuple[str, ...]:
        """Names of the tokenizer, config and generation files beside the weights, sorted.

        Never weights, never code, never a file over 64 MiB or a symlink that leaves the checkpoint. A save copies
        these next to the new weights. Call it on a rank that can read the checkpoint.

        Raises:
            CheckpointError: the directory cannot be listed.
        """
        return list_sidecar_files(self.directory)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and validate the index, every header and config.json. No payload byte is read.

    Args:
        path: A Hugging Face directory, one `.safetensors` file, an index JSON, or any of these as a `file://` URI.

    Returns:
        The checkpoint: all tensors of all files, each key once, each within its file. Where a save replaces it
        meanwhile, the old one or the new one, never a mixture.

    Raises:
        CheckpointError: nothing there, or anything in it that cannot be trusted; names the file and the tensor.
    """
    given = os.fspath(path)
    local = local_path(given)
    for _ in range(_MAX_TRIES):
        before = _identity(local)
        try:
            checkpoint = _read_checkpoint(given)
        except CheckpointError:
            if _identity(local) == before:
                raise
            continue
        if _identity(local) == before:
            return checkpoint
    what = f"was replaced {_MAX_TRIES} times while it was opened: open it when its writer is done"
    raise CheckpointError(what, path=given)


def identify(path: str) -> CheckpointFile:
    """Look at one safetensors file as this process sees it: size, mtime and header hash. The header is not parsed.

    Equal to the entry in `Checkpoint.files` of a rank that sees the same file under this path.

    Args:
        path: A `CheckpointFile.path`.

    Raises:
        CheckpointError: there is none, or no header can be read from it.
    """
    require_regular(path)
    try:
        with open(path, "rb", buffering=0) as raw:
            status = os.fstat(raw.fileno())

            def read(offset: int, length: int) -> bytes:
                return os.pread(raw.fileno(), length, offset)

            data = read_header_bytes(path, status.st_size, read)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    return CheckpointFile(path, status.st_size, status.st_mtime_ns, header_sha256(data))


def _identity(local: str) -> tuple[int, int, int] | None:
    """What tells a directory or file from one that a save renamed into its place meanwhile.

    The inode alone does not: of three quick saves, the last may get the number that the first one's removal freed.
    """
    try:
        status = os.stat(local)
    except OSError:
        return None  # nothing there: reading it says so, and names what is wrong
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_checkpoint(given: str) -> Checkpoint:
    file_set = resolve_files(given)
    files, headers = [], []
    for index, name in enumerate(file_set.names):
        file, header = _read_file(os.path.join(file_set.directory, name), index)
        files.append(file)
        headers.append(header)
    tensors = _merge(files, headers)
    if file_set.weight_map is not None:
        _check_index(file_set, tensors)
    metadata: dict[str, str] = {}
    for header in headers:
        metadata = header.metadata | metadata
    return Checkpoint(given, tuple(files), tensors, read_config(file_set.directory), metadata)


def _read_file(path: str, file: int) -> tuple[CheckpointFile, Header]:
    """Read one file's header; its size and mtime come from the same open descriptor as the header."""
    try:
        with open(path, "rb", buffering=0) as raw:
            status = os.fstat(raw.fileno())

            def read(offset: int, length: int) -> bytes:
                return os.pread(raw.fileno(), length, offset)

            header = read_header(path, file, status.st_size, read)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    return CheckpointFile(path, status.st_size, status.st_mtime_ns, header.sha256), header


def _merge(files: list[CheckpointFile], headers: list[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for info in header.tensors:
            first = tensors.setdefault(info.name, info)
            if first is not info:
                what = f"is in this file and in {os.path.basename(files[first.file].path)} too: remove one"
                raise CheckpointError(what, path=files[info.file].path, tensor=info.name)
    return tensors


def _check_index(file_set: FileSet, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that index and headers agree on which file holds which tensor, both ways."""
    assert file_set.weight_map is not None
    for name, file_name in file_set.weight_map.items():
        info = tensors.get(name)
        found = None if info is None else file_set.names[info.file]
        if found != file_name:
            what = f"index says it is in {file_name}, " + (f"but it is in {found}" if found else "but no file holds it")
            raise CheckpointError(what, path=file_set.index_path, tensor=name)
    for name, info in tensors.items():
        if name not in file_set.weight_map:
            what = f"is in {file_set.names[info.file]}, but the index does not list it"
            raise CheckpointError(what, path=file_set.index_path, tensor=name)
