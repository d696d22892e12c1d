"""Rows 7, 8, 12: a file that is wrong stops a group before it has an actor, and a file that changes stops the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysharding import CheckpointError, Loading, Timeouts
from tests.clock import now
from tests.conftest import make_group, rank_processes
from tests.faults.trap import BUCKET_BYTES, slow_reads

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_wrong_file_is_refused_before_there_is_an_actor(checkpoint: Path, tmp_path: Path) -> None:
    """Files that are wrong in each way: `tests/checkpoint/format`."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint.read_bytes()[:-4])
    before = rank_processes()
    begun = now()
    with pytest.raises(CheckpointError, match="truncated") as caught:
        make_group(path)
    assert now() - begun < 2
    assert caught.value.path == str(path)
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
