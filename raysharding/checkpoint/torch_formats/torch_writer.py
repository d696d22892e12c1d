"""`TorchFileWriter`: what `torch.save` writes, for tensors that never are in memory whole."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Final, Self

import torch

from raysharding.checkpoint.format import TensorInfo
from raysharding.checkpoint.storage import disk_error
from raysharding.checkpoint.torch_formats.torch_archive import STORAGE_NAMES
from raysharding.errors import CheckpointError

_ALIGNMENT: Final = 64
"""Of each storage in the file, as torch aligns them: `torch.load(mmap=True)` uses them where they are."""
_FORMAT_VERSION: Final = b"1"
_VERSION: Final = b"3\n"
_PADDING_ID: Final = b"FB"
_HEADER_BYTES: Final = 30
_ZIP64_BYTES: Final = 20


class TorchFileWriter:
    """Writes one file that `torch.load(weights_only=True)` reads. A context manager: an error removes the file.

    Holds no tensor: their bytes go from the caller's memory to the file, one tensor after the other.

    Args:
        path: The file to make; it must not exist yet.
        tree: What is saved: dicts, lists and plain values, and a `TensorInfo` in the place of each tensor. Of it,
            name, dtype and shape are used; names are given once each.

    Raises:
        CheckpointError: the file cannot be made, or the tree is nested too deep.
    """

    def __init__(self, path: str, tree: Any) -> None:
        self.path = path
        """As given."""
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        try:
            pickler.dump(tree)
        except (RecursionError, pickle.PicklingError, TypeError) as error:
            raise CheckpointError(f"its state cannot be pickled: {error}", path=path) from error
        self.tensors: Mapping[str, TensorInfo] = {info.name: info for info in pickler.tensors}
        """Name → tensor, in the order in which they must be written."""
        assert len(self.tensors) == len(pickler.tensors), "a name that is given twice"
        self._order = list(self.tensors)
        self._num_written = 0  # tensors
        try:
            self._file: IO[bytes] = open(path, "xb")  # noqa: SIM115 - closed by `close` or `abort`
        except OSError as error:
            raise CheckpointError(f"cannot be made: {error.strerror}", path=path) from error
        self._archive = zipfile.ZipFile(self._file, "w")
        try:
            self._put("data.pkl", pickled.getvalue())
            self._put(".format_version", _FORMAT_VERSION)
            self._put(".storage_alignment", str(_ALIGNMENT).encode())
            self._put("byteorder", sys.byteorder.encode())
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise disk_error(error, path, None) from error
            raise

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a tensor. All are written, in the order of `tensors`.

        Args:
            name: The tensor.
            pieces: Its bytes, row-major.

        Raises:
            CheckpointError: the disk is full or failed.
        """
        info = self.tensors[name]
        assert name == self._order[self._num_written], f"{name}: out of turn"
        num_bytes = 0
        try:
            with self._open(f"data/{self._num_written}") as record:
                for piece in pieces:
                    record.write(piece)
                    num_bytes += piece.nbytes
        except OSError as error:
            raise disk_error(error, self.path, name) from error
        assert num_bytes == info.num_bytes, f"{name}: {num_bytes} of {info.num_bytes} bytes"
        self._num_written += 1

    def close(self) -> None:
        """Put the file on the disk, and close it. Idempotent.

        Raises:
            CheckpointError: the disk is full or failed. The file is then removed.
        """
        if self._file.closed:
            return
        try:
            assert self._num_written == len(self.tensors), f"{self._num_written} of {len(self.tensors)} tensors"
            self._put("version", _VERSION)
            self._archive.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise disk_error(error, self.path, None) from error
            raise

    def abort(self) -> None:
        """Close and remove the file. After `close`, or a second time, it does nothing."""
        if self._file.closed:
            return
        # The archive would write its directory when it is collected.
        self._archive.fp = None
        with suppress(OSError):  # of a full disk that has no place for what is still in the buffer: it is not wanted
            self._file.close()
        os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _put(self, name: str, data: bytes) -> None:
        with self._open(name) as record:
            record.write(data)

    def _open(self, name: str) -> IO[bytes]:
        """Begin a record, its first byte aligned."""
        info = zipfile.ZipInfo(f"{os.path.basename(self.path).partition('.')[0]}/{name}")
        begin = self._file.tell() + _HEADER_BYTES + len(info.filename) + _ZIP64_BYTES + 4
        num_padding = -begin % _ALIGNMENT
        info.extra = struct.pack("<2sH", _PADDING_ID, num_padding) + b"Z" * num_padding
        # Always the long form, whose size is known before the record's is.
        return self._archive.open(info, "w", force_zip64=True)


@dataclass(frozen=True, slots=True)
class _StorageId:
    """A storage, in the place of torch's own: what its persistent id says."""

    info: TensorInfo
    index: int


class _Pickler(pickle.Pickler):
    """Pickles a tree as `torch.save` would if the tensors were there."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[TensorInfo] = []
        """In the order of their records."""

    def reducer_override(self, value: Any) -> Any:
        """Write a `TensorInfo` as a contiguous CPU tensor."""
        if not isinstance(value, TensorInfo):
            return NotImplemented
        strides, step = [], 1
        for size in reversed(value.shape):
            strides.append(step)
            step *= max(size, 1)
        storage = _StorageId(value, len(self.tensors))
        self.tensors.append(value)
        args: tuple[Any, ...] = (storage, 0, value.shape, tuple(reversed(strides)), False, OrderedDict())
        if value.dtype in STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        """Name a storage as torch does: class, record, device, elements."""
        if not isinstance(value, _StorageId):
            return None
        name = STORAGE_NAMES.get(value.info.dtype)
        if name is None:
            return "storage", torch.UntypedStorage, str(value.index), "cpu", value.info.num_bytes
        return "storage", getattr(torch, name), str(value.index), "cpu", value.info.num_elements
