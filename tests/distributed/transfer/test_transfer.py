"""What moves together, from whom to whom and how: the bucket plan, routes, sources, counters and memory."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.distributed.fully_shard.layout import ShardMap, TensorLayout
from raysharding.distributed.transfer import sources
from raysharding.distributed.transfer.bucket_plan import (
    ALIGNMENT_BYTES,
    DIRECT_BYTES,
    REPLICATED,
    Bucket,
    BucketPlan,
    PlannedTensor,
    Section,
    plan_buckets,
)
from raysharding.distributed.transfer.buffers import LocalShards
from raysharding.distributed.transfer.memory import back, host_memory_bytes, prefault
from raysharding.distributed.transfer.shared_memory import WORD_BYTES, Counters, has_futex
from raysharding.distributed.transfer.sources import CheckpointSource, Extent, Request, as_memory
from raysharding.distributed.transfer.transport import Routes
from raysharding.units import MIB

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


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    num_shards, num_replicas = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    holders = tuple(tuple(range(shard, num_shards * num_replicas, num_shards)) for shard in range(num_shards))
    ranks = range(num_shards * num_replicas)
    others = draw(st.sets(st.sampled_from(ranks)))
    some = st.sets(st.sampled_from(ranks))
    shared = {rank: frozenset(draw(some) - {rank}) for rank in draw(some)}
    shards = ShardMap(holders, draw(st.sampled_from(ranks)))
    return Routes(shards, tuple(sorted({0, *others})), draw(st.integers(0, 9)), shared)


@settings(max_examples=200, deadline=None)
@given(routes(), st.integers(0, 12))
def test_a_section_is_read_once_and_reaches_each_holder_once(given_routes: Routes, index: int) -> None:
    shards = given_routes.shards
    for shard_index in (*range(shards.num_shards), REPLICATED):
        holders = set(range(shards.world_size)) if shard_index == REPLICATED else set(shards.holders[shard_index])
        path = given_routes.path(index, shard_index)
        readers = given_routes.readers if index < given_routes.num_ranged else (0,)
        assert path[0] in readers
        assert path[0] in holders or not holders.intersection(readers)
        assert holders <= set(path) <= holders | {path[0]}
        assert len(path) == len(set(path))
        served, chain = given_routes.served(index, shard_index), given_routes.chain(index, shard_index)
        assert chain[0] == path[0]
        assert sorted([*served, *chain]) == sorted(path)


@settings(max_examples=100, deadline=None)
@given(routes(), st.integers(0, 12), st.integers(1, 4096))
def test_sections_of_a_buffer_do_not_overlap(given_routes: Routes, index: int, num_bytes: int) -> None:
    shards = given_routes.shards
    indices = (*range(shards.num_shards), REPLICATED)
    sections = tuple(Section(item, 0, num_bytes + item, num_bytes + item, (), ()) for item in indices)
    bucket = Bucket(sections, 0, 0)
    for rank in range(shards.world_size):
        offsets = given_routes.offsets(index, bucket, rank)
        position = 0
        for item, offset in offsets.items():
            assert offset == position
            position += num_bytes + item
        sections = (*given_routes.travelling(index, bucket, rank), *given_routes.alone(index, bucket, rank))
        assert len(sections) == len(offsets)


def test_readers_share_the_shards_that_none_of_them_holds() -> None:
    given_routes = Routes(ShardMap(tuple((rank,) for rank in range(8)), 0), (0, 1), 1000)
    read = Counter(given_routes.path(index, shard)[0] for index in range(100) for shard in range(2, 8))
    assert read[0] == read[1] == 300


def test_replicas_that_both_read_share_the_reading() -> None:
    given_routes = Routes(ShardMap(((0, 2), (1, 3)), 0), (0, 1, 2, 3), 1000)
    read = Counter(given_routes.path(index, shard)[0] for index in range(100) for shard in range(2))
    assert read == {0: 50, 1: 50, 2: 50, 3: 50}


VALUES = torch.arange(3000)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointSource]:
    """One tensor, which is read in three jobs."""
    save_file({"values": VALUES}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sources, "JOB_BYTES", 8000)
    checkpoint = open_checkpoint(tmp_path)
    offset = checkpoint.tensors["values"].offset
    extents = {"values": (Extent(0, 3000, 0, offset, "values", offset, torch.int64),)}
    with FileReader(checkpoint.files) as reader:
        yield CheckpointSource({}, extents, {}, reader, piece_bytes=8000)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_each_job_tells_what_it_filled(source: CheckpointSource, dtype: torch.dtype) -> None:
    out = torch.zeros(len(VALUES), dtype=dtype)
    told: list[Request] = []

    def filled(parts: Sequence[Request]) -> None:
        for part in parts:
            assert part.memory.tolist() == list(as_memory(VALUES[part.start : part.stop].to(dtype)))
        told.extend(parts)

    jobs = source.jobs([Request("values", 0, 3000, dtype, as_memory(out), "tag")], filled)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda job: job(), jobs))
    assert len(jobs) == 3
    assert torch.equal(out, VALUES.to(dtype))
    expected = [(start, start + 1000, "tag") for start in (0, 1000, 2000)]
    assert sorted((part.start, part.stop, part.tag) for part in told) == expected


@pytest.fixture
def counters() -> Counters:
    """Three counters that forked processes share."""
    return Counters(mmap.mmap(-1, mmap.PAGESIZE), mmap.PAGESIZE - 3 * WORD_BYTES, 3)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that does nothing."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.skipif(not has_futex(), reason="futex(2) is known here on Linux x86_64 and aarch64 only")
def test_processes_take_turns(counters: Counters) -> None:
    pid = os.fork()
    if pid == 0:
        for turn in range(1, 1001):
            counters.wait(0, turn, 20, os.getppid())
            counters.post(2, turn)
        os._exit(0)
    for turn in range(1, 1001):
        counters.post(0, turn)
        counters.wait(2, turn, 20, pid)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not has_futex(), reason="futex(2) is known here on Linux x86_64 and aarch64 only")
def test_a_counter_that_is_far_enough_needs_no_wait(counters: Counters) -> None:
    counters.post(1, 7)
    counters.wait(1, 7, 0.0, os.getpid())
    counters.wait(1, 3, 0.0, os.getpid())


@pytest.mark.skipif(not has_futex(), reason="futex(2) is known here on Linux x86_64 and aarch64 only")
def test_a_silent_process_is_an_error_in_time(counters: Counters, sleeper: int) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* said nothing for 1 s"):
        counters.wait(0, 1, 1.0, sleeper)
    assert time.monotonic() - started < 5


@pytest.mark.skipif(not has_futex(), reason="futex(2) is known here on Linux x86_64 and aarch64 only")
def test_a_process_that_dies_is_an_error_soon(counters: Counters, sleeper: int) -> None:
    threading.Timer(0.3, os.kill, (sleeper, signal.SIGKILL)).start()  # a zombie until the fixture asks
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* is gone"):
        counters.wait(0, 1, 60.0, sleeper)
    assert time.monotonic() - started < 10


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
