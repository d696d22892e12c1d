"""`DcpMetadata`: what a `torch.distributed.checkpoint` directory says of itself, in `.metadata`, checked.

torch writes its own objects as a pickle. They are read as records (`inert_pickle.py`), so not one of the classes named
here is imported; each field is checked before it is believed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from raysharding.checkpoint.format import MAX_DIMS, is_text, read_beside
from raysharding.checkpoint.storage import LocalStorage, is_remote
from raysharding.checkpoint.torch_formats.inert_pickle import Record, unpickle
from raysharding.checkpoint.torch_formats.tiling import tiling_problem
from raysharding.errors import CheckpointError, shown

METADATA_NAME: Final = ".metadata"
MAX_METADATA_BYTES: Final = 1 << 30
"""Longest `.metadata` that is read; one of 100,000 chunks has about 20 MB."""
_MAX_INT64: Final = (1 << 63) - 1
_MAX_DEPTH: Final = 64
"""Deepest nesting of a saved state."""

DTYPE_OF_TORCH_NAME: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
}
"""Name in a pickle, after `torch.`, → dtype. Each fills whole bytes."""

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS: Final = (
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_SHARDED, "TensorProperties"),  # where torch before 2.3 had it
    (_SHARDED, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # how Python 3.11 writes a member of an enum: a record too, it gets nothing
    ("pathlib", "PosixPath"),  # where the checkpoint was written
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
)
_ADMITTED: Final[dict[tuple[str, str], Any]] = {
    **dict.fromkeys(_RECORDS, Record),
    **{("torch", name): dtype for name, dtype in DTYPE_OF_TORCH_NAME.items()},
    ("collections", "OrderedDict"): dict,
}
"""Every name that torch 1.13 to 2.13 writes into `.metadata`."""

Path = tuple[str | int, ...]
"""Where a value was in the saved state: keys of dicts and positions in lists."""


@dataclass(frozen=True, slots=True)
class Item:
    """A place in the files: one thing that torch wrote."""

    file: str
    """Plain name of a file in the directory."""
    offset: int
    """First byte in the file."""
    num_bytes: int
    """Bytes there; of a `torch.save` archive, the whole archive's."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, as one rank saved it."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Shape of the box; it has elements."""
    item: Item
    """Where its bytes are."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One saved tensor."""

    key: str
    """Its name in the files: the path, joined by dots."""
    path: Path
    """Its place in the saved state."""
    dtype: torch.dtype
    """dtype of every chunk."""
    shape: tuple[int, ...]
    """Full shape."""
    chunks: tuple[Chunk, ...]
    """They cover the tensor, each element once; none where it has no element."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DcpValue:
    """One saved value that is no tensor: a number, a list of names, a pickled object."""

    key: str
    """Its name in the files: the path, joined by dots."""
    path: Path
    """Its place in the saved state."""
    item: Item
    """Where it is."""


@dataclass(frozen=True)
class DcpMetadata:
    """What one directory holds."""

    directory: str
    """The directory, as it was given."""
    tensors: tuple[DcpTensor, ...]
    """In the order of the saved state."""
    values: tuple[DcpValue, ...]
    """In the order of the saved state."""


def read_dcp_metadata(directory: str | os.PathLike[str]) -> DcpMetadata:
    """Read and check `.metadata` of a directory that `torch.distributed.checkpoint.save` wrote.

    Args:
        directory: A local directory.

    Raises:
        CheckpointError: it is no such directory (subdirectories that are, are named), `.metadata` names a class that
            is not torch's metadata, or says what cannot be: chunks that overlap, leave a gap or lie outside.
    """
    given = os.fspath(directory)
    if is_remote(given):
        raise CheckpointError("is a URI: sharded torch checkpoints are read from a local directory only", path=given)
    path = os.path.join(given, METADATA_NAME)
    data = read_beside(LocalStorage(), given, METADATA_NAME, MAX_METADATA_BYTES)
    if data is None:
        raise _no_metadata(given)
    metadata = unpickle(data, _ADMITTED, path)
    try:
        return _read(given, metadata)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"is not what torch writes: {error}", path=path) from error


def _no_metadata(directory: str) -> CheckpointError:
    if not os.path.isdir(directory):
        return CheckpointError("no such directory", path=directory)
    what = f"holds no {METADATA_NAME}, so it is no sharded checkpoint of torch.distributed.checkpoint"
    inner = [name for name in LocalStorage().list_names(directory) if _is_checkpoint(os.path.join(directory, name))]
    if inner:
        what += f"; pass the directory that is: {' or '.join(os.path.join(directory, name) for name in inner[:8])}"
    return CheckpointError(what, path=directory)


def _is_checkpoint(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, METADATA_NAME))


def _read(directory: str, metadata: Any) -> DcpMetadata:
    fields = _fields(metadata, "Metadata")
    items = _read_items(_dict(fields.get("storage_data"), "storage_data"))
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    tensors, values = [], []
    for key, entry in _dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(key, str) or not is_text(key):
            raise ValueError(f"the key {_short(key)} is not Unicode text")
        try:
            path = _path(paths.get(key, (key,)))
            if _is(entry, "BytesStorageMetadata"):
                values.append(DcpValue(key, path, _item(items, key, None)))
            else:
                tensors.append(_tensor(key, path, entry, items))
        except ValueError as error:
            raise CheckpointError(str(error), path=os.path.join(directory, METADATA_NAME), tensor=key) from error
    return DcpMetadata(directory, tuple(tensors), tuple(values))


def _read_items(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Item]:
    """(key, offsets of the chunk) → place; offsets are `None` for what is no tensor."""
    items = {}
    for index, info in storage.items():
        fields = _fields(index, "MetadataIndex")
        key, offset = fields.get("fqn"), fields.get("offset")
        place = _fields(info, "_StorageInfo")
        name = place.get("relative_path")
        if not isinstance(key, str):
            raise ValueError(f"an index names {_short(key)}, not a key")
        if not isinstance(name, str) or not _is_plain_name(name):
            what = f"{shown(key)} is in the file {_short(name)}: only plain names of files beside "
            what += f"{METADATA_NAME} are read"
            raise ValueError(what)
        if place.get("transform_descriptors"):
            what = f"{shown(key)} went through {_short(place['transform_descriptors'])}: save without stream extensions"
            raise ValueError(what)
        where = _number(place.get("offset"), "offset"), _number(place.get("length"), "length")
        items[key, None if offset is None else _size(offset)] = Item(name, *where)
    return items


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(letter in name for letter in "/\\\0") and is_text(name)


def _tensor(key: str, path: Path, entry: Any, items: Mapping[tuple[str, tuple[int, ...] | None], Item]) -> DcpTensor:
    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, Record) or not _is(properties, "TensorProperties"):
        raise ValueError(f"its properties are {_short(properties)}")
    state = properties.state
    dtype, layout = (state[0], state[1]) if isinstance(state, tuple) and len(state) >= 2 else (None, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"its dtype is {_short(dtype)}")
    if not isinstance(layout, Record) or not _is(layout, "_get_layout") or layout.args != ("torch.strided",):
        raise ValueError(f"its layout is {_short(getattr(layout, 'args', layout))}: only strided tensors have shards")
    shape = _size(fields.get("size"))
    if math.prod(dim or 1 for dim in shape) * dtype.itemsize > _MAX_INT64:
        raise ValueError(f"shape {list(shape)} of {dtype} overflows 64 bits")
    boxes = fields.get("chunks")
    if not isinstance(boxes, list):
        raise ValueError(f"its chunks are {_short(boxes)}, not a list")
    chunks = []
    for box in boxes:
        corners = _fields(box, "ChunkStorageMetadata")
        offsets, sizes = _size(corners.get("offsets")), _size(corners.get("sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk at {list(offsets)} of shape {list(sizes)} is no part of shape {list(shape)}")
        if math.prod(sizes):  # ranks whose shard is empty save a chunk too
            chunks.append(Chunk(offsets, sizes, _item(items, key, offsets)))
    problem = tiling_problem(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    if problem:
        raise ValueError(problem)
    return DcpTensor(key, path, dtype, shape, tuple(chunks))


def _item(items: Mapping[tuple[str, tuple[int, ...] | None], Item], key: str, offsets: tuple[int, ...] | None) -> Item:
    found = items.get((key, offsets))
    if found is None:
        what = "it" if offsets is None else f"its chunk at {list(offsets)}"
        raise ValueError(f"no file is said to hold {what}")
    return found


def _path(value: Any) -> Path:
    if not isinstance(value, tuple) or not 0 < len(value) <= _MAX_DEPTH or not isinstance(value[0], str):
        raise ValueError(f"its place in the saved state is {_short(value)}")
    for part in value:
        if not (isinstance(part, str) and is_text(part)) and not (type(part) is int and part >= 0):
            raise ValueError(f"its place in the saved state is {_short(value)}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`, as a tuple of at most `MAX_DIMS` numbers."""
    sizes = value.args[0] if _is(value, "Size") and len(value.args) == 1 else value
    if not isinstance(sizes, tuple) or len(sizes) > MAX_DIMS:
        raise ValueError(f"{_short(sizes)} is not a size of at most {MAX_DIMS} dimensions")
    return tuple(_number(size, "a dimension") for size in sizes)


def _number(value: Any, what: str) -> int:
    # `type`, not isinstance: True is an int too.
    if type(value) is not int or not 0 <= value <= _MAX_INT64:
        raise ValueError(f"{what} is {_short(value)}, not an integer from 0 to 2**63 - 1")
    return value


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.kind.rpartition(".")[2] == name


def _fields(value: Any, name: str) -> dict[Any, Any]:
    """The attributes of a record of class `name`."""
    if not _is(value, name):
        raise ValueError(f"{_short(value)} is where {name} belongs")
    return _dict({} if value.state is None else value.state, name)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_short(value)}, not a dict")
    return value


def _short(value: Any) -> str:
    return f"an object of {value.kind}" if isinstance(value, Record) else shown(value)
