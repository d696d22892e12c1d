"""Read one safetensors header and check everything in it.

Layout of a file: 8 bytes little-endian header length, the header (a JSON object), the payload. Each entry of the header
is `name: {"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the start of the payload.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch

from raysharding.checkpoint.format.tensor_info import DTYPE_OF_NAME, TensorInfo
from raysharding.errors import CheckpointError, shown

_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of a surrogate. Half a pair can only come from one; whole pairs match too, and are checked again."""


def parse_object(data: bytes, *, strict: bool = True) -> dict[str, Any]:
    """Parse one JSON object.

    Args:
        data: UTF-8 text.
        strict: Refuse what Python's JSON dialect adds to JSON: a key given twice, a NaN or Infinity, a string that is
            not Unicode text.

    Raises:
        ValueError: Not UTF-8, not JSON, not an object, nested too deep, or refused as above. The message says which.
    """
    try:
        # Decoded first: json.loads(bytes) would also accept UTF-16 and UTF-32, which other readers refuse.
        text = data.decode("utf-8")
        hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse_constant} if strict else {}
        parsed = json.loads(text, **hooks)
        if strict and _HALF_PAIR.search(text) and not is_text(json.dumps(parsed, ensure_ascii=False)):
            raise ValueError("holds a string that is not Unicode text")
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def is_text(text: str) -> bool:
    """Return True if `text` can be encoded as UTF-8. Half a surrogate pair, which JSON can escape, cannot."""
    return text.isascii() or not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; refuse a duplicate key, since readers differ on which value counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"gives the key {shown(twice)} twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"holds {text}, which is not JSON")


MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that is read, as in the safetensors library."""
MAX_DIMS: Final = 64
"""Most dimensions of a tensor in torch and numpy."""
_MAX_INT64: Final = (1 << 63) - 1
_LENGTH_BYTES: Final = 8


def read_header_bytes(path: str, num_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """Read the bytes of the header, without its length. Checks only the length."""
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if num_bytes >= _LENGTH_BYTES else 0
    if length > MAX_HEADER_BYTES:
        what = f"header length {length} is over the cap of {MAX_HEADER_BYTES} bytes: not a safetensors file?"
        raise CheckpointError(what, path=path)
    if length > num_bytes - _LENGTH_BYTES:
        what = f"header length {length} does not fit into the file's {num_bytes} bytes: it is truncated"
        raise CheckpointError(what, path=path)
    return read(_LENGTH_BYTES, length)


def header_sha256(data: bytes) -> str:
    """Return the SHA-256, in hex, of a file's first bytes: the header's length, and the header `data`."""
    digest = hashlib.sha256(len(data).to_bytes(_LENGTH_BYTES, "little"))
    digest.update(data)
    return digest.hexdigest()


def parse_header(path: str, file: int, num_bytes: int, data: bytes) -> tuple[list[TensorInfo], dict[str, str]]:
    """Check the header `data` (without its length) of a file of `num_bytes`; return tensors in file order, metadata."""
    start = _LENGTH_BYTES + len(data)
    assert start <= num_bytes, f"{path}: a header that ends at {start} in a file of {num_bytes}"
    if not data.startswith(b"{"):
        raise CheckpointError(f"header begins with {data[:1]!r}, not with '{{': not a safetensors file?", path=path)
    try:
        entries = parse_object(data)
    except ValueError as error:
        raise CheckpointError(f"header {error}", path=path) from error
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    tensors = sorted(
        (_check_entry(path, file, start, name, entry) for name, entry in entries.items()),
        key=lambda info: (info.offset, info.num_bytes),
    )
    _check_tiling(path, tensors, start, num_bytes)
    return tensors, metadata


def _check_metadata(path: str, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"__metadata__ is no object of strings: {shown(metadata)}", path=path)
    return metadata


def _check_entry(path: str, file: int, start: int, name: str, entry: Any) -> TensorInfo:
    """Check one tensor's entry by itself: types, dtype, shape, and that its bytes match its shape."""
    try:
        dtype, shape, (begin, end) = _dtype(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or not all(map(_is_size, [*shape, begin, end])):
            raise ValueError("shape and data_offsets are not lists of integers from 0 to 2**63 - 1")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"has {len(shape)} dimensions; at most {MAX_DIMS} are possible")
        # Dimensions of 0 count as 1: strides are computed without them and overflow all the same.
        if math.prod(dim or 1 for dim in shape) * dtype.itemsize > _MAX_INT64:
            raise ValueError(f"shape {shape} of {dtype} overflows 64 bits")
        num_bytes = math.prod(shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise ValueError(f"shape {shape} of {dtype} takes {num_bytes} bytes, but data_offsets hold {end - begin}")
    except (ValueError, TypeError, KeyError) as error:
        said = str(error) if type(error) is ValueError else f"is malformed ({error!r})"
        raise CheckpointError(f"{said}: its header entry is {shown(entry)}", path=path, tensor=name) from error
    return TensorInfo(name, dtype, tuple(shape), file, start + begin)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPE_OF_NAME:
        what = f"dtype {shown(name)} is unknown or narrower than a byte; known are {', '.join(DTYPE_OF_NAME)}"
        raise ValueError(what)
    return DTYPE_OF_NAME[name]


def _is_size(value: Any) -> bool:
    # `type`, not isinstance: a bool is an int.
    return type(value) is int and 0 <= value <= _MAX_INT64


def _check_tiling(path: str, tensors: list[TensorInfo], start: int, num_bytes: int) -> None:
    """Check that the tensors, sorted by offset, cover the payload from end to end, once."""
    position = start
    previous = "the header"
    for info in tensors:
        if info.offset != position:
            kind = "overlaps it" if info.offset < position else "leaves a hole between them"
            what = f"begins at byte {info.offset}, but {previous} ends at {position}: it {kind}"
            raise CheckpointError(what, path=path, tensor=info.name)
        position += info.num_bytes
        previous = f"tensor {shown(info.name)}"
    if position > num_bytes:
        what = f"ends at byte {position}, but the file has {num_bytes}: it is truncated"
        cut = next(info.name for info in tensors if info.offset + info.num_bytes > num_bytes)
        raise CheckpointError(what, path=path, tensor=cut)
    if position < num_bytes:
        what = f"has {num_bytes - position} trailing bytes: {previous} ends at {position}, the file at {num_bytes}"
        raise CheckpointError(what, path=path)
