"""A `torch.save` archive, looked into without torch: where the bytes of a tensor lie, or the plain value it holds.

The archive is a zip file: `data.pkl` says what was saved, and each `data/N` is the raw memory of one storage, neither
compressed nor encrypted. So a tensor is a byte range of the file, once the pickle is read as data.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import Any, Final

import torch

from raysharding.checkpoint.storage import StoredFile, read_bytes
from raysharding.checkpoint.torch_formats.dcp_metadata import DTYPE_OF_TORCH_NAME
from raysharding.checkpoint.torch_formats.inert_pickle import Record, unpickle
from raysharding.errors import CheckpointError

STORAGE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}
"""dtype → class in `torch` that a storage of it is saved as. Other dtypes are saved as untyped bytes."""
_DTYPE_OF_STORAGE: Final = {f"torch.{name}": dtype for dtype, name in STORAGE_NAMES.items()}
_UNTYPED: Final = "torch.storage.UntypedStorage"

_VALUE_NAMES: Final[dict[tuple[str, str], Any]] = {
    ("__builtin__", "set"): set,
    ("__builtin__", "complex"): complex,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in DTYPE_OF_TORCH_NAME.items()},
}
_TENSOR_NAMES: Final[dict[tuple[str, str], Any]] = _VALUE_NAMES | {
    ("torch._utils", "_rebuild_tensor_v2"): Record,
    ("torch._utils", "_rebuild_tensor_v3"): Record,
    ("torch.storage", "UntypedStorage"): Record,
    **{("torch", name): Record for name in STORAGE_NAMES.values()},
}

_MAX_PICKLE_BYTES: Final = 64 << 20
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    ArithmeticError,
    EOFError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OSError,
    struct.error,
)
"""What `zipfile` raises where the bytes are no archive."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an archive, as a part of the file around it."""

    dtype: torch.dtype
    """dtype of its elements."""
    shape: tuple[int, ...]
    """Its shape."""
    strides: tuple[int, ...]
    """Elements from one index to the next, in each dimension."""
    offset: int
    """Byte of the file at which its storage begins."""
    num_bytes: int
    """Bytes of its storage."""
    first: int
    """Where in the storage its first element is, in elements."""

    @property
    def is_plain(self) -> bool:
        """Whether the elements are the storage, in row-major order."""
        expected, step = [], 1
        for size in reversed(self.shape):
            expected.append(step)
            step *= size
        dims = zip(self.shape, self.strides, reversed(expected), strict=True)
        in_order = all(size == 1 or stride == wanted for size, stride, wanted in dims)
        return self.first == 0 and in_order and self.num_bytes == math.prod(self.shape) * self.dtype.itemsize


