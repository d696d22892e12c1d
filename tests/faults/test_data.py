"""Rows 7, 8, 12: files that are wrong stop a group before it has an actor, and a file that changes stops the load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from raysharding import CheckpointError, Loading, Timeouts
from tests.clock import now
from tests.conftest import make_group, rank_processes
from tests.faults.trap import BUCKET_BYTES, slow_reads

pytestmark = pytest.mark.usefixtures("nothing_left")


def spoil(data: bytes, how: str) -> bytes:
    """A safetensors file that is wrong in one way."""
    size = struct.unpack("<Q", data[:8])[0]
    header, payload = data[8 : 8 + size], data[8 + size :]
    if how == "truncated":
        return data[:-4]
    if how == "trailing bytes":
        return data + b"more"
    if how == "oversized header":
        return struct.pack("<Q", 1 << 40) + data[8:]
    fields = json.loads(header)
    if how == "unknown dtype":
        fields["0.bias"]["dtype"] = "F31"
    if how == "shape overflow":
        fields["0.bias"]["shape"] = [1 << 40, 1 << 40]
    if how == "hole":
        fields = {name: value for name, value in fields.items() if name != "0.weight"}
    text = json.dumps(fields).encode()
    if how == "duplicate key":
        text = text[:-1] + b',"0.bias":' + json.dumps(fields["0.bias"]).encode() + b"}"
    return struct.pack("<Q", len(text)) + text + payload


WRONG = ("truncated", "trailing bytes", "oversized header", "unknown dtype", "shape overflow", "hole", "duplicate key")


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_file_is_refused_before_there_is_an_actor(how: str, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(spoil(checkpoint.read_bytes(), how))
    before = rank_processes()
    begun = now()
    with pytest.raises(CheckpointError) as caught:
        make_group(path)
    assert now() - begun < 2
    assert caught.value.path == str(path)
    if how in ("unknown dtype", "shape overflow"):
        assert caught.value.tensor == "0.bias"
    assert not rank_processes() - before


def test_a_file_that_changes_while_it_is_streamed(many_buckets: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(many_buckets.read_bytes())
    changed_at: list[float] = []

    def change(done: int, total: int) -> None:
        if done and not changed_at:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            changed_at.append(now())
            path.write_bytes(data)

    with pytest.raises(CheckpointError, match=r"changed|replaced") as caught:
        make_group(
            path,
            model=slow_reads(0.1),
            loading=Loading("scatter", bucket_bytes=BUCKET_BYTES),
            timeouts=Timeouts(load_stall_s=20, drain_s=1),
            progress=change,
        )
    assert caught.value.path == str(path)
    assert changed_at
    assert now() - changed_at[0] < 10
