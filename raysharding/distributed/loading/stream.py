"""The stream of a load: transport, ring of buffers and source of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch

from raysharding.checkpoint import FileReader
from raysharding.checkpoint.storage import is_remote
from raysharding.config import Loading
from raysharding.distributed.comm import BUCKETS_PER_CHECK, agree
from raysharding.distributed.loading.context import LoadContext
from raysharding.distributed.loading.plan import LoadPlan
from raysharding.distributed.loading.state_dict_source import StateDictSource
from raysharding.distributed.transfer import (
    BUCKET_BYTES,
    RING_SIZE,
    Broadcast,
    BucketStream,
    BucketTransport,
    CheckpointSource,
    LocalShards,
    ReadThreads,
    Routes,
    Scatter,
    SharedRings,
    Slot,
    make_ring,
    share_rings,
    shared_ring,
)
from raysharding.errors import CheckpointError

READ_THREADS = 4
"""Concurrent reads, over all readers: a disk of several GB/s and the page cache need more than one."""


def stream_buckets(
    context: LoadContext, plan: LoadPlan, tensors: Mapping[str, torch.Tensor], fresh: bool
) -> tuple[Exception | None, dict[str, Any]]:
    """Transfer all buckets of a plan; collective.

    Args:
        context: This load.
        plan: What moves.
        tensors: FQN → tensor of the module, with memory.
        fresh: Whether that memory was never touched.

    Returns:
        This rank's own error, which the others have not heard of; and what it measured, by field of the report.
    """
    stream = _make_stream(context, plan, tensors, fresh)
    started = perf_counter()
    # From here on what was there may be overwritten, also before the first bucket is told of.
    context.progress("stream", 0, 0, "")
    error, read_bytes = _run(stream, context, plan)
    return error, {
        "plan_s": started - context.started,
        "stream_s": perf_counter() - started,
        "read_bytes": read_bytes,
        "wire_bytes": stream.transport.wire_bytes,
        "shared_bytes": stream.transport.shared_bytes,
        "ring_bytes": sum(slot.wire.numel() for slot in stream.slots),
        **vars(stream.times),
    }


def _make_stream(
    context: LoadContext, plan: LoadPlan, tensors: Mapping[str, torch.Tensor], fresh: bool
) -> BucketStream:
    """Set up transport and ring of this rank; collective, unless no rank needs a ring."""
    buckets = plan.buckets.buckets
    cumulative = list(accumulate(map(buckets.payload_bytes, range(len(buckets)))))

    def done(index: int) -> None:
        context.progress("stream", cumulative[index], cumulative[-1], buckets.last_tensor(index).layout.fqn)

    def reading(index: int, num_bytes: int) -> None:
        so_far = min(cumulative[index], (cumulative[index - 1] if index else 0) + num_bytes)
        context.progress("stream", so_far, cumulative[-1], buckets.last_tensor(index).layout.fqn)

    device, stall_s = context.device, context.stall_s
    local_shards = LocalShards(plan.buckets, tensors, context.shards, fresh)
    routes = Routes(context.shards, plan.read_plan.readers, plan.buckets.num_first_buckets)
    transport, slots = _make_transport(plan, context.loading, routes, local_shards, device, stall_s)
    return BucketStream(plan.buckets, transport, local_shards, slots, device, stall_s, context.peak, done, reading)


def _make_transport(
    plan: LoadPlan, loading: Loading, routes: Routes, local_shards: LocalShards, device: torch.device, timeout_s: float
) -> tuple[BucketTransport, list[Slot]]:
    """Make transport and ring of the plan; collective, unless no rank needs a ring."""
    if plan.read_plan.transport == "broadcast":
        return Broadcast(routes, timeout_s), _ring(plan, device, plan.buckets.max_bucket_bytes)
    # Only for host memory; NCCL uses shared memory itself.
    shares = loading.shared_memory and device.type == "cpu" and routes.any_travels(plan.buckets.buckets)
    slot_bytes, sends = _slot_bytes(plan, routes, local_shards)
    rings = share_rings(RING_SIZE, slot_bytes if sends else 0) if shares else SharedRings({}, {}, ())
    if plan.read_plan.transport == "local":
        # Ranks that read for themselves wait for each other only in `FailureFlag.check`, every so many buckets.
        timeout_s *= 2 * BUCKETS_PER_CHECK
    transport = Scatter(replace(routes, shared=rings.peers), rings, timeout_s)
    mine = rings.rings.get(routes.shards.rank)
    return transport, _ring(plan, device, slot_bytes) if mine is None else _agreed(plan, shared_ring(mine.slots))


def _ring(plan: LoadPlan, device: torch.device, slot_bytes: int) -> list[Slot]:
    try:
        slots = make_ring(slot_bytes, device, reads=plan.files is not None)
    except (RuntimeError, MemoryError) as error:
        return _agreed(plan, error)
    return _agreed(plan, slots)


def _agreed(plan: LoadPlan, outcome: list[Slot] | Exception) -> list[Slot]:
    """Return this rank's ring, after all ranks have made theirs; collective.

    One rank alone can run out of memory for its ring: the others would wait for it in the stream.
    """
    failed = outcome if isinstance(outcome, Exception) else None
    if not plan.is_straight:
        agree(failed)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _slot_bytes(plan: LoadPlan, routes: Routes, local_shards: LocalShards) -> tuple[int, bool]:
    """Return the largest bytes of a bucket in this rank's buffer, and True if other ranks need any of them.

    Args:
        plan: The plan.
        routes: Readers and paths.
        local_shards: Knows which segments are received directly into the shard.
    """
    largest, sends = 0, False
    rank = routes.shards.rank
    for index, bucket in enumerate(plan.buckets.buckets):
        travelling = routes.travelling(index, bucket, rank)
        sends = sends or any(routes.path(index, section.shard_index)[0] == rank for section in travelling)
        staged = [
            section
            for section in routes.alone(index, bucket, rank)
            if not all(local_shards.takes_wire_bytes(segment, "cpu") for segment in section.segments)
        ]
        offsets = routes.offsets(index, bucket, rank)
        ends = [offsets[section.shard_index] + section.num_bytes for section in (*travelling, *staged)]
        largest = max([largest, *ends])
    return largest, sends


def _run(stream: BucketStream, context: LoadContext, plan: LoadPlan) -> tuple[Exception | None, int]:
    """Run the stream from the source that this rank has.

    Returns:
        The first error, and how many bytes were read.
    """
    if plan.files is None:
        return stream.run(None), 0
    match = plan.match
    infos, targets = ({}, {}) if match is None else (match.checkpoint.tensors, match.keys.targets)
    cache_bytes = context.loading.bucket_bytes or BUCKET_BYTES
    if match is not None and match.state_dict is not None:
        in_memory = StateDictSource(match.state_dict, infos, plan.extents, targets, cache_bytes)
        return stream.run(in_memory), in_memory.num_bytes_read
    # Many readers keep a machine busy as it is.
    num_threads = max(1, READ_THREADS // len(plan.read_plan.readers))
    if is_remote(plan.files[0].path):
        num_threads = READ_THREADS  # a store needs several requests in flight per rank
    with FileReader(plan.files) as reader, ReadThreads(num_threads) as threads:
        source = CheckpointSource(reader, infos, plan.extents, targets, cache_bytes, context.checksums, threads)
        error = stream.run(source)
        if error is None:
            try:
                reader.verify_unchanged()
            except (CheckpointError, OSError) as raised:
                error = raised
        return error, reader.num_bytes_read
