"""`read_dcp_metadata`: read and check the `.metadata` of a `torch.distributed.checkpoint` directory.

torch pickles `.metadata` and reads it by `pickle.load`, which runs code that the file names. The unpickler here allows
torch's metadata classes only, and every field is checked before use.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from raysharding.checkpoint.format import MAX_DIMS, NAME_OF_DTYPE, TensorInfo, is_text, read_beside
from raysharding.checkpoint.storage import LocalStorage, is_remote
from raysharding.errors import CheckpointError, shown

if TYPE_CHECKING:  # its import takes half as long as that of torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

METADATA_NAME: Final = ".metadata"
MAX_METADATA_BYTES: Final = 1 << 30
"""Largest `.metadata` that is read, in bytes; 100,000 chunks take about 20 MB."""
MAX_TUPLE_ITEMS: Final = 4096
"""Largest number of items of a tuple, including those of nested tuples."""
_MAX_INT64: Final = (1 << 63) - 1
_MAX_DEPTH: Final = 64
"""Deepest nesting of a saved state."""
_DTYPES: Final = frozenset({*NAME_OF_DTYPE, torch.complex128})
"""Dtypes whose elements are whole bytes."""


@dataclass(eq=False)
class _Index:
    """A `MetadataIndex`. torch's class hashes its fields, which a hostile file can nest without end."""

    fqn: Any = None
    offset: Any = None


@dataclass(eq=False)
class _Properties:
    """A `TensorProperties` without its deprecated fields."""

    dtype: Any = None
    layout: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype, self.layout = state[:2]


