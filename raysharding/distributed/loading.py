"""`load_checkpoint`: plan from headers, agree, stream, finish, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint, FileReader
from raysharding.config import Loading
from raysharding.distributed.agreement import agree
from raysharding.distributed.fsdp import materialize, reshard
from raysharding.distributed.layout import ShardMap, local_tensor, message_device, module_tensors, tensor_layout
from raysharding.distributed.memory import MemoryPeak
from raysharding.distributed.placing import Placer
from raysharding.distributed.planning import LoadPlan, agree_on_plan, propose_load
from raysharding.distributed.prefault import Prefault
from raysharding.distributed.report import LoadReport
from raysharding.distributed.routes import Routes
from raysharding.distributed.source import CheckpointSource
from raysharding.distributed.stream_setup import make_transport
from raysharding.distributed.streaming import BucketStream, StreamTimes
from raysharding.errors import CheckpointError
from raysharding.models import Initialiser

Progress = Callable[[str, int, int, str], None]
"""Called as `progress(phase, bytes_done, bytes_total, last FQN)`; phases are `plan`, `stream`, `finalize`."""


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
        checkpoint: Path or URI, opened by rank 0 alone; or an opened checkpoint, the same on every rank.
        loading: See `Loading`.
        progress: Called on every rank after each bucket.
        stall_s: Longest wait for one bucket, in seconds.

    Returns:
        The same report on every rank. Wire: nothing under `local`; under `scatter` each shard once to each rank that
        holds it and does not read (on CPUs by shared memory inside a reader's host); W − 1 times the checkpoint under
        `broadcast`. Memory above the shards: three buckets on a rank that reads for others or receives.

    Raises:
        CheckpointError: On every rank, when the files cannot be read or trusted.
        PlanError: On every rank, before any data moves: every mismatch, or which ranks differ in module or options.
        TimeoutError: On a reader, when no bucket could be read for `stall_s`; the others time out in turn.
        RuntimeError: From the process group, when a rank is gone or silent for `stall_s`.
    """
    started = perf_counter()
    loading = loading or Loading()
    report_progress = progress or silent
    report_progress("plan", 0, 0, "")
    reshard(module)
    tensors = module_tensors(module)
    shards = ShardMap.of(tensors)
    device = message_device(module)
    peak = MemoryPeak(device)
    # The others allocate while rank 0 reads headers.
    proposal = propose_load(module, tensors, checkpoint, loading)
    undo, error = _materialize(module, device)
    try:
        tensors = module_tensors(module)
        with Prefault(local_tensor(tensor) for tensor in tensors.values()):
            plan = agree_on_plan(proposal, error, loading, shards)
            stream = _make_stream(tensors, plan, loading, shards, device, stall_s, peak, report_progress)
            plan_s = perf_counter() - started
            figures, error = _fill(module, tensors, plan, stream, loading.seed, report_progress)
        # The last word on every rank: one whose stream failed must not leave the others with a module that looks well.
        mine = asdict(replace(figures, plan_s=plan_s, seconds=perf_counter() - started))
        every = [_Figures(**value) for value in agree(error, mine)]
    except BaseException:
        undo()  # garbage must not be left to run on
        raise
    return _make_report(plan, every)


def _materialize(module: nn.Module, device: torch.device) -> tuple[Callable[[], None], Exception | None]:
    """Allocate the shards; a rank without the memory must say so before the others wait for its messages."""
    try:
        return materialize(module, device), None
    except (RuntimeError, MemoryError) as error:
        return lambda: None, error


def _fill(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    plan: LoadPlan,
    stream: BucketStream,
    seed: int,
    progress: Progress,
) -> tuple[_Figures, Exception | None]:
    """Stream the buckets and initialise the rest."""
    started = perf_counter()
    read_bytes, error = _run_stream(stream, plan)
    streamed = perf_counter()
    stream_bytes = plan.buckets.payload_bytes
    progress("finalize", stream_bytes, stream_bytes, "")
    if error is None:
        error = _initialise(module, tensors, plan.outline.initialise, seed)
    stream.peak.sample()
    figures = _Figures(
        stream_s=streamed - started,
        initialise_s=perf_counter() - streamed,
        wire_bytes=stream.transport.wire_bytes,
        shared_bytes=stream.transport.shared_bytes,
        read_bytes=read_bytes,
        ring_bytes=sum(slot.wire.numel() for slot in stream.slots),
        shard_bytes=sum(_num_bytes(tensor) for tensor in tensors.values()),
        host_bytes=stream.peak.host_bytes,
        device_bytes=stream.peak.device_bytes,
        **asdict(stream.times),
    )
    return figures, error


