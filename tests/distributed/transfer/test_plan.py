"""The bucket plan covers every element of every shard once, in order, inside its bounds."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.distributed.fully_shard.layout import TensorLayout
from raysharding.distributed.transfer.bucket_plan import (
    ALIGNMENT_BYTES,
    DIRECT_BYTES,
    REPLICATED,
    BucketPlan,
    PlannedTensor,
    plan_buckets,
)

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[int, list[PlannedTensor]]:
    num_shards = draw(st.integers(1, 5))
    planned = []
    for index in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 33, 500]), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        cut = draw(st.sampled_from([0, num_shards])) if shape else 0
        planned.append(PlannedTensor(TensorLayout(f"t{index}", shape, dtype, cut), dtype))
    return num_shards, planned


def ranges_of(plan: BucketPlan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(tensor, shard index) → its ranges in the order of the stream."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for bucket in plan:
        for section in bucket.sections:
            for segment in section.segments:
                found.setdefault((segment.tensor, section.shard_index), []).append((segment.start, segment.stop))
    return found


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([4096, 10_000, 1 << 20, 1 << 22]))
def test_every_element_of_every_shard_travels_once(case: tuple[int, list[PlannedTensor]], bucket_bytes: int) -> None:
    num_shards, planned = case
    found = ranges_of(plan_buckets(planned, num_shards, bucket_bytes))
    for index, item in enumerate(planned):
        layout = item.layout
        for shard in range(num_shards) if layout.num_shards else [REPLICATED]:
            position, stop = layout.local_range(max(shard, 0))
            for first, last in found.pop((index, shard), []):
                assert first == position
                position = last
            assert position == stop
    assert not found


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([4096, 10_000, 1 << 20]))
def test_buckets_stay_inside_their_bounds(case: tuple[int, list[PlannedTensor]], bucket_bytes: int) -> None:
    num_shards, planned = case
    plan = plan_buckets(planned, num_shards, bucket_bytes)
    assert plan.max_bucket_bytes <= bucket_bytes
    for bucket in plan:
        assert bucket.num_bytes <= plan.max_bucket_bytes
        position = 0
        for section in bucket.sections:
            assert section.offset == position
            position += section.num_bytes
            used = 0
            for segment in section.segments:
                assert segment.offset >= used
                assert segment.offset % ALIGNMENT_BYTES == 0
                assert segment.num_bytes == (segment.stop - segment.start) * planned[segment.tensor].wire_dtype.itemsize
                used = segment.offset + segment.num_bytes
            assert used <= section.num_bytes
        assert position == bucket.num_bytes


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([4096, 1 << 20]), st.integers(0, 4))
def test_unwanted_shards_only_lack_their_segments(case: tuple[int, list[PlannedTensor]], size: int, shard: int) -> None:
    num_shards, planned = case
    whole = plan_buckets(planned, num_shards, size)
    part = plan_buckets(planned, num_shards, size, wanted=(shard,))
    for bucket, same in zip(whole, part, strict=True):
        assert (bucket.num_bytes, bucket.payload_bytes) == (same.num_bytes, same.payload_bytes)
        assert bucket.payload_bytes == sum(item.num_bytes for section in bucket.sections for item in section.segments)
        for section, other in zip(bucket.sections, same.sections, strict=True):
            if section.shard_index in (shard, REPLICATED):
                assert section == other
            else:
                assert other == replace(section, packed=(), direct=())


def test_a_large_tensor_spans_buckets_and_its_segments_are_messages_of_their_own() -> None:
    layout = TensorLayout("large", (4096, 1024), torch.float32, 4)
    plan = plan_buckets([PlannedTensor(layout, torch.float32)], 4, 4 << 20)
    assert len(plan) in (4, 5)
    for bucket in list(plan)[:-1]:
        assert [len(section.direct) for section in bucket.sections] == [1, 1, 1, 1]
        assert all(section.direct[0].num_bytes >= DIRECT_BYTES for section in bucket.sections)
        assert bucket.num_bytes > 3.9 * (1 << 20)


def test_padding_is_small_beside_the_bytes() -> None:
    planned = [PlannedTensor(TensorLayout(str(i), (64, 33), torch.bfloat16, 4), torch.bfloat16) for i in range(2000)]
    plan = plan_buckets(planned, 4, 1 << 20)
    payload = sum(bucket.payload_bytes for bucket in plan)
    assert payload == 2000 * 64 * 33 * 2
    assert sum(bucket.num_bytes for bucket in plan) <= 1.02 * payload


def test_a_plan_for_many_ranks_takes_little_memory() -> None:
    """140 GB on 64 ranks: listed at once, the sections of all buckets took 39 MiB on a rank that wants one shard."""
    layer = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)]
    planned = [
        PlannedTensor(TensorLayout(f"{number}.{name}", shape, torch.bfloat16, 64), torch.bfloat16)
        for number in range(80)
        for name, shape in enumerate(layer)
    ]
    tracemalloc.start()
    try:
        plan = plan_buckets(planned, 64, 32 << 20)
        for index in (0, 7, *range(len(plan) - 40, len(plan))):
            assert len(plan[index].sections) == 64
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan) > 4000
    assert peak < 4 << 20, f"{held} bytes held, {peak} at the peak"


def test_a_bucket_is_the_same_whenever_it_is_looked_at() -> None:
    planned = [PlannedTensor(TensorLayout(str(i), (64, 33), torch.bfloat16, 4), torch.bfloat16) for i in range(800)]
    buckets = plan_buckets(planned, 4, 32 << 10)
    first = list(buckets)
    assert len(buckets) == len(first) > 40
    assert [buckets[index] for index in reversed(range(len(buckets)))] == first[::-1]
    assert buckets[-2] == first[-2]
    with pytest.raises(IndexError):
        buckets[len(buckets)]
    for index, bucket in enumerate(first):
        assert buckets.payload_bytes(index) == bucket.payload_bytes
        assert buckets.last_tensor(index) == planned[bucket.sections[0].segments[-1].tensor]
