"""Every way a header can lie is refused, with the file and the tensor named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.format.header import MAX_HEADER_BYTES
from tests.checkpoint.build import GOOD, GOOD_PAYLOAD, entry, refused, write_raw

BIG = 1 << 62
DEEP = 200_000

NO_SIZES = "lists of integers from 0|header entry is .*data_offsets"
FILES: list[tuple[str, Any, bytes, str | None, str]] = [
    # case, header, payload, tensor named, message
    ("truncated in the payload", GOOD, GOOD_PAYLOAD[:-9], "a", "truncated"),
    ("truncated in the last tensor", GOOD, GOOD_PAYLOAD[:-1], "b", "ends at byte .* is truncated"),
    ("trailing bytes", GOOD, GOOD_PAYLOAD + b"xyz", None, "3 trailing bytes"),
    ("trailing bytes after no tensor", {}, b"xyz", None, "3 trailing bytes"),
    ("hole at the start", {"a": entry(offsets=[1, 5])}, bytes(5), "a", "the header ends at .* a hole"),
    ("hole", {"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9), "b", "tensor 'a' ends at .* a hole"),
    ("overlap", {"a": entry(), "b": entry(offsets=[3, 7])}, bytes(7), "b", "tensor 'a' ends at .* overlaps"),
    ("same range twice", {"a": entry(), "b": entry()}, bytes(4), "b", "overlaps"),
    ("empty tensor inside another", {"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, bytes(4), "b", "overlaps"),
    ("shape overflow", {"a": entry(shape=[BIG, BIG])}, bytes(4), "a", "overflows 64 bits"),
    ("shape overflow in bytes", {"a": entry("F64", [BIG], [0, 4])}, bytes(4), "a", "overflows 64 bits"),
    ("shape overflow beside a 0", {"a": entry(shape=[BIG, BIG, 0], offsets=[0, 0])}, b"", "a", "overflows 64 bits"),
    ("dimension over 64 bits", {"a": entry(shape=[1 << 64])}, bytes(4), "a", NO_SIZES),
    ("negative dimension", {"a": entry(shape=[-4])}, bytes(4), "a", NO_SIZES),
    ("two negative dimensions", {"a": entry(shape=[-2, -2])}, bytes(4), "a", NO_SIZES),
    ("fractional dimension", {"a": entry(shape=[4.0])}, bytes(4), "a", NO_SIZES),
    ("boolean dimension", {"a": entry(shape=[4, True])}, bytes(4), "a", NO_SIZES),
    ("string dimension", {"a": entry(shape=["4"])}, bytes(4), "a", NO_SIZES),
    ("shape is a number", {"a": entry(shape=4)}, bytes(4), "a", NO_SIZES),
    ("too many dimensions", {"a": entry(shape=[1] * 65, offsets=[0, 1])}, bytes(1), "a", "65 dimensions"),
    ("unknown dtype", {"a": entry("F31")}, bytes(4), "a", "dtype 'F31' is unknown"),
    ("dtype in lower case", {"a": entry("u8")}, bytes(4), "a", "dtype 'u8' is unknown"),
    ("dtype is a list", {"a": entry(["U8"])}, bytes(4), "a", "dtype .* is unknown"),  # type: ignore[arg-type]
    ("sub-byte dtype", {"a": entry("F4", [8], [0, 4])}, bytes(4), "a", "dtype 'F4' is unknown or narrower"),
    ("shape and offsets differ", {"a": entry(shape=[5])}, bytes(4), "a", "takes 5 bytes, but .* hold 4"),
    ("offsets reversed", {"a": entry(offsets=[4, 0])}, bytes(4), "a", "takes 4 bytes, but .* hold -4"),
    ("negative offset", {"a": entry(offsets=[-4, 0])}, bytes(4), "a", NO_SIZES),
    ("offset over 64 bits", {"a": entry(offsets=[1 << 64, (1 << 64) + 4])}, bytes(4), "a", NO_SIZES),
    ("one offset", {"a": entry(offsets=[4])}, bytes(4), "a", NO_SIZES),
    ("offsets is null", {"a": entry(offsets=None)}, bytes(4), "a", NO_SIZES),
    ("offsets nested deep", {"a": entry(offsets=json.loads("[" * 500 + "]" * 500))}, bytes(4), "a", NO_SIZES),
    ("no dtype", {"a": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4), "a", "malformed .KeyError.'dtype'"),
    ("entry is a list", {"a": [1, 2]}, bytes(4), "a", "malformed"),
    ("entry is null", {"a": None}, bytes(4), "a", "malformed"),
    ("metadata is a list", {"__metadata__": []}, b"", None, "__metadata__ is no object of strings"),
    ("metadata value is a number", {"__metadata__": {"step": 3}}, b"", None, "__metadata__ .*'step': 3"),
    ("name given twice", b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4), None, "key 'a' twice"),
    (
        "dtype given twice",
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        b"1234",
        None,
        "twice",
    ),
    ("NaN", b'{"a":NaN}', b"", None, "holds NaN, which is not JSON"),
    ("Infinity", b'{"a":-Infinity}', b"", None, "holds -Infinity, which is not JSON"),
    ("nested too deep", b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}", b"", None, "nested too deep"),
    ("a huge number", b'{"a":' + b"9" * 5000 + b"}", b"", None, "header"),
    ("half a surrogate pair", b'{"\\ud800":null}', b"", None, "not Unicode text"),
    ("half a surrogate pair in a value", b'{"a":{"x":["\\udfff"]}}', b"", None, "string that is not Unicode text"),
    ("not UTF-8", b'{"\xff":null}', b"", None, "not UTF-8"),
    ("UTF-16", "{}".encode("utf-16-be"), b"", None, "begins with"),
    ("not an object", b"[]", b"", None, r"begins with b'\['"),
    ("leading space", b" {}", b"", None, "begins with b' '"),
    ("empty header", b"", b"", None, "begins with b''"),
    ("broken JSON", b'{"a":', b"", None, "not JSON"),
    ("text after the object", b"{} {}", b"", None, "not JSON"),
]


@pytest.mark.parametrize(("header", "payload", "tensor", "message"), [c[1:] for c in FILES], ids=[c[0] for c in FILES])
def test_a_wrong_header_is_refused(
    tmp_path: Path, header: Any, payload: bytes, tensor: str | None, message: str
) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, payload)
    error = refused(path, message)
    assert (error.path, error.tensor) == (str(path), tensor)
    assert len(str(error)) < 1000 + len(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes: it is truncated"),
        (b"\x02\0\0\0\0\0\0", "7 bytes: it is truncated"),
        ((3).to_bytes(8, "little") + b"{}", "header length 3 does not fit"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "over the cap"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "over the cap"),
        ((MAX_HEADER_BYTES).to_bytes(8, "little") + b"{}", "does not fit"),
        (b"PK\x03\x04" + bytes(100), "header"),
    ],
)
def test_a_wrong_header_length_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert refused(path, message).path == str(path)


def test_what_the_format_allows_is_accepted(tmp_path: Path) -> None:
    # Entries in another order than the bytes, padding, an empty tensor between two others, unknown keys, metadata.
    header = {
        "b": entry("BF16", [2], [8, 12]),
        "__metadata__": {"format": "pt", "ключ": "значение"},
        "empty": entry("F32", [3, 0], [8, 8]),
        "a": entry("F32", [2, 1], [0, 8]) | {"comment": "kept by nobody"},
        "zero-dim": entry("F32", [], [12, 16]),
    }
    path = write_raw(tmp_path / "model.safetensors", json.dumps(header).encode() + b"   ", bytes(16))
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == ["a", "empty", "b", "zero-dim"]
    assert checkpoint.tensors["zero-dim"].shape == ()
    assert checkpoint.tensors["zero-dim"].num_elements == 1
    assert checkpoint.num_bytes == 16
    assert checkpoint.metadata == {"format": "pt", "ключ": "значение"}
