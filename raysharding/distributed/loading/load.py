"""`load_checkpoint`: plan from headers, agree, stream, finish, report.

No garbage collection during a load: its plan makes many objects that stay, and none in cycles.

What a stream runs on: this rank's transport and its ring of buffers, shared with its host where that works.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint, Checksums, FileReader
from raysharding.checkpoint.storage import is_remote
from raysharding.config import Loading
from raysharding.distributed.comm import PULSE_BUCKETS, agree
from raysharding.distributed.fully_shard import (
    ShardMap,
    local_tensor,
    materialize,
    message_device,
    module_tensors,
    note_load,
    reshard,
    tensor_layout,
    unwrapped,
)
from raysharding.distributed.loading.mmap import map_tensors
from raysharding.distributed.loading.plan import Fit, LoadPlan, Origin, agree_on_plan, propose_load
from raysharding.distributed.loading.report import LoadReport
from raysharding.distributed.loading.state_dict_source import HeldStateDict, StateDictSource
from raysharding.distributed.loading.verify import check_checksums, check_finite, digest_module
from raysharding.distributed.transfer import (
    BUCKET_BYTES,
    RING_SIZE,
    Broadcast,
    BucketStream,
    BucketTransport,
    CheckpointSource,
    MemoryPeak,
    Placer,
    Prefault,
    ReadThreads,
    Routes,
    Scatter,
    SharedRings,
    Slot,
    as_memory,
    is_fresh,
    make_ring,
    share_rings,
    shared_ring,
)
from raysharding.errors import CheckpointError
from raysharding.models import Initialiser


@contextlib.contextmanager
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


def make_transport(
    plan: LoadPlan, loading: Loading, routes: Routes, placer: Placer, device: torch.device, timeout_s: float
) -> tuple[BucketTransport, list[Slot]]:
    """Make what the plan chose; collective, unless nobody needs a ring."""
    if plan.choice.transport == "broadcast":
        return Broadcast(routes, timeout_s), _ring(plan, device, plan.buckets.max_bucket_bytes)
    # Device memory is not shared this way, and NCCL needs no help inside a host.
    shares = loading.shared_memory and device.type == "cpu" and routes.any_travels(plan.buckets.buckets)
    slot_bytes, sends = _slot_bytes(plan, routes, placer)
    rings = share_rings(RING_SIZE, slot_bytes if sends else 0) if shares else SharedRings({}, {}, ())
    if plan.choice.transport == "local":
        # Ranks that read for themselves wait for each other at a pulse only, and one may be so many buckets ahead.
        timeout_s *= 2 * PULSE_BUCKETS
    transport = Scatter(replace(routes, shared=rings.peers), rings, timeout_s)
    mine = rings.rings.get(routes.shards.rank)
    return transport, _ring(plan, device, slot_bytes) if mine is None else _agreed(plan, shared_ring(mine.slots))


def _ring(plan: LoadPlan, device: torch.device, slot_bytes: int) -> list[Slot]:
    try:
        slots = make_ring(slot_bytes, device, reads=plan.checkpoint is not None)
    except (RuntimeError, MemoryError) as error:
        return _agreed(plan, error)
    return _agreed(plan, slots)


def _agreed(plan: LoadPlan, outcome: list[Slot] | Exception) -> list[Slot]:
    """This rank's ring, once every rank has its own.

    Memory for a ring can run out on one rank alone, which must not leave the others in the stream.
    """
    failed = outcome if isinstance(outcome, Exception) else None
    if not plan.is_straight:
        agree(failed)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _slot_bytes(plan: LoadPlan, routes: Routes, placer: Placer) -> tuple[int, bool]:
    """Bytes of the largest bucket's sections that pass through this rank's buffer, and whether others get any of them.

    Args:
        plan: The plan.
        routes: Who reads what.
        placer: Knows which segments go straight into the shard.
    """
    largest, sends = 0, False
    rank = routes.shards.rank
    for index, bucket in enumerate(plan.buckets.buckets):
        travelling = routes.travelling(index, bucket, rank)
        sends = sends or any(routes.path(index, section.shard_index)[0] == rank for section in travelling)
        staged = [
            section
            for section in routes.alone(index, bucket, rank)
            if not all(placer.lands(segment, "cpu") for segment in section.segments)
        ]
        offsets = routes.offsets(index, bucket, rank)
        ends = [offsets[section.shard_index] + section.num_bytes for section in (*travelling, *staged)]
        largest = max([largest, *ends])
    return largest, sends


Progress = Callable[[str, int, int, str], None]
"""Called as `progress(phase, bytes_done, bytes_total, last FQN)`; phases are `plan`, `stream`, `finalize`."""

READ_THREADS = 4
"""Reads at once, all readers together: a disk of several GB/s wants more than one, and so does the page cache."""

_log = logging.getLogger("raysharding")


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
        return _Load(unwrapped(module), loading or Loading(), progress or silent, stall_s).run(checkpoint)


def load_held(module: nn.Module, held: HeldStateDict, loading: Loading, stall_s: float) -> LoadReport:
    """As `load_checkpoint`, from rank 0's memory.

    Tensors on meta that nothing feeds stay there, but for non-persistent buffers with a rule of their own.
    """
    with paused_gc():
        return _Load(module, loading, silent, stall_s).run(held)


def silent(phase: str, done: int, total: int, tensor: str) -> None:
    """The progress callback of those who want none."""


class _Load:
    """One load on one rank."""

    def __init__(self, module: nn.Module, loading: Loading, progress: Progress, stall_s: float) -> None:
        self.started = perf_counter()
        self.module = module
        self.loading = loading
        self.progress = progress
        self.stall_s = stall_s
        reshard(module)
        self.tensors = module_tensors(module)
        self.shards = ShardMap.of(self.tensors)
        self.device = message_device(module)
        if loading.mmap and self.device.type != "cpu":
            raise ValueError(f"mmap=True: files are mapped into host memory, but the mesh is on {self.device.type}")
        self.peak = MemoryPeak(self.device)
        self.checksums = Checksums() if loading.verify == "full" else None
        self.measured: dict[str, Any] = {}
        """This rank's part of the report, by field."""
        self.fresh = False
        self.undo: Callable[[], None] = lambda: None

    def run(self, origin: Origin) -> LoadReport:
        self.progress("plan", 0, 0, "")
        proposal = propose_load(self.module, self.tensors, origin, self.loading)
        # The others allocate while rank 0 reads headers. What is mapped, or named by a state dict, must be known first.
        later = self.loading.mmap or isinstance(origin, HeldStateDict)
        error = None if later else self._allocate(None)
        try:
            memory = [] if later else [local_tensor(tensor) for tensor in self.tensors.values()]
            self.fresh = is_fresh(memory)
            with Prefault(memory if self.fresh else []):
                plan = agree_on_plan(proposal, error, self.loading, self.shards, self.device)
                if self.shards.rank == 0:
                    choice = plan.choice
                    _log.info("loading %s by %s (%s)", plan.outline.checkpoint, choice.transport, choice.reason)
                if later:
                    # A rank that could not map or allocate must not leave the others in the stream.
                    agree(self._allocate(plan))
                stream = self._make_stream(plan)
                self.measured["plan_s"] = perf_counter() - self.started
                error = self._stream(stream, plan)
            error = error or self._finish(plan)
            every = self._agree_on_end(error, plan)
        except BaseException:
            self.undo()  # garbage must not be left to run on
            raise
        note_load(self.module)
        return LoadReport.merge(plan, every)

    def _allocate(self, plan: LoadPlan | None) -> Exception | None:
        """Give the module its memory, mapped files where the plan says so.

        A rank without the memory must say so before the others wait for its messages: the error is returned.
        """
        try:
            mapped = {}
            if plan is not None and plan.mapped:
                assert plan.checkpoint is not None, "every rank reads"
                found = map_tensors(plan.checkpoint.files, plan.mapped, plan.extents, self.shards.shard_index)
                mapped = {self.tensors[fqn]: memory for fqn, memory in found.items()}
            named = None
            if plan is not None and plan.outline.whereabouts is None:
                named = {id(self.tensors[fqn]) for fqn, _ in plan.outline.tensors}
                named.update(id(self.tensors[fqn]) for fqn in plan.outline.initialise)
            self.undo = materialize(self.module, self.device, mapped, named)
        except (RuntimeError, MemoryError, CheckpointError) as error:
            return error
        self.tensors = module_tensors(self.module)
        return None

    def _make_stream(self, plan: LoadPlan) -> BucketStream:
        """Set up this rank's transport and ring; collective, unless nobody needs a ring."""
        buckets = plan.buckets.buckets
        cumulative = list(accumulate(map(buckets.payload_bytes, range(len(buckets)))))

        def done(index: int) -> None:
            self.progress("stream", cumulative[index], cumulative[-1], buckets.last_tensor(index).layout.fqn)

        def reading(index: int, num_bytes: int) -> None:
            so_far = min(cumulative[index], (cumulative[index - 1] if index else 0) + num_bytes)
            self.progress("stream", so_far, cumulative[-1], buckets.last_tensor(index).layout.fqn)

        placer = Placer(plan.buckets, self.tensors, self.shards, self.fresh)
        routes = Routes(self.shards, plan.choice.readers, plan.buckets.num_first_buckets)
        transport, slots = make_transport(plan, self.loading, routes, placer, self.device, self.stall_s)
        return BucketStream(plan.buckets, transport, placer, slots, self.device, self.stall_s, self.peak, done, reading)

    def _stream(self, stream: BucketStream, plan: LoadPlan) -> Exception | None:
        """Move every bucket."""
        started = perf_counter()
        # From here on what was there may be overwritten, also before the first bucket is told of.
        self.progress("stream", 0, 0, "")
        error = self._read_and_stream(stream, plan) if plan.checkpoint is not None else stream.run(None)
        times, transport = stream.times, stream.transport
        self.measured |= {
            "stream_s": perf_counter() - started,
            "read_s": times.read_s,
            "send_s": times.send_s,
            "place_s": times.place_s,
            "wire_bytes": transport.wire_bytes,
            "shared_bytes": transport.shared_bytes,
            "ring_bytes": sum(slot.wire.numel() for slot in stream.slots),
        }
        return error

    def _read_and_stream(self, stream: BucketStream, plan: LoadPlan) -> Exception | None:
        assert plan.checkpoint is not None, "only readers come here"
        if plan.fit is not None and plan.fit.held is not None:
            return self._read_held(stream, plan.fit, plan)
        # Many readers keep a machine busy as it is.
        num_threads = max(1, READ_THREADS // len(plan.choice.readers))
        if is_remote(plan.checkpoint.files[0].path):
            num_threads = READ_THREADS  # of a store each rank wants several requests in flight
        with FileReader(plan.checkpoint) as reader, ReadThreads(num_threads) as threads:
            targets = plan.fit.keys.targets if plan.fit is not None else {}
            cache_bytes = self.loading.bucket_bytes or BUCKET_BYTES
            source = CheckpointSource(
                plan.checkpoint, reader, plan.extents, targets, cache_bytes, self.checksums, threads
            )
            error = stream.run(source)
            if error is None:
                try:
                    reader.verify_unchanged()
                except (CheckpointError, OSError) as raised:
                    error = raised
            self.measured["read_bytes"] = reader.num_bytes_read
        return error

    def _read_held(self, stream: BucketStream, fit: Fit, plan: LoadPlan) -> Exception | None:
        assert fit.held is not None, "there is a state dict"
        cache_bytes = self.loading.bucket_bytes or BUCKET_BYTES
        source = StateDictSource(fit.held, fit.checkpoint.tensors, plan.extents, fit.keys.targets, cache_bytes)
        error = stream.run(source)
        self.measured["read_bytes"] = source.num_bytes_read
        return error

    def _finish(self, plan: LoadPlan) -> Exception | None:
        """Initialise what the checkpoint lacks, and check values; this rank alone."""
        total = plan.buckets.payload_bytes
        self.progress("finalize", total, total, "")
        started = perf_counter()
        try:
            self._initialise(plan.outline.initialise)
            if self.loading.verify == "finite":
                loaded = [fqn for fqn, _ in plan.outline.tensors]
                check_finite(self.tensors, loaded, plan.outline.checkpoint, self._checked)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            return error
        self.measured["initialise_s"] = perf_counter() - started
        return None

    def _checked(self, index: int, fqn: str) -> None:
        """Progress of what is looked at once more: it takes as long as reading where files are mapped."""
        self.progress("finalize", index, len(self.tensors), fqn)

    def _initialise(self, names: Sequence[str]) -> None:
        """Give what the checkpoint lacks its values: full tensors by the module's own rule, then this rank's part."""
        if not names:
            return
        initialiser = Initialiser(self.module, self.loading.seed)
        for name in names:
            full = initialiser.value(name)
            start, stop = tensor_layout(name, self.tensors[name]).local_range(self.shards.shard_index)
            local_tensor(self.tensors[name]).view(-1).copy_(full.reshape(-1)[start:stop])

    def _agree_on_end(self, error: Exception | None, plan: LoadPlan) -> Sequence[Mapping[str, Any]]:
        """Exchange outcomes and figures: a rank that failed must not leave the others with a module that looks well."""
        if self.checksums is not None:
            agree(error)  # what was not read cannot be compared
            error = self._check_checksums(self.checksums, plan)
        if self.loading.digest:
            agree(error)
            self.measured["digest"] = digest_module(self.tensors, plan.outline.checkpoint)
        self.peak.sample()
        shard_bytes = sum(local_tensor(tensor).nbytes for tensor in self.tensors.values())
        host_shard_bytes = 0 if self.peak.device_bytes else shard_bytes
        self.measured |= {
            "shard_bytes": shard_bytes,
            "peak_extra_bytes": max(0, self.peak.host_bytes - host_shard_bytes),
            "peak_device_bytes": self.peak.device_bytes,
            "seconds": perf_counter() - self.started,
        }
        return agree(error, self.measured)

    def _check_checksums(self, checksums: Checksums, plan: LoadPlan) -> Exception | None:
        """Compare with the manifest what was read, and what is mapped; collective."""
        for index, layout in enumerate(plan.mapped):
            self._checked(index, layout.fqn)
            extents = plan.extents[layout.fqn]
            assert extents is not None, f"{layout.fqn}: mapped from ranges"
            first = layout.local_range(self.shards.shard_index)[0] * layout.dtype.itemsize
            offset = extents[0].offset - extents[0].key_offset + first
            checksums.add(extents[0].key, offset, as_memory(local_tensor(self.tensors[layout.fqn]).view(-1)))
        try:
            check_checksums(checksums, plan)
        except CheckpointError as error:
            return error
        return None
