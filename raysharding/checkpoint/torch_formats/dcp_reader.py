"""`DcpReader`: tensors that `torch.distributed.checkpoint` saved in chunks, put together a piece at a time."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch

from raysharding.checkpoint.format import Header, TensorInfo, read_header
from raysharding.checkpoint.storage import LocalFile, LocalStorage, read_bytes
from raysharding.checkpoint.torch_formats.dcp_metadata import Chunk, DcpMetadata, DcpTensor, DcpValue, Item
from raysharding.checkpoint.torch_formats.tiling import Box, intersection, is_contiguous, offset_of, slabs
from raysharding.checkpoint.torch_formats.torch_archive import StoredTensor, TorchArchive
from raysharding.errors import CheckpointError

PIECE_BYTES: Final = 4 << 20
"""Of a tensor that are in memory at once. A reader holds one piece, and one more where chunks cut through rows."""
_MAX_FRAME_BYTES: Final = 16 << 20
"""What an archive that torch itself must read may hold besides the tensor."""
_ZIP_MARK: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class _Run:
    """A chunk whose bytes are in the file as they are in a row-major tensor."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class _Strided:
    """A chunk whose elements are in the file in another order."""

    file: str
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A chunk that only torch itself can read, with `weights_only`."""

    item: Item


_Source = _Run | _Strided | _Foreign


class DcpReader:
    """Reads the tensors of a directory. A context manager; one thread.

    Making it opens every file and looks at every chunk, so that what cannot be read is known before anything is
    written. About 0.3 ms for each chunk.

    Args:
        metadata: What `read_dcp_metadata` returned.

    Raises:
        CheckpointError: a file is missing or too short, or what it holds is not what `.metadata` says. Names file and
            tensor.
    """

    def __init__(self, metadata: DcpMetadata) -> None:
        self._directory = metadata.directory
        self._files: dict[str, LocalFile] = {}
        self._safetensors: dict[tuple[str, int], tuple[Header, dict[str, TensorInfo]]] = {}
        self._sources: dict[str, tuple[_Source, ...]] = {}
        self._open_files = ExitStack()
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._part = torch.empty(0, dtype=torch.uint8)
        try:
            for tensor in metadata.tensors:
                self._sources[tensor.key] = tuple(self._look_at(tensor, chunk) for chunk in tensor.chunks)
            for value in metadata.values:
                self._open(value.item, value.key)
        except BaseException:
            self.close()
            raise

    def pieces(self, tensor: DcpTensor) -> Iterator[tuple[int, memoryview]]:
        """Read one tensor.

        Returns:
            (byte offset in the tensor, bytes) of one piece after another, row-major and contiguous, at most
            `PIECE_BYTES` each. A piece is good until the next one is asked for.

        Raises:
            CheckpointError: a file changed or cannot be read.
        """
        itemsize = tensor.dtype.itemsize
        # A chunk that torch must read is read once for all of its pieces.
        views = [self._view(source, chunk, tensor) for source, chunk in self._chunks(tensor)]
        for slab in slabs(tensor.shape, PIECE_BYTES // itemsize):
            piece = self._piece[: math.prod(slab[1]) * itemsize]
            for (source, chunk), view in zip(self._chunks(tensor), views, strict=True):
                shared = intersection(slab, (chunk.offsets, chunk.sizes))
                if shared is not None:
                    self._copy(shared, slab, piece, tensor, chunk, source, view)
            yield offset_of(slab[0], tensor.shape) * itemsize, piece.numpy().data

    def read_value(self, value: DcpValue) -> Any:
        """Read a value that is no tensor: numbers, strings, and lists, tuples, sets and dicts of them.

        Raises:
            CheckpointError: it is anything else.
        """
        item = value.item
        try:
            return TorchArchive(self._files[item.file], self._path(item.file), item.offset, item.num_bytes).read_value()
        except CheckpointError as error:
            raise CheckpointError(error.message, path=error.path, tensor=value.key) from error

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._open_files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _chunks(self, tensor: DcpTensor) -> Iterator[tuple[_Source, Chunk]]:
        return zip(self._sources[tensor.key], tensor.chunks, strict=True)

    def _path(self, file: str) -> str:
        return os.path.join(self._directory, file)

    def _open(self, item: Item, key: str) -> LocalFile:
        """Give the open file of an item that lies within it."""
        file = self._files.get(item.file)
        if file is None:
            storage = LocalStorage()
            storage.check_inside(self._directory, item.file)
            if storage.find(self._path(item.file)).kind == "missing":
                raise CheckpointError("the file that holds it is missing", path=self._path(item.file), tensor=key)
            file = self._files[item.file] = self._open_files.enter_context(closing(storage.open(self._path(item.file))))
        size = file.found.num_bytes
        if item.offset + item.num_bytes > size:
            what = f"lies at bytes [{item.offset}, {item.offset + item.num_bytes}), but the file has {size}"
            raise CheckpointError(f"{what}: it is truncated", path=self._path(item.file), tensor=key)
        return file

    def _look_at(self, tensor: DcpTensor, chunk: Chunk) -> _Source:
        """Find out how a chunk is stored, and check that it is the one that `.metadata` describes."""
        file = self._open(chunk.item, tensor.key)
        path = self._path(chunk.item.file)
        try:
            mark = read_bytes(file, chunk.item.offset, min(len(_ZIP_MARK), chunk.item.num_bytes))
            if mark != _ZIP_MARK:
                return _Run(chunk.item.file, self._find_in_safetensors(file, path, tensor, chunk))
            archive = TorchArchive(file, path, chunk.item.offset, chunk.item.num_bytes)
            found = archive.read_tensor()
            if found is None:
                _check_unpacked(archive, tensor, chunk, path)
                return _Foreign(chunk.item)
            _check_same(path, tensor, chunk, found.dtype, found.shape)
            return _Run(chunk.item.file, found.offset) if found.is_plain else _Strided(chunk.item.file, found)
        except CheckpointError as error:
            raise CheckpointError(error.message, path=path, tensor=tensor.key) from error

    def _find_in_safetensors(self, file: LocalFile, path: str, tensor: DcpTensor, chunk: Chunk) -> int:
        """Byte of the file at which a chunk begins where torch was told to write `SerializationFormat.SAFETENSORS`.

        Then the tensors of a file are one safetensors file, behind what is no tensor; all are said to begin there.
        """
        begin = chunk.item.offset
        known = self._safetensors.get((chunk.item.file, begin))
        if known is None:
            num_bytes = file.found.num_bytes - begin
            try:
                header = read_header(path, 0, num_bytes, lambda at, length: read_bytes(file, begin + at, length))
            except CheckpointError as error:
                what = f"at byte {begin} there is neither a torch.save archive nor a safetensors file: {error.message}"
                raise CheckpointError(what, path=path) from error
            known = self._safetensors[chunk.item.file, begin] = header, {info.name: info for info in header.tensors}
        header, infos = known
        info = infos.get(tensor.key)
        if info is None:
            raise CheckpointError("is not in the file that is said to hold it", path=path)
        _check_same(path, tensor, chunk, info.dtype, info.shape)
        if _saved_offsets(header, tensor.key) not in (None, list(chunk.offsets)):
            what = f"the file holds another chunk of it, and not the one at {list(chunk.offsets)}: torch's safetensors"
            raise CheckpointError(f"{what} format keeps one chunk of a tensor in each file", path=path)
        return begin + info.offset

    def _view(self, source: _Source, chunk: Chunk, tensor: DcpTensor) -> torch.Tensor | None:
        """A chunk that is no run of bytes as uint8 of shape (*sizes, itemsize); `None` for a run."""
        if isinstance(source, _Run):
            return None
        if isinstance(source, _Strided):
            return self._map(source)
        loaded = self._load(source.item, tensor, chunk)
        return loaded.view(-1).view(torch.uint8).view(*chunk.sizes, tensor.dtype.itemsize)

    def _map(self, source: _Strided) -> torch.Tensor:
        """Map a storage into memory: its pages belong to the page cache, and any order of elements can be copied."""
        stored = source.tensor
        skipped = stored.offset % mmap.ALLOCATIONGRANULARITY
        path = self._path(source.file)
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < stored.offset + stored.num_bytes:
                    raise CheckpointError("was cut short since it was looked at", path=path)
                # Private: torch warns of memory that it must not write to. Nobody does.
                begin, length = stored.offset - skipped, stored.num_bytes + skipped
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
        except OSError as error:
            raise CheckpointError(f"cannot be mapped: {error.strerror}", path=path) from error
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        itemsize = stored.dtype.itemsize
        strides = (*(stride * itemsize for stride in stored.strides), 1)
        return data.as_strided((*stored.shape, itemsize), strides, skipped + stored.first * itemsize)

    def _load(self, item: Item, tensor: DcpTensor, chunk: Chunk) -> torch.Tensor:
        """Let torch read a chunk, without any class of its own choosing: costs twice the chunk in memory."""
        path = self._path(item.file)
        data = io.BytesIO(read_bytes(self._files[item.file], item.offset, item.num_bytes))
        try:
            loaded = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises what it likes here, its own zip reader's errors included
            what = f"cannot be read with torch.load(weights_only=True): {error}"
            raise CheckpointError(what, path=path, tensor=tensor.key) from error
        if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided:
            kind = getattr(loaded, "layout", type(loaded).__name__)
            raise CheckpointError(f"is a {kind}, not a strided tensor", path=path, tensor=tensor.key)
        _check_same(path, tensor, chunk, loaded.dtype, tuple(loaded.shape))
        return loaded.detach().resolve_conj().resolve_neg().contiguous()

    def _copy(
        self, shared: Box, slab: Box, piece: torch.Tensor, tensor: DcpTensor, chunk: Chunk, source: _Source, view: Any
    ) -> None:
        """Put the elements that a chunk and a slab share into the slab's memory."""
        itemsize = tensor.dtype.itemsize
        within = tuple(place - first for place, first in zip(shared[0], chunk.offsets, strict=True))
        target = tuple(place - first for place, first in zip(shared[0], slab[0], strict=True))
        num_bytes = math.prod(shared[1]) * itemsize
        whole = piece.view(*slab[1], itemsize)[_index(target, shared[1])]
        if view is not None:
            whole.copy_(view[_index(within, shared[1])])
            return
        assert isinstance(source, _Run), source
        # A slab has whole rows, or is part of one: what it shares with a chunk is one run of the chunk's rows.
        assert is_contiguous(shared[1], chunk.sizes), (shared, chunk)
        begin = source.offset + offset_of(within, chunk.sizes) * itemsize
        if is_contiguous(shared[1], slab[1]):
            first = offset_of(target, slab[1]) * itemsize
            self._files[source.file].fill(begin, (piece[first : first + num_bytes].numpy().data,))
            return
        if not self._part.numel():
            self._part = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        part = self._part[:num_bytes]
        self._files[source.file].fill(begin, (part.numpy().data,))
        whole.copy_(part.view(*shared[1], itemsize))


def _index(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _check_same(path: str, tensor: DcpTensor, chunk: Chunk, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype != tensor.dtype or shape != chunk.sizes:
        what = f"is {dtype} of shape {list(shape)}, but .metadata says {tensor.dtype} of shape {list(chunk.sizes)}"
        raise CheckpointError(what, path=path, tensor=tensor.key)


def _check_unpacked(archive: TorchArchive, tensor: DcpTensor, chunk: Chunk, path: str) -> None:
    """Refuse an archive that would unpack to much more than the chunk, before torch unpacks it."""
    expected = math.prod(chunk.sizes) * tensor.dtype.itemsize
    if archive.unpacked_bytes > expected + _MAX_FRAME_BYTES:
        what = f"unpacks to {archive.unpacked_bytes} bytes, but its chunk has {expected}"
        raise CheckpointError(what, path=path, tensor=tensor.key)


def _saved_offsets(header: Header, key: str) -> Any:
    """Where torch's safetensors format says that a chunk belongs; `None` where it says nothing."""
    try:
        return json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))[key]["saved_offsets"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
