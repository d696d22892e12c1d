"""`load_checkpoint`: plan from headers, agree; then allocate, stream, finish.

No garbage collection during a load: its plan makes many objects that stay, and none in cycles.
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
    """Pause Python's cyclic collector, which reference counting does not need.

    It walks all objects of the process again and again as they become more: of a load of 20,000 tensors that was most
    of the time.
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
    """Stream a checkpoint into a sharded module, in place; collective: every rank of the module's mesh calls it.

    Rank 0 plans from the headers, where everything is checked first; every rank that sees the files may read (see
    `Loading.transport`), and the others need not see them. A module still on meta gets its memory here, on the mesh's
    device.

    Args:
        module: From `shard_module`; on meta, or real: then it is overwritten, and under `strict=False` keeps what the
            checkpoint lacks. After a failed load a module that was on meta is there again.
        checkpoint: Path or URI, opened by rank 0 first; or an opened checkpoint, the same on every rank.
        loading: See `Loading`.
        progress: Called on every rank after each bucket, and on a reader every second while one is read for longer.
        stall_s: Longest wait for a byte of the files, and for one bucket of another rank, in seconds.

    Returns:
        The same report on every rank. Wire: under `local` only what ranks hold
        alike (replicas, buffers) and what rank 0 computes; under `scatter` each shard once to each rank that
        holds it and does not read (on CPUs by shared memory inside a reader's host); W − 1 times the checkpoint under
        `broadcast`. Memory above the shards: two buckets on a rank that reads for others or receives.

    Raises:
        ValueError: On every rank, when `Loading(mmap=True)` meets a mesh that is not on CPUs.
        CheckpointError: On every rank, when the files cannot be read or trusted.
        PlanError: On every rank, before any data moves: every mismatch, or which ranks differ in module or options.
        TimeoutError: On a reader, when nothing could be read for `stall_s`; the others time out in turn.
        RuntimeError: From the process group, when a rank is gone or silent for `stall_s`.
    """
    with paused_gc():
        return _load(unwrapped(module), checkpoint, loading or Loading(), progress or silent, stall_s)


def load_from_rank_0(module: nn.Module, state_dict: Rank0StateDict, loading: Loading, stall_s: float) -> LoadReport:
    """As `load_checkpoint`, from rank 0's memory.

    Tensors on meta that nothing feeds stay there, but for non-persistent buffers with a rule of their own.
    """
    with paused_gc():
        return _load(module, state_dict, loading, silent, stall_s)


def _load(module: nn.Module, origin: Origin, loading: Loading, progress: Progress, stall_s: float) -> LoadReport:
    """Plan a load, and take its three steps: allocate, stream, finish. A failure in any of them undoes the first."""
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
    # The others allocate while rank 0 reads headers. What is mapped, or named by a state dict, must be known first.
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
                agree(error)  # a rank that could not map or allocate must not leave the others in the stream
            error, measured = stream_buckets(context, plan, tensors, fresh)
        per_rank = finish(context, plan, tensors, error, measured)
        undo.pop_all()
    note_load(module)
    return LoadReport.merge(plan, per_rank)


def _allocate(
    context: LoadContext, tensors: dict[str, torch.Tensor], plan: LoadPlan | None, undo: ExitStack
) -> tuple[dict[str, torch.Tensor], Exception | None]:
    """Give the module its memory, mapped files where the plan says so; this rank alone.

    Args:
        context: This load.
        tensors: FQN → tensor of the module, on meta or real.
        plan: Says what is mapped, and what a state dict names. `None`: nothing is mapped, all gets memory.
        undo: Puts the tensors back on meta: garbage must not be left to run on.

    Returns:
        FQN → tensor of the module now; and why there is no memory, which the others must hear of before they wait for
        this rank's messages.
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
