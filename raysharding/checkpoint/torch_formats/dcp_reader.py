"""`DcpReader`: tensors that `torch.distributed.checkpoint` saved in chunks, put together one at a time."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable
from typing import IO, Any, Final, cast

import torch

from raysharding.checkpoint.storage import LocalStorage, os_errors
from raysharding.checkpoint.torch_formats.dcp_metadata import read_dcp_metadata
from raysharding.errors import CheckpointError

PIECE_BYTES: Final = 4 << 20
"""Largest piece that is passed to a writer at once, in bytes."""
_MAX_FRAME_BYTES: Final = 16 << 20
"""Bytes that an archive may hold besides the tensor."""
_DIRECTORY_BYTES: Final = 1 << 20
"""Bytes at the end of an archive that its directory is in: torch writes six entries."""
_ZIP_MARK: Final = b"PK\x03\x04"

Write = Callable[[int, memoryview], None]
"""Called as `write(byte_offset, piece)`."""


class DcpReader:
    """Reads a directory chunk by chunk, by `torch.load(weights_only=True)`. For one thread.

    torch's own `FileSystemReader` also reads chunk by chunk, but casts dtypes and cuts shapes that differ from
    `.metadata`, unpacks archives of any size, and its planner reads values by `torch.load(weights_only=False)`.

    Args:
        directory: A local directory.

    Raises:
        CheckpointError: As from `read_dcp_metadata`; or a file is missing or too short. The error names file and
            tensor.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.metadata = read_dcp_metadata(directory)
        """Contents of the directory."""
        for key, place in self.metadata.places.items():
            self._check_place(key[0], place)

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
                _give(self._load_chunk(key, chunk), first * info.dtype.itemsize, write)
            return
        try:
            whole = torch.empty(info.shape, dtype=info.dtype)
        except RuntimeError as error:
            what = f"is not cut by rows, and has no place in memory: {error}"
            raise CheckpointError(what, path=self.metadata.directory, tensor=key) from error
        for chunk in chunks:
            ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            whole[tuple(map(slice, chunk.offsets, ends))] = self._load_chunk(key, chunk)
        _give(whole, 0, write)

    def read_value(self, key: str) -> Any:
        """Read a value that is no tensor, by torch's weights-only unpickler.

        Raises:
            CheckpointError: The value needs another unpickler.
        """
        return self._load(key, None, 0)

    def _load_chunk(self, key: str, chunk: Any) -> torch.Tensor:
        """Load a chunk and compare it with `.metadata`."""
        dtype = self.metadata.tensors[key].dtype
        loaded = self._load(key, chunk.offsets, math.prod(chunk.sizes) * dtype.itemsize)
        if type(loaded) is torch.Tensor and not loaded.is_nested:
            actual: tuple[Any, ...] = (loaded.dtype, list(loaded.shape), loaded.layout, loaded.device.type)
        else:
            actual = (type(loaded).__name__,)
        expected = (dtype, list(chunk.sizes), torch.strided, "cpu")
        if actual == expected:
            return loaded.detach().resolve_conj().resolve_neg()  # type: ignore[no-any-return]
        path = os.path.join(self.metadata.directory, self.metadata.places[key, chunk.offsets].relative_path)
        what = f"is {' '.join(map(str, actual))}, but .metadata says {' '.join(map(str, expected))}"
        raise CheckpointError(what, path=path, tensor=key)

    def _load(self, key: str, offsets: tuple[int, ...] | None, expected: int) -> Any:
        """Read an archive by torch's weights-only unpickler, which makes tensors and plain values and runs no code.

        An archive that says that it unpacks to less than `expected` bytes, or to much more, is refused.
        """
        from torch.distributed.checkpoint.utils import _create_file_view as file_view  # seen in torch 2.13

        place = self.metadata.places[key, offsets]
        path = self._check_place(key, place)
        end = place.offset + place.length
        with os_errors("cannot be read", path), open(path, "rb") as file:
            try:
                file.seek(place.offset)
                if file.read(len(_ZIP_MARK)) != _ZIP_MARK:
                    raise zipfile.BadZipFile("it begins otherwise")  # torch's older format, which may end in an archive
                begin = file.seek(max(place.offset, end - _DIRECTORY_BYTES))
                with zipfile.ZipFile(io.BytesIO(file.read(end - begin))) as archive:
                    unpacked = sum(info.file_size for info in archive.infolist())
            except Exception as error:  # zipfile raises errors of many types if the bytes are no archive
                what = f"holds no torch.save archive at bytes [{place.offset}, {end}): {error}"
                raise CheckpointError(what, path=path, tensor=key) from error
            if not expected <= unpacked <= max(expected, place.length) + _MAX_FRAME_BYTES:
                what = f"unpacks to {unpacked} bytes, but {expected or place.length} were expected"
                raise CheckpointError(what, path=path, tensor=key)
            try:
                view = cast(IO[bytes], file_view(file, place.offset, place.length))
                return torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # torch, too, raises errors of many types
                what = f"cannot be read with torch.load(weights_only=True): {error}"
                raise CheckpointError(what, path=path, tensor=key) from error

    def _check_place(self, key: str, place: Any) -> str:
        """Return the path of the file of a chunk or a value, after a check that it holds the range."""
        directory, end = self.metadata.directory, place.offset + place.length
        path = os.path.join(directory, place.relative_path)
        storage = LocalStorage()
        storage.check_inside(directory, place.relative_path)
        stat = storage.find(path)
        if stat.kind != "file":
            what = "the file that holds it is missing" if stat.kind == "missing" else "is not a regular file"
            raise CheckpointError(what, path=path, tensor=key)
        if end > stat.num_bytes:
            what = f"lies at bytes [{place.offset}, {end}), but the file has {stat.num_bytes}: it is truncated"
            raise CheckpointError(what, path=path, tensor=key)
        return path


def _give(tensor: torch.Tensor, begin: int, write: Write) -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    for first in range(0, data.nbytes, PIECE_BYTES):
        write(begin + first, data[first : first + PIECE_BYTES])
