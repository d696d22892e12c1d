"""`DcpReader`: tensors that `torch.distributed.checkpoint` saved in chunks, put together one at a time."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import IO, Any, Final, cast

import torch

from raysharding.checkpoint.format import Header, TensorInfo, read_header
from raysharding.checkpoint.storage import LocalFile, LocalStorage, read_bytes
from raysharding.checkpoint.torch_formats.dcp_metadata import read_dcp_metadata
from raysharding.errors import CheckpointError

PIECE_BYTES: Final = 4 << 20
"""Largest piece that is passed to a writer at once, in bytes."""
_MAX_FRAME_BYTES: Final = 16 << 20
"""Bytes that an archive may hold besides the tensor."""
_ZIP_MARK: Final = b"PK\x03\x04"

Write = Callable[[int, memoryview], None]
"""Called as `write(byte_offset, piece)`."""


class DcpReader(ExitStack):
    """Reads a directory chunk by chunk, by `torch.load(weights_only=True)`. A context manager; for one thread.

    The constructor opens every file and lets torch read the frame of every chunk, without data, so that unreadable
    chunks raise before anything is written. Takes about 0.8 ms per chunk, as does reading it.

    torch's own `FileSystemReader` also reads chunk by chunk, but casts dtypes and cuts shapes that differ from
    `.metadata`, unpacks archives of any size, and copies each chunk into a second tensor.

    Args:
        directory: A local directory.

    Raises:
        CheckpointError: As from `read_dcp_metadata`; or a file is missing or too short, or differs from `.metadata`.
            The error names file and tensor.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__()
        self.metadata = read_dcp_metadata(directory)
        """Contents of the directory."""
        self._files: dict[str, LocalFile] = {}
        self._headers: dict[tuple[str, int], tuple[Header, dict[str, TensorInfo]]] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for key, chunks in self.metadata.chunks.items():
                for chunk in chunks:
                    self._load_chunk(key, chunk, "meta")
            for key in self.metadata.values:
                self._window(key, None)
            undo.pop_all()

    def read_tensor(self, key: str, write: Write) -> None:
        """Read one tensor and write it, row-major, in pieces of at most `PIECE_BYTES`.

        One chunk is in memory at a time; if chunks are not whole rows, the tensor as well.

        Raises:
            CheckpointError: A file changed, is damaged or unreadable, or the tensor does not fit into memory.
        """
        info, chunks = self.metadata.tensors[key], self.metadata.chunks[key]
        if all(chunk.sizes[1:] == info.shape[1:] for chunk in chunks):
            for chunk in chunks:
                first = sum(chunk.offsets[:1]) * math.prod(info.shape[1:])
                _give(self._load_chunk(key, chunk, "cpu"), first * info.dtype.itemsize, write)
            return
        try:
            whole = torch.empty(info.shape, dtype=info.dtype)
        except RuntimeError as error:
            what = f"is not cut by rows, and has no place in memory: {error}"
            raise CheckpointError(what, path=self.metadata.directory, tensor=key) from error
        for chunk in chunks:
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            whole[tuple(map(slice, chunk.offsets, ends))] = self._load_chunk(key, chunk, "cpu")
        _give(whole, 0, write)

    def read_value(self, key: str) -> Any:
        """Read a value that is no tensor, by torch's weights-only unpickler.

        Raises:
            CheckpointError: The value needs another unpickler.
        """
        window = self._window(key, None)
        try:
            return _unpickle(window, 0, "cpu")
        except CheckpointError as error:
            raise CheckpointError(error.message, path=window.path, tensor=key) from error

    def _load_chunk(self, key: str, chunk: Any, device: str) -> torch.Tensor:
        """Load a chunk and compare it with `.metadata`; on "meta" no data is read."""
        window, dtype = self._window(key, chunk.offsets), self.metadata.tensors[key].dtype
        try:
            if window.read(len(_ZIP_MARK)) != _ZIP_MARK:
                return self._load_safetensors(window, key, chunk, device)
            loaded = _unpickle(window, math.prod(chunk.sizes) * dtype.itemsize, device)
            if type(loaded) is not torch.Tensor or loaded.layout != torch.strided or loaded.is_nested:
                kind = loaded.layout if type(loaded) is torch.Tensor else type(loaded).__name__
                raise CheckpointError(f"is a {kind}, not a strided tensor", path=window.path)
            if loaded.device.type != device:
                raise CheckpointError(f"was saved on {loaded.device}, without values", path=window.path)
            _check_same(loaded, dtype, chunk, window)
        except CheckpointError as error:
            raise CheckpointError(error.message, path=window.path, tensor=key) from error
        return loaded.detach().resolve_conj().resolve_neg()

    def _load_safetensors(self, window: _Window, key: str, chunk: Any, device: str) -> torch.Tensor:
        """Load a chunk that torch wrote with `SerializationFormat.SAFETENSORS`.

        The tensors of a file then form one safetensors file after the values; the metadata of all gives its start.
        """
        file, path, begin = window.file, window.path, window.offset
        if (path, begin) not in self._headers:
            num_bytes = file.found.num_bytes - begin
            try:
                header = read_header(path, 0, num_bytes, lambda at, length: read_bytes(file, begin + at, length))
            except CheckpointError as error:
                what = f"at byte {begin} there is neither a torch.save archive nor a safetensors file: {error.message}"
                raise CheckpointError(what, path=path) from error
            self._headers[path, begin] = header, {info.name: info for info in header.tensors}
        header, infos = self._headers[path, begin]
        if key not in infos:
            raise CheckpointError("is not in the file that is said to hold it", path=path)
        info = infos[key]
        loaded = torch.empty(info.shape, dtype=info.dtype, device="meta")
        _check_same(loaded, self.metadata.tensors[key].dtype, chunk, window)
        if _saved_offsets(header, key) not in (None, list(chunk.offsets)):
            what = f"the file holds another chunk of it, and not the one at {list(chunk.offsets)}: torch's safetensors"
            raise CheckpointError(f"{what} format keeps one chunk of a tensor in each file", path=path)
        if device == "cpu":
            loaded = torch.empty(info.shape, dtype=info.dtype)
            file.fill(begin + info.offset, (_bytes_of(loaded),))
        return loaded

    def _window(self, key: str, offsets: tuple[int, ...] | None) -> _Window:
        """Return the range of bytes of a chunk or a value, after a check that it is within the file."""
        place = self.metadata.places[key, offsets]
        name, begin, end = place.relative_path, place.offset, place.offset + place.length
        path = os.path.join(self.metadata.directory, name)
        if name not in self._files:
            storage = LocalStorage()
            storage.check_inside(self.metadata.directory, name)
            if storage.find(path).kind == "missing":
                raise CheckpointError("the file that holds it is missing", path=path, tensor=key)
            self._files[name] = self.enter_context(closing(storage.open(path)))
        size = self._files[name].found.num_bytes
        if end > size:
            what = f"lies at bytes [{begin}, {end}), but the file has {size}: it is truncated"
            raise CheckpointError(what, path=path, tensor=key)
        return _Window(self._files[name], path, begin, place.length)


