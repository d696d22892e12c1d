"""What a stream runs on: this rank's transport and its ring of buffers, shared with its host where that works."""

from __future__ import annotations

from dataclasses import replace

import torch

from raysharding.config import Loading
from raysharding.distributed.agreement import PULSE_BUCKETS, agree
from raysharding.distributed.placing import Placer
from raysharding.distributed.planning import LoadPlan
from raysharding.distributed.ring import RING_SIZE, Slot, make_ring, shared_ring
from raysharding.distributed.routes import Routes
from raysharding.distributed.shared_ring import SharedRings, share_rings
from raysharding.distributed.transport import Broadcast, BucketTransport, Scatter


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
