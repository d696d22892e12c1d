"""Memory is backed ahead of its first touch, and what it holds stays."""

from __future__ import annotations

import mmap
import sys
import time

import pytest
import torch

from raysharding.distributed.memory import host_memory_bytes
from raysharding.distributed.prefault import Prefault

MIB = 1 << 20


def untouched(num_bytes: int) -> torch.Tensor:
    """Memory straight from the kernel: `torch.empty` may hand out again what an earlier test has touched and freed."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=private), dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="madvise(MADV_POPULATE_WRITE) is Linux's")
def test_untouched_memory_is_backed_and_values_stay() -> None:
    held = torch.arange(2 * MIB)
    before = host_memory_bytes()
    fresh = untouched(64 * MIB)
    assert host_memory_bytes() - before < 8 * MIB
    with Prefault([held, torch.empty(0), torch.ones(()), fresh]):
        deadline = time.monotonic() + 30
        while host_memory_bytes() - before < 63 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
    assert host_memory_bytes() - before >= 63 * MIB
    assert torch.equal(held, torch.arange(2 * MIB))


def test_it_stops_when_the_load_does() -> None:
    fresh = untouched(2048 * MIB)
    before = host_memory_bytes()
    with Prefault([fresh]):
        pass
    assert host_memory_bytes() - before < 1024 * MIB
