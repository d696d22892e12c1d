"""`load_checkpoint`: plan from headers, agree; then allocate, stream, finish.

The cyclic garbage collector is paused during a load, whose plan makes many objects without cycles.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint, FileReader
from raysharding.checkpoint.format import Checksums
from raysharding.checkpoint.storage import is_remote
from raysharding.config import Loading
from raysharding.distributed.comm import BUCKETS_PER_CHECK, agreeing, is_accelerator
from raysharding.distributed.fully_shard import (
    ShardMap,
    local_tensor,
    materialize,
    message_device,
    module_tensors,
    over_ranks_of,
    reshard,
    unwrapped,
)
from raysharding.distributed.loading.finish import finish
from raysharding.distributed.loading.mmap import map_tensors
from raysharding.distributed.loading.plan import (
    LoadContext,
    LoadPlan,
    Origin,
    Progress,
    Proposal,
    agree_on_plan,
    make_source,
    propose_load,
    silent,
)
from raysharding.distributed.loading.report import LoadReport
from raysharding.distributed.loading.state_dict_source import Rank0StateDict
from raysharding.distributed.transfer import (
    JOB_BYTES,
    Broadcast,
    BucketStream,
    BucketTransport,
    LocalShards,
    MemoryPeak,
    Routes,
    Scatter,
    SharedRings,
    Slot,
    SlotBytes,
    connect_ranks,
    is_fresh,
    make_ring,
    prefault,
    share_rings,
)
from raysharding.errors import CheckpointError
from raysharding.imports import paused_gc
from raysharding.models import name_base

READ_THREADS = 4
"""Threads that read, of all readers of a host: a disk of several GB/s and the page cache need more than one. An
accelerator takes more than these read: there as many as this process may use cores."""
MAX_READ_THREADS = 16
"""Most threads of one rank that read for an accelerator."""

_log = logging.getLogger("raysharding")


@over_ranks_of("module")
def load_checkpoint(
    module: nn.Module,
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    loading: Loading | None = None,
    progress: Progress | None = None,
    stall_s: float = 120.0,
) -> LoadReport:
    """Stream a checkpoint into a sharded module, in place; collective over the module's mesh.

    Rank 0 plans from the headers, and checks everything first. Every rank that sees the files may read (see
    `Loading.transport`); the others need not see them. A module on meta gets memory here, on the device of the mesh.

    Args:
        module: From `shard_module`. A real module is overwritten, and under `strict=False` keeps tensors that the
            checkpoint lacks. A module on meta is on meta again after a failed load.
        checkpoint: Path or URI, which rank 0 opens first; or an open checkpoint, the same on every rank.
        loading: Options. Default: `Loading()`.
        progress: Called on every rank after each bucket, and on a reader every second during a long read.
        stall_s: Longest wait for a byte of the files, and for one bucket of another rank, in seconds.

    Returns:
        The same report on every rank. Wire: under `local` only replicated data (replicas, buffers) and tensors that
        rank 0 computes; under `scatter` each shard once to each rank that holds it and does not read (on CPUs by shared
        memory within a reader's host); under `broadcast` W − 1 times the checkpoint. Memory above the shards: two
        buckets on a rank that reads for others or receives.

    Raises:
        ValueError: On every rank, if `Loading(mmap=True)` is used with a mesh that is not on CPUs.
        CheckpointError: On every rank, if the files are unreadable or unsafe.
        PlanError: On every rank, before data moves, with all mismatches, or the ranks that differ in module or options.
        TimeoutError: On a reader, if nothing was read for `stall_s`; the other ranks time out later.
        RuntimeError: From the process group, if a rank died or is silent for `stall_s`.
    """
    return load_from(unwrapped(module), checkpoint, loading or Loading(), progress or silent, stall_s)


@paused_gc()
def load_from(module: nn.Module, origin: Origin, loading: Loading, progress: Progress, stall_s: float) -> LoadReport:
    """Plan a load, and run its three steps: allocate, stream, finish. A failure in any of them undoes the first.

    Tensors on meta that a state dict lacks stay on meta, except non-persistent buffers with a rule of their own.
    """
    started = perf_counter()
    reshard(module)
    tensors, device = module_tensors(module), message_device(module)
    if loading.mmap and device.type != "cpu":
        raise ValueError(f"mmap=True: files are mapped into host memory, but the mesh is on {device.type}")
    checksums = Checksums() if loading.verify == "full" else None
    shards, peak = ShardMap.of(tensors), MemoryPeak(device)
    context = LoadContext(module, loading, progress, stall_s, shards, device, peak, checksums, started)
    progress("plan", 0, 0, "")
    # Ranks allocate while rank 0 reads headers, unless memory depends on the plan (mapped files, a state dict).
    is_early = not (loading.mmap or isinstance(origin, Rank0StateDict))
    proposal: Proposal | None = None
    error: Exception | None = None
    memory: list[torch.Tensor] = []
    with ExitStack() as undo:
        try:
            proposal = propose_load(module, tensors, origin, loading)
            if is_early:
                tensors = _allocate(context, tensors, None, undo)
                memory = [local_tensor(tensor) for tensor in tensors.values()]
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome
            error = raised
        fresh = is_fresh(memory)
        with prefault(memory if fresh else []):
            plan = agree_on_plan(proposal, error, context)
            if shards.rank == 0:
                reads = plan.read_plan
                _log.info("loading %s by %s (%s)", plan.outline.checkpoint, reads.transport, reads.reason)
            if not is_early:
                with agreeing():  # the others would wait in the stream for a rank that failed
                    tensors = _allocate(context, tensors, plan, undo)
            error, measured = _stream(context, plan, tensors, fresh)
        per_rank = finish(context, plan, tensors, error, measured)
        undo.pop_all()
    if plan.outline.base is not None:
        name_base(module, plan.outline.base)
    return LoadReport.merge(plan, per_rank)


def _allocate(
    context: LoadContext, tensors: dict[str, torch.Tensor], plan: LoadPlan | None, undo: ExitStack
) -> dict[str, torch.Tensor]:
    """Allocate or map the memory of the module. Not collective.

    Args:
        context: The load.
        tensors: FQN → tensor of the module, on meta or real.
        plan: States which tensors are mapped, and which a state dict names. `None`: all tensors get memory.
        undo: Moves the tensors back to meta after a failure, so that uninitialised values cannot be used.

    Returns:
        FQN → current tensor of the module.
    """
    mapped = {}
    if plan is not None and plan.mapped:
        assert plan.files is not None, "every rank reads"
        found = map_tensors(plan.files, plan.mapped, context.shards.shard_index)
        mapped = {tensors[fqn]: memory for fqn, memory in found.items()}
    named = None
    if plan is not None and plan.outline.file_locations is None:
        named = {id(tensors[fqn]) for fqn, _ in plan.outline.tensors}
        named.update(id(tensors[fqn]) for fqn in plan.outline.initialised)
    undo.callback(materialize(context.module, context.device, mapped, named))
    return module_tensors(context.module)


def _stream(
    context: LoadContext, plan: LoadPlan, tensors: Mapping[str, torch.Tensor], fresh: bool
) -> tuple[Exception | None, dict[str, Any]]:
    """Transfer all buckets of a plan; collective.

    Args:
        context: This load.
        plan: What moves.
        tensors: FQN → tensor of the module, with memory.
        fresh: True if that memory was never touched.

    Returns:
        This rank's own error, which the others have not heard of; and what it measured, by field of the report.
    """
    buckets = plan.buckets
    ends = list(accumulate(map(buckets.payload_bytes, range(len(buckets))), initial=0))

    def progress(index: int, num_bytes: int) -> None:
        done = min(ends[index] + num_bytes, ends[index + 1])
        context.progress("stream", done, ends[-1], buckets.last_tensor(index).layout.fqn)

    local_shards = LocalShards(plan.buckets.tensors, tensors, fresh)
    transport, slots = _make_transport(context, plan, local_shards)
    stream = BucketStream(
        plan.buckets, transport, local_shards, slots, context.device, context.stall_s, context.peak, progress
    )
    started = perf_counter()
    # From here on what was there may be overwritten, also before the first bucket is reported.
    context.progress("stream", 0, 0, "")
    error, read_bytes = _run(stream, context, plan)
    return error, {
        "plan_s": started - context.started,
        "stream_s": perf_counter() - started,
        "read_bytes": read_bytes,
        "wire_bytes": transport.wire_bytes,
        "shared_bytes": transport.shared_bytes,
        "ring_bytes": sum(max(slot.host.numel(), slot.wire.numel()) for slot in slots),
        **{name: getattr(stream, name) for name in ("read_s", "send_s", "place_s")},
    }


def _make_transport(
    context: LoadContext, plan: LoadPlan, local_shards: LocalShards
) -> tuple[BucketTransport, list[Slot]]:
    """Make transport and ring of the plan; collective, unless no rank needs a ring."""
    rank = context.shards.rank
    routes = Routes(context.shards, plan.read_plan.readers, plan.buckets.num_first_buckets)
    transport: BucketTransport
    rings = SharedRings({}, {}, ())
    if plan.read_plan.transport == "broadcast":
        whole = plan.buckets.max_bucket_bytes
        slot = SlotBytes(whole if plan.files is not None else 0, whole)
        transport = Broadcast(routes, context.stall_s)
    else:
        slot = routes.slot_bytes(plan.buckets, rank, local_shards)
        # Only for host memory; NCCL uses shared memory itself.
        if context.loading.shared_memory and context.device.type == "cpu" and routes.any_travels(plan.buckets):
            reads_for_others = plan.files is not None and routes.any_travels(plan.buckets, rank)
            rings = share_rings(max(slot) if reads_for_others else 0)
        # Ranks that read for themselves wait for each other only in `FailureFlag.check`, every so many buckets.
        patience = 2 * BUCKETS_PER_CHECK if plan.read_plan.transport == "local" else 1
        memory_of = partial(local_shards.memory, device_type=context.device.type)
        transport = Scatter(replace(routes, shared=rings.peers), rings, memory_of, context.stall_s * patience)
    # One rank alone can run out of memory for its ring: the others would wait for it in the stream.
    with nullcontext() if plan.is_straight else agreeing():
        flag = torch.zeros(1, device=context.device)
        shared = rings.rings.get(rank)
        ring = make_ring(slot, context.device) if shared is None else [Slot(buffer, buffer) for buffer in shared.slots]
    connect_ranks(flag)
    return transport, ring


def read_threads(device: torch.device, readers_per_host: int) -> int:
    """Return how many threads of a rank read local files."""
    cores = len(os.sched_getaffinity(0)) if is_accelerator(device) else 0
    return max(1, min(MAX_READ_THREADS, max(READ_THREADS, cores) // readers_per_host))


def _run(stream: BucketStream, context: LoadContext, plan: LoadPlan) -> tuple[Exception | None, int]:
    """Run the stream from the source that this rank has.

    Returns:
        The first error, and how many bytes were read.
    """
    if plan.files is None:
        return stream.run(None), 0
    num_threads = read_threads(context.device, plan.read_plan.readers_per_host)
    if not plan.files:
        num_threads = 1  # a state dict's items are accessed one after the other
    elif is_remote(plan.files[0].path):
        num_threads = READ_THREADS  # a store needs several requests in flight per rank
    with FileReader(plan.files) as reader:
        piece_bytes = JOB_BYTES if is_accelerator(context.device) else None
        source = make_source(plan.match, reader, plan.extents, context.checksums, piece_bytes)
        error = stream.run(source, num_threads)
        if error is None:
            try:
                reader.verify_unchanged()
            except (CheckpointError, OSError) as raised:
                error = raised
        return error, source.num_bytes_read