class TorchArchive:
    """One `torch.save` archive within a file.

    Args:
        file: The open file.
        path: Names it in errors.
        offset: First byte of the archive.
        num_bytes: Bytes of the archive; they lie within the file.

    Raises:
        CheckpointError: there is no zip archive, or one that does not fit into its bytes.
    """

    def __init__(self, file: StoredFile, path: str, offset: int, num_bytes: int) -> None:
        self._file = file
        self._path = path
        self._offset = offset
        self._num_bytes = num_bytes
        try:
            with zipfile.ZipFile(io.BufferedReader(_Window(file, offset, num_bytes))) as archive:
                infos = archive.infolist()
        except _ZIP_ERRORS as error:
            what = f"holds no torch.save archive at bytes [{offset}, {offset + num_bytes}): {error}"
            raise CheckpointError(what, path=path) from error
        # All records are in one directory, which is named after the file that was saved, or "archive".
        self._records = {info.filename.partition("/")[2]: info for info in infos}
        self.unpacked_bytes = sum(info.file_size for info in infos)
        """Bytes of all records as the archive states them, unpacked."""

    def read_tensor(self) -> StoredTensor | None:
        """Find the one tensor that was saved.

        Returns:
            Where it lies, within the archive; `None` where it is nothing that a byte range can stand for: a tensor
            subclass, a compressed record, or bytes of another order.

        Raises:
            CheckpointError: the archive contradicts itself.
        """
        pickled = self._read("data.pkl")
        order = self._read("byteorder") if "byteorder" in self._records else sys.byteorder.encode()
        if pickled is None or order != sys.byteorder.encode():
            return None
        try:
            saved = unpickle(pickled, _TENSOR_NAMES, self._path, _Storage)
        except CheckpointError:
            return None  # who asked may let torch's own restricted reader try
        return self._locate(saved)

    def read_value(self) -> Any:
        """Read a saved value that is no tensor.

        Returns:
            Numbers, strings, bytes, dtypes, `None`, and lists, tuples, sets and dicts of them.

        Raises:
            CheckpointError: it is anything else, or no pickle.
        """
        pickled = self._read("data.pkl")
        if pickled is None:
            raise CheckpointError("is no archive with a data.pkl that torch wrote", path=self._path)
        return unpickle(pickled, _VALUE_NAMES, self._path)

    def _locate(self, saved: Any) -> StoredTensor | None:
        if not isinstance(saved, Record):
            return None
        is_untyped = saved.kind == "torch._utils._rebuild_tensor_v3"
        num_args = 7 if is_untyped else 6
        # What may follow is a dict of bits: a conjugate tensor, say, whose memory is not its value.
        if len(saved.args) < num_args or any(saved.args[num_args:]) or saved.state is not None:
            return None
        storage, first, shape, strides = saved.args[:4]
        if not isinstance(storage, _Storage) or not (
            _are_sizes(shape) and _are_sizes(strides) and _are_sizes((first,))
        ):
            return None
        dtype = saved.args[6] if is_untyped else _DTYPE_OF_STORAGE.get(storage.kind)
        if not isinstance(dtype, torch.dtype) or is_untyped != (storage.kind == _UNTYPED) or len(shape) != len(strides):
            return None
        found = self._range(f"data/{storage.key}")
        if found is None:
            return None
        offset, num_bytes = found
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and (last + 1) * dtype.itemsize > num_bytes:
            what = f"its storage has {num_bytes} bytes, but shape {list(shape)} with strides {list(strides)} of {dtype}"
            raise CheckpointError(
                f"{what} from element {first} on needs {(last + 1) * dtype.itemsize}", path=self._path
            )
        return StoredTensor(dtype, shape, strides, offset, num_bytes, first)

    def _range(self, name: str) -> tuple[int, int] | None:
        """Byte of the file and length of a record; `None` where it is missing, compressed or encrypted."""
        info = self._records.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return None
        if not 0 <= info.header_offset <= self._num_bytes - _LOCAL_HEADER.size:
            raise CheckpointError(f"its record {name} begins outside of the archive", path=self._path)
        header = read_bytes(self._file, self._offset + info.header_offset, _LOCAL_HEADER.size)
        mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if mark != b"PK\x03\x04" or info.file_size != info.compress_size or begin + info.file_size > self._num_bytes:
            raise CheckpointError(f"its record {name} does not lie within the archive", path=self._path)
        return self._offset + begin, info.file_size

    def _read(self, name: str) -> bytes | None:
        found = self._range(name)
        if found is None or found[1] > _MAX_PICKLE_BYTES:
            return None
        return read_bytes(self._file, *found)


class _Storage:
    """A persistent id of torch: ("storage", class, key, device, number of elements)."""

    def __init__(self, pid: Any) -> None:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
            raise ValueError("a persistent id that is no storage")
        if not isinstance(pid[1], type) or not issubclass(pid[1], Record):
            raise ValueError("a storage of no known class")
        self.kind: str = pid[1].__name__
        """Module and name of its class."""
        self.key: str = pid[2]
        """Name of its record, below `data/`."""


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


class _Window(io.RawIOBase):
    """A part of a file, as a file: nothing outside of it can be read."""

    def __init__(self, file: StoredFile, offset: int, num_bytes: int) -> None:
        self._file = file
        self._offset = offset
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._position)]
        if view.nbytes:
            self._file.fill(self._offset + self._position, (view,))
        self._position += view.nbytes
        return view.nbytes
