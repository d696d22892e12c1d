"""Memory is backed by pages before it is written, and what it holds stays."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from raysharding.distributed.fully_shard.layout import TensorLayout
from raysharding.distributed.transfer.bucket_plan import PlannedTensor, plan_buckets
from raysharding.distributed.transfer.buffers import LocalShards
from raysharding.distributed.transfer.memory import back, host_memory_bytes
from raysharding.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(MADV_POPULATE_WRITE) is Linux's")


def untouched(num_bytes: int) -> torch.Tensor:
    """Memory straight from the kernel: `torch.empty` may hand out again what an earlier test has touched and freed."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=private), dtype=torch.uint8)


def test_memory_that_is_about_to_be_written_is_backed_whole() -> None:
    """A part of a tensor from its first page to its last; behind a page that another has touched; values stay."""
    fresh = untouched(16 * MIB)
    before = host_memory_bytes()
    part = fresh[3 * MIB + 5 : 12 * MIB]
    back(part)
    assert 8 * MIB <= host_memory_bytes() - before <= 10 * MIB
    part.fill_(7)
    back(part)
    assert int(part.min()) == 7
    begun = untouched(64 * MIB)
    begun[0] = 1
    before = host_memory_bytes()
    back(begun)
    assert host_memory_bytes() - before >= 56 * MIB
    assert int(begun[0]) == 1


def test_shards_are_backed_before_they_are_written_and_not_when_they_are_read() -> None:
    layout = TensorLayout("weight", (16 * MIB,), torch.uint8, 1)
    plan = plan_buckets([PlannedTensor(layout, torch.uint8)], 1, 64 * MIB)
    (segment,) = plan[0].sections[0].segments
    local_shards = LocalShards(plan.tensors, {"weight": untouched(16 * MIB)})
    before = host_memory_bytes()
    local_shards.values(segment)
    assert host_memory_bytes() - before <= 2 * MIB
    local_shards.memory(segment, "cpu")
    assert 15 * MIB <= host_memory_bytes() - before <= 17 * MIB