class _Window(io.RawIOBase):
    """A range of a file as a file object, which reads nothing outside of the range."""

    def __init__(self, file: LocalFile, path: str, offset: int, num_bytes: int) -> None:
        self.file = file
        self.path = path
        self.offset = offset
        self.num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.num_bytes - self._position)]
        if view.nbytes:
            self.file.fill(self.offset + self._position, (view,))
        self._position += view.nbytes
        return view.nbytes


def _unpickle(window: _Window, expected: int, device: str) -> Any:
    """Read an archive by torch's weights-only unpickler, which makes tensors and plain values and runs no code.

    An archive that unpacks to less than `expected` bytes, or to much more, is refused before torch unpacks it.
    """
    where = f"[{window.offset}, {window.offset + window.num_bytes})"
    try:
        with zipfile.ZipFile(window) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except Exception as error:  # zipfile raises errors of many types if the bytes are no archive
        raise CheckpointError(f"holds no torch.save archive at bytes {where}: {error}", path=window.path) from error
    if not expected <= unpacked <= max(expected, window.num_bytes) + _MAX_FRAME_BYTES:
        what = f"unpacks to {unpacked} bytes, but {expected or window.num_bytes} were expected"
        raise CheckpointError(what, path=window.path)
    window.seek(0)
    try:
        return torch.load(cast(IO[bytes], window), map_location=device, weights_only=True)
    except Exception as error:  # torch, too, raises errors of many types
        what = f"cannot be read with torch.load(weights_only=True): {error}"
        raise CheckpointError(what, path=window.path) from error


def _check_same(loaded: torch.Tensor, dtype: torch.dtype, chunk: Any, window: _Window) -> None:
    if loaded.dtype != dtype or loaded.shape != chunk.sizes:
        what = f"is {loaded.dtype} of shape {list(loaded.shape)}"
        what += f", but .metadata says {dtype} of shape {list(chunk.sizes)}"
        raise CheckpointError(what, path=window.path)


def _saved_offsets(header: Header, key: str) -> Any:
    """Return the offsets of a chunk by torch's safetensors format; `None` if the file states none."""
    try:
        return json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))[key]["saved_offsets"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _give(tensor: torch.Tensor, begin: int, write: Write) -> None:
    data = _bytes_of(tensor.contiguous())
    for first in range(0, data.nbytes, PIECE_BYTES):
        write(begin + first, data[first : first + PIECE_BYTES])
