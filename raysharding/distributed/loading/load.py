"""`load_checkpoint`: plan from headers, agree; then allocate, stream, finish.

The cyclic garbage collector is paused during a load, whose plan makes many objects without cycles.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint, Checksums
from raysharding.config import Loading
from raysharding.distributed.comm import agree
from raysharding.distributed.fully_shard import (
    ShardMap,
    local_tensor,
    materialize,
    message_device,
    module_tensors,
    note_load,
    reshard,
    unwrapped,
)
from raysharding.distributed.loading.context import LoadContext, Progress, silent
from raysharding.distributed.loading.finish import finish
from raysharding.distributed.loading.mmap import map_tensors
from raysharding.distributed.loading.plan import LoadPlan, Origin, agree_on_plan, propose_load
from raysharding.distributed.loading.report import LoadReport
from raysharding.distributed.loading.state_dict_source import Rank0StateDict
from raysharding.distributed.loading.stream import stream_buckets
from raysharding.distributed.transfer import MemoryPeak, Prefault, is_fresh
from raysharding.errors import CheckpointError

_log = logging.getLogger("raysharding")


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    It traverses all objects of the process repeatedly as their number grows, which took most of the time of a load of
    20,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
        loading: See `Loading`.
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
    with paused_gc():
        return _load(unwrapped(module), checkpoint, loading or Loading(), progress or silent, stall_s)


def load_from_rank_0(module: nn.Module, state_dict: Rank0StateDict, loading: Loading, stall_s: float) -> LoadReport:
    """Load as `load_checkpoint`, from rank 0's memory.

    Tensors on meta that the state dict lacks stay on meta, except non-persistent buffers with a rule of their own.
    """
    with paused_gc():
        return _load(module, state_dict, loading, silent, stall_s)


def _load(module: nn.Module, origin: Origin, loading: Loading, progress: Progress, stall_s: float) -> LoadReport:
    """Plan a load, and run its three steps: allocate, stream, finish. A failure in any of them undoes the first."""
    started = perf_counter()
    reshard(module)
    tensors, device = module_tensors(module), message_device(module)
    if loading.mmap and device.type != "cpu":
        raise ValueError(f"mmap=True: files are mapped into host memory, but the mesh is on {device.type}")
    checksums = Checksums() if loading.verify == "full" else None
    shards, peak = ShardMap.of(tensors), MemoryPeak(device)
    context = LoadContext(module, loading, progress, stall_s, shards, device, peak, checksums, started)
    progress("plan", 0, 0, "")
    proposal = propose_load(module, tensors, origin, loading)
    # Ranks allocate while rank 0 reads headers, unless memory depends on the plan (mapped files, a state dict).
    is_early = not (loading.mmap or isinstance(origin, Rank0StateDict))
    error: Exception | None = None
    with ExitStack() as undo:
        if is_early:
            tensors, error = _allocate(context, tensors, None, undo)
        memory = [local_tensor(tensor) for tensor in tensors.values()] if is_early else []
        fresh = is_fresh(memory)
        with Prefault(memory if fresh else []):
            plan = agree_on_plan(proposal, error, loading, shards, device)
            if shards.rank == 0:
                reads = plan.read_plan
                _log.info("loading %s by %s (%s)", plan.outline.checkpoint, reads.transport, reads.reason)
            if not is_early:
                tensors, error = _allocate(context, tensors, plan, undo)
                agree(error)  # every rank calls this: the others would wait in the stream for a rank that failed
            error, measured = stream_buckets(context, plan, tensors, fresh)
        per_rank = finish(context, plan, tensors, error, measured)
        undo.pop_all()
    note_load(module)
    return LoadReport.merge(plan, per_rank)


def _allocate(
    context: LoadContext, tensors: dict[str, torch.Tensor], plan: LoadPlan | None, undo: ExitStack
) -> tuple[dict[str, torch.Tensor], Exception | None]:
    """Allocate or map the memory of the module. Not collective.

    Args:
        context: The load.
        tensors: FQN → tensor of the module, on meta or real.
        plan: States which tensors are mapped, and which a state dict names. `None`: all tensors get memory.
        undo: Moves the tensors back to meta after a failure, so that uninitialised values cannot be used.

    Returns:
        FQN → current tensor of the module; and the error of this rank, which the ranks exchange before the stream.
    """
    try:
        mapped = {}
        if plan is not None and plan.mapped:
            assert plan.files is not None, "every rank reads"
            found = map_tensors(plan.files, plan.mapped, plan.extents, context.shards.shard_index)
            mapped = {tensors[fqn]: memory for fqn, memory in found.items()}
        named = None
        if plan is not None and plan.outline.file_locations is None:
            named = {id(tensors[fqn]) for fqn, _ in plan.outline.tensors}
            named.update(id(tensors[fqn]) for fqn in plan.outline.initialise)
        undo.callback(materialize(context.module, context.device, mapped, named))
    except (RuntimeError, MemoryError, CheckpointError) as error:
        return tensors, error
    return module_tensors(context.module), None
