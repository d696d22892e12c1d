"""What is checked on the ranks of `test_loading.py`: slow disks, and a rank that cannot go on alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from raysharding.checkpoint import FileReader
from raysharding.config import Loading
from raysharding.distributed import load_checkpoint
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.loading import load
from raysharding.distributed.transfer import sources as source
from raysharding.distributed.transfer import stream as read_ahead
from raysharding.distributed.transfer.buffers import make_ring
from tests.distributed.loading.load_checks import ODD, SOCKETS, sharded


def check_a_slow_disk(root: Path) -> None:
    """Bytes that come slowly are no stall, and are told: the deadline is for a wait without any."""
    read = FileReader.read_ranges

    def slow(self: FileReader, file: int, ranges: Any) -> None:
        for item in ranges:
            time.sleep(0.4)
            read(self, file, [item])

    told: list[int] = []
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(FileReader, "read_ranges", slow)
        changed.setattr(source, "PIECE_BYTES", 2 << 10)
        changed.setattr(read_ahead, "_LOOK_S", 0.1)  # most looks find nothing new
        report = load_checkpoint(
            sharded(root / ODD),
            root / ODD,
            loading=Loading("local"),
            progress=lambda phase, done, total, name: told.append(done) if phase == "stream" else None,
            stall_s=1.2,
        )
    assert report.stream_s > 1.5, "not slow enough to show anything"
    assert len(set(told)) > report.num_buckets, told
    assert told == sorted(told), told


def check_threads_end_after_a_stall(root: Path) -> None:
    """The threads of a load that failed, which hold its shards, end when the disk answers again."""
    read, answers = FileReader.read_ranges, threading.Event()

    def stalls(self: FileReader, file: int, ranges: Any) -> None:
        answers.wait(60)
        read(self, file, ranges)

    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(FileReader, "read_ranges", stalls)
        changed.setattr(read_ahead, "_END_S", 0.1)
        with pytest.raises(TimeoutError, match="nothing was read"):
            load_checkpoint(sharded(root / ODD), root / ODD, loading=Loading("local"), stall_s=0.5)
        assert {thread.name for thread in threading.enumerate()} >= {"raysharding-read-ahead"}, "it waits for the disk"
        answers.set()
        until = time.monotonic() + 20.0
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < until, left
            time.sleep(0.05)


def check_no_memory_for_a_ring(root: Path) -> None:
    """One rank has none: all say so at once, none waits in the stream."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no room for a ring")
        return make_ring(*args, **kwargs)

    for loading in (Loading("broadcast"), SOCKETS):
        started, raised = time.monotonic(), ""
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(load, "make_ring", fails)
            try:
                load_checkpoint(sharded(root / ODD), root / ODD, loading=loading, stall_s=20)
            except Exception as error:
                raised = str(error)
        every = all_gather_json([raised, time.monotonic() - started])
        assert all("no room for a ring" in text and seconds < 10 for text, seconds in every), every
    load_checkpoint(sharded(root / ODD), root / ODD, loading=Loading("broadcast"))
