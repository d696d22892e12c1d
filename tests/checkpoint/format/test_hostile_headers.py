"""Mutated headers: ours either refuses with a `CheckpointError`, or reads what the safetensors library reads."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as safetensors_load

from raysharding.checkpoint.format.header import Header, parse_header, read_header_bytes
from raysharding.errors import CheckpointError
from tests.checkpoint.build import GOOD, GOOD_PAYLOAD

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 1e300, 0.5])
    | st.sampled_from(["", "F32", "BF16", "U8", "F4", "a", "b", "dtype", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "dtype", "shape"]), inner),
    max_leaves=6,
)


def parse(data: bytes) -> Header | None:
    """The header, or None where it was refused. Any other error fails the test."""
    file = len(data).to_bytes(8, "little") + data + GOOD_PAYLOAD
    try:
        header = read_header_bytes("f", len(file), lambda offset, length: file[offset : offset + length])
        return parse_header("f", 0, len(file), header)
    except CheckpointError:
        return None


def agrees_with_safetensors(header: Header, data: bytes) -> None:
    # `format` decides nothing in `load`; a name or dtype that only ours knew would raise here.
    tensors = safetensors_load(len(data).to_bytes(8, "little") + data + GOOD_PAYLOAD)
    assert {info.name for info in header.tensors} == set(tensors)
    for info in header.tensors:
        assert tensors[info.name].dtype == info.dtype
        assert tensors[info.name].shape == torch.Size(info.shape)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_header_with_any_value_replaced(data: st.DataObject) -> None:
    header: dict[str, Any] = json.loads(json.dumps(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        target: Any = header
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(target[key], (dict, list)) and data.draw(st.booleans()):
                target = target[key]
                continue
            target[key] = data.draw(JUNK)
            break
    encoded = json.dumps(header).encode()
    parsed = parse(encoded)
    if parsed is not None:
        agrees_with_safetensors(parsed, encoded)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(b'{}[]",:0123456789-.eNUF\\ \x00\xff')), max_size=4
    )
)
def test_a_header_with_any_bytes_replaced(edits: list[tuple[float, int]]) -> None:
    encoded = bytearray(json.dumps(GOOD).encode())
    for where, byte in edits:
        encoded[int(where * len(encoded))] = byte
    parsed = parse(bytes(encoded))
    if parsed is not None:
        agrees_with_safetensors(parsed, bytes(encoded))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 1 << 40))
def test_random_bytes_are_no_header(data: bytes, num_payload_bytes: int) -> None:
    header_bytes = b"{" + data
    try:
        header = parse_header("f", 0, 8 + len(header_bytes) + num_payload_bytes, header_bytes)
    except CheckpointError:
        return
    assert header.tensors == ()
    assert num_payload_bytes == 0
