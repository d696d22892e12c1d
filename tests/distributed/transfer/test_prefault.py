"""Memory is backed ahead of its first touch, and what it holds stays."""

from __future__ import annotations

import mmap
import sys
import time

import pytest
import torch

from raysharding.distributed.fully_shard.layout import TensorLayout
from raysharding.distributed.transfer.bucket_plan import PlannedTensor, plan_buckets
from raysharding.distributed.transfer.buffers import LocalShards
from raysharding.distributed.transfer.memory import back, host_memory_bytes, prefault
from raysharding.units import MIB


def untouched(num_bytes: int) -> torch.Tensor:
    """Memory straight from the kernel: `torch.empty` may hand out again what an earlier test has touched and freed."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=private), dtype=torch.uint8)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="madvise(MADV_POPULATE_WRITE) is Linux's")


@linux_only
def test_untouched_memory_is_backed_and_values_stay() -> None:
    held = torch.arange(2 * MIB)
    before = host_memory_bytes()
    fresh = untouched(64 * MIB)
    assert host_memory_bytes() - before < 8 * MIB
    with prefault([held, torch.empty(0), torch.ones(()), fresh]):
        deadline = time.monotonic() + 30
        while host_memory_bytes() - before < 63 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
    assert host_memory_bytes() - before >= 63 * MIB
    assert torch.equal(held, torch.arange(2 * MIB))


@linux_only
def test_it_stops_when_the_load_does() -> None:
    fresh = untouched(4096 * MIB)
    before = host_memory_bytes()
    with prefault([fresh]):
        deadline = time.monotonic() + 30
        while host_memory_bytes() - before < 8 * MIB and time.monotonic() < deadline:
            time.sleep(0.001)
    after = host_memory_bytes()
    assert 8 * MIB <= after - before < 2048 * MIB
    time.sleep(0.1)
    assert host_memory_bytes() - after < MIB


@linux_only
def test_memory_that_is_about_to_be_written_is_backed_whole() -> None:
    fresh = untouched(16 * MIB)
    before = host_memory_bytes()
    part = fresh[3 * MIB + 5 : 12 * MIB]
    back(part)
    assert 8 * MIB <= host_memory_bytes() - before <= 10 * MIB
    part.fill_(7)
    back(part)
    assert int(part.min()) == 7


@linux_only
def test_what_another_has_begun_is_backed_to_the_end() -> None:
    fresh = untouched(64 * MIB)
    fresh[0] = 1
    before = host_memory_bytes()
    back(fresh)
    assert host_memory_bytes() - before >= 56 * MIB


@linux_only
def test_shards_are_backed_before_they_are_written_and_not_when_they_are_read() -> None:
    layout = TensorLayout("weight", (16 * MIB,), torch.uint8, 1)
    plan = plan_buckets([PlannedTensor(layout, torch.uint8)], 1, 64 * MIB)
    (segment,) = plan[0].sections[0].segments
    tensor = untouched(16 * MIB)
    local_shards = LocalShards(plan.tensors, {"weight": tensor}, is_fresh=True)
    before = host_memory_bytes()
    local_shards.values(segment)
    assert host_memory_bytes() - before <= 2 * MIB
    local_shards.memory(segment, "cpu")
    assert 15 * MIB <= host_memory_bytes() - before <= 17 * MIB