def _nothing(*_: Any) -> None:
    """Stand in for unneeded values: the place the checkpoint was written to, and memory formats."""


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorProperties"): _Properties,
    (_SHARDED, "TensorProperties"): _Properties,  # its place before torch 2.3
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,  # Python 3.11 pickles members of an enum so
    **{(module, f"{kind}Path"): _nothing for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
}
_ADMITTED: Final = {
    *((_METADATA, name) for name in ("Metadata", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in _DTYPES),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
"""With `_STAND_INS`, all names that torch 1.13 to 2.13 writes into `.metadata`."""

Path = tuple[str | int, ...]
"""Path of a value in the saved state: keys of dicts and indices of lists."""


@dataclass(frozen=True)
class DcpMetadata:
    """Contents of one directory. Tensors and values are in the order of the saved state."""

    directory: str
    """The directory, as passed by the caller."""
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    """Key → name, dtype and full shape of the tensor."""
    chunks: dict[str, list[ChunkStorageMetadata]] = field(default_factory=dict)
    """Key → chunks of the tensor, by offset. They cover each element once; none is empty."""
    values: list[str] = field(default_factory=list)
    """Keys of values that are no tensors: numbers, lists of names, pickled objects."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Key → path in the saved state."""
    places: dict[tuple[str, tuple[int, ...] | None], _StorageInfo] = field(default_factory=dict)
    """(key, offsets of the chunk) → file, first byte and length; offsets are `None` for values."""


def read_dcp_metadata(directory: str | os.PathLike[str]) -> DcpMetadata:
    """Read and check `.metadata` of a directory that `torch.distributed.checkpoint.save` wrote.

    Args:
        directory: A local directory.

    Raises:
        CheckpointError: The directory holds no such checkpoint (the error names subdirectories that do), `.metadata`
            names a class other than torch's metadata classes, or is inconsistent: chunks overlap, leave gaps or lie
            outside of their tensor.
    """
    given = os.fspath(directory)
    if is_remote(given):
        raise CheckpointError("is a URI: sharded torch checkpoints are read from a local directory only", path=given)
    path = os.path.join(given, METADATA_NAME)
    data = read_beside(LocalStorage(), given, METADATA_NAME, MAX_METADATA_BYTES)
    if data is None:
        raise _no_metadata(given)
    found = DcpMetadata(given)
    key: Any = None
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        for index, place in metadata.storage_data.items():
            found.places[index.fqn, None if index.offset is None else _size(index.offset)] = _checked_place(place)
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        for key, entry in metadata.state_dict_metadata.items():
            _add(found, key, entry, paths.get(key, (key,)))
    except Exception as error:  # Python's unpickler and torch's classes raise errors of many types
        what = str(error) if type(error) is ValueError else f"is not what torch writes: {type(error).__name__}: {error}"
        raise CheckpointError(what, path=path, tensor=key if isinstance(key, str) else None) from error
    return found


def _no_metadata(directory: str) -> CheckpointError:
    if not os.path.isdir(directory):
        return CheckpointError("no such directory", path=directory)
    what = f"holds no {METADATA_NAME}, so it is no sharded checkpoint of torch.distributed.checkpoint"
    paths = [os.path.join(directory, name) for name in LocalStorage().list_names(directory)]
    inner = [path for path in paths if os.path.isfile(os.path.join(path, METADATA_NAME))]
    if inner:
        what += f"; pass the directory that is: {' or '.join(inner[:8])}"
    return CheckpointError(what, path=directory)


# The Python implementation: a memo index of 4 bytes makes the C implementation allocate 64 GiB.
class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Import a class of torch's metadata, and refuse every other name."""
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        what = f"names {module}.{name}, which no checkpoint of tensors needs: it was not called, nor was anything"
        raise ValueError(f"{what}; is the file from a source that you trust?")

    def load_build(self) -> None:
        """Refuse to set attributes of a class or a function, which are state of this process."""
        if not is_dataclass(type(self.stack[-2])):  # type: ignore[attr-defined]  # typeshed leaves out the stack
            raise pickle.UnpicklingError("a state for what has none")
        super().load_build()  # type: ignore[misc]

    def check_tuple(self) -> None:
        """Refuse a large or deep tuple. Hashing recurses on the C stack: a file of 1 MB could crash the process."""
        made = self.stack[-1]  # type: ignore[attr-defined]
        inner = [item for part in made if isinstance(part, tuple) for item in part]
        if len(made) + len(inner) > MAX_TUPLE_ITEMS or any(isinstance(item, tuple) for item in inner):
            raise pickle.UnpicklingError(f"a tuple of more than {MAX_TUPLE_ITEMS} items, or of three levels")


def _then_check(make: Callable[[Any], None]) -> Callable[[Any], None]:
    def make_and_check(unpickler: _Unpickler) -> None:
        make(unpickler)
        unpickler.check_tuple()

    return make_and_check


_Unpickler.dispatch[pickle.BUILD[0]] = _Unpickler.load_build
for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Unpickler.dispatch[_code[0]] = _then_check(_Unpickler.dispatch[_code[0]])


def _checked_place(place: Any) -> Any:
    """Return a `_StorageInfo` after a check that it names a plain file and a range of bytes."""
    name = place.relative_path
    if not isinstance(name, str) or name in ("", ".", "..") or {*"/\\\0"} & {*name} or not is_text(name):
        raise ValueError(f"names the file {_short(name)}: only plain names of files beside {METADATA_NAME} are read")
    if place.transform_descriptors:
        raise ValueError(f"{name} went through {shown(place.transform_descriptors)}: save without stream extensions")
    for what in ("offset", "length"):
        value = getattr(place, what)
        # `type`, not isinstance: bool is a subclass of int.
        if type(value) is not int or not 0 <= value <= _MAX_INT64:
            raise ValueError(f"{what} is {_short(value)}, not an integer from 0 to 2**63 - 1")
    return place


def _add(found: DcpMetadata, key: Any, entry: Any, path: Any) -> None:
    """Check the metadata of one tensor or value, and add it to `found`."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec._internals import check_tensor, validate_non_overlapping_shards_metadata
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_DEPTH or not isinstance(path[0], str):
        raise ValueError(f"its place in the saved state is {_short(path)}")
    if not isinstance(key, str) or not is_text(key):
        raise ValueError(f"the key is {_short(key)}, not a name")
    for part in path:
        if not (isinstance(part, str) and is_text(part)) and not (type(part) is int and part >= 0):
            raise ValueError(f"its place in the saved state is {_short(path)}")
    found.paths[key] = path
    if isinstance(entry, BytesStorageMetadata):
        found.values.append(key)
        if (key, None) not in found.places:
            raise ValueError("no file is said to hold it")
        return
    dtype, layout, shape = entry.properties.dtype, entry.properties.layout, _size(entry.size)
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype is {_short(dtype)}")
    if layout is not torch.strided:
        raise ValueError(f"its layout is {_short(layout)}: only strided tensors have shards")
    if math.prod(dim or 1 for dim in shape) * dtype.itemsize > _MAX_INT64:
        raise ValueError(f"shape {list(shape)} of {dtype} overflows 64 bits")
    # Ranks with an empty shard also save a chunk.
    chunks = [chunk for chunk in entry.chunks if _size(chunk.sizes).numel()]
    shards = [ShardMetadata(list(_size(chunk.offsets)), list(chunk.sizes)) for chunk in chunks]
    validate_non_overlapping_shards_metadata(shards)
    if shards:
        check_tensor(shards, shape)
    elif math.prod(shape):
        raise ValueError(f"no chunk of its shape {list(shape)} was saved")
    for chunk in chunks:
        if (key, chunk.offsets) not in found.places:
            raise ValueError(f"no file is said to hold its chunk at {list(chunk.offsets)}")
    found.tensors[key] = TensorInfo(key, dtype, shape, 0, 0)
    found.chunks[key] = sorted(chunks, key=lambda chunk: chunk.offsets)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size) or len(value) > MAX_DIMS or any(not 0 <= dim <= _MAX_INT64 for dim in value):
        raise ValueError(f"{_short(value)} is not a size of at most {MAX_DIMS} dimensions")
    return value


def _short(value: Any) -> str:
    """Return a short text for a value from the file, whose repr may be huge."""
    return shown(value) if isinstance(value, str | int | float | bytes | torch.Size) else f"a {type(value).__name__}"