_TIMES = ("seconds", "plan_s", "stream_s", "read_s", "send_s", "place_s", "initialise_s")


def silent(phase: str, done: int, total: int, tensor: str) -> None:
    """The progress callback of those who want none."""


@dataclass
class _Figures(StreamTimes):
    """One rank's figures, exchanged as JSON."""

    seconds: float = 0.0
    plan_s: float = 0.0
    stream_s: float = 0.0
    initialise_s: float = 0.0
    wire_bytes: int = 0
    shared_bytes: int = 0
    read_bytes: int = 0
    ring_bytes: int = 0
    shard_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0


def _make_stream(
    tensors: Mapping[str, torch.Tensor],
    plan: LoadPlan,
    loading: Loading,
    shards: ShardMap,
    device: torch.device,
    stall_s: float,
    peak: MemoryPeak,
    progress: Progress,
) -> BucketStream:
    """Set up this rank's transport and ring; collective where readers share memory."""
    cumulative = list(accumulate(bucket.payload_bytes for bucket in plan.buckets.buckets))
    total = plan.buckets.payload_bytes

    def done(index: int) -> None:
        last = plan.buckets.buckets[index].sections[0].segments[-1:]
        name = plan.buckets.tensors[last[0].tensor].layout.fqn if last else ""
        progress("stream", cumulative[index], total, name)

    placer = Placer(plan.buckets, tensors, shards)
    routes = Routes(shards, plan.choice.readers, plan.buckets.num_first_buckets)
    transport, slots = make_transport(plan, loading, routes, placer, device, stall_s)
    return BucketStream(plan.buckets, transport, placer, slots, device, stall_s, peak, done)


def _run_stream(stream: BucketStream, plan: LoadPlan) -> tuple[int, Exception | None]:
    """Move every bucket; returns the bytes that this rank read from files, and what went wrong."""
    if plan.checkpoint is None:
        return 0, stream.run(None)
    with FileReader(plan.checkpoint) as reader:
        targets = plan.fit.keys.targets if plan.fit is not None else {}
        cache_bytes = plan.buckets.max_bucket_bytes
        source = CheckpointSource(plan.checkpoint, reader, plan.extents, targets, cache_bytes)
        error = stream.run(source)
        if error is None:
            try:
                reader.verify_unchanged()
            except CheckpointError as raised:
                error = raised
        return reader.num_bytes_read, error


def _initialise(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], names: Sequence[str], seed: int
) -> Exception | None:
    """Give what the checkpoint lacks its values: the full tensor by the module's own rule, then this rank's part."""
    if not names:
        return None
    try:
        initialiser = Initialiser(module, seed)
        shards = ShardMap.of(tensors)
        for name in names:
            full = initialiser.value(name)
            start, stop = tensor_layout(name, tensors[name]).local_range(shards.shard_index)
            local_tensor(tensors[name]).view(-1).copy_(full.reshape(-1)[start:stop])
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        return error
    return None


def _num_bytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.itemsize


def _make_report(plan: LoadPlan, every: Sequence[_Figures]) -> LoadReport:
    def largest(name: str) -> Any:
        return max(getattr(figures, name) for figures in every)

    host_shards = [0 if figures.device_bytes else figures.shard_bytes for figures in every]
    outline = plan.outline
    return LoadReport(
        checkpoint=outline.checkpoint,
        num_tensors=len(outline.tensors),
        checkpoint_bytes=outline.checkpoint_bytes,
        read_bytes=sum(figures.read_bytes for figures in every),
        wire_bytes=sum(figures.wire_bytes for figures in every),
        shared_bytes=sum(figures.shared_bytes for figures in every),
        **{name: largest(name) for name in _TIMES},
        num_buckets=len(plan.buckets.buckets),
        bucket_bytes=plan.buckets.max_bucket_bytes,
        ring_bytes=largest("ring_bytes"),
        transport=plan.choice.transport,
        transport_reason=plan.choice.reason,
        readers=plan.choice.readers,
        world_size=len(every),
        shard_bytes=tuple(figures.shard_bytes for figures in every),
        peak_extra_bytes=tuple(max(0, f.host_bytes - own) for f, own in zip(every, host_shards, strict=True)),
        peak_device_bytes=tuple(figures.device_bytes for figures in every),
        missing=outline.missing,
        unexpected=outline.unexpected,
        ignored=outline.ignored,
        initialised=outline.initialise,
        tied=outline.tied,
        converted=outline.converted,
    )
