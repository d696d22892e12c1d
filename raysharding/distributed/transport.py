"""How buckets get from rank 0 to the shards: `scatter` (each rank its own sections) and `broadcast` (all to all ranks).

Note: errors on the way.
    Every section opens with a status word, written by rank 0. When a read fails, rank 0 still sends the bucket, so that
    nobody is left waiting, with the status `FAILED`; every rank then stops after that bucket and the caller exchanges
    the reason. A rank that fails to place keeps receiving, so that rank 0 is not left sending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raysharding.config import Loading
from raysharding.distributed.layout import ShardMap
from raysharding.distributed.plan import REPLICATED, STATUS_BYTES, Bucket, BucketPlan, Section, Segment
from raysharding.distributed.shared_ring import SharedRing, share_ring

OK = 0
FAILED = 1

RING_SIZE = 2
"""Buffers of a ring: one is filled while the other is sent or placed. Bucket k is in buffer k modulo this."""

DirectTarget = Callable[[Segment], torch.Tensor | None]
"""Gives the uint8 memory into which a large segment may be received, or `None` if it must be staged."""


@dataclass
class Received:
    """A bucket's sections in this process after they arrived."""

    bucket: Bucket
    """The bucket."""
    buffer: torch.Tensor
    """uint8 [bucket bytes]: holds this rank's sections at their offsets, but for `landed` segments."""
    landed: frozenset[tuple[int, int]] = frozenset()
    """(tensor, start) of the segments that went straight into the shard."""
    shared: bool = False
    """Whether `buffer` is rank 0's, who waits for `Scatter.release` before it fills it again."""


def sections_for(bucket: Bucket, shard_index: int) -> list[Section]:
    """The sections of a bucket that a rank with this shard needs."""
    return [section for section in bucket.sections if section.shard_index in (shard_index, REPLICATED)]


def status_of(section: Section, buffer: torch.Tensor) -> int:
    """Read the status word of a section."""
    return int(buffer[section.offset].item())


def _messages(section: Section) -> list[tuple[int, int, Segment | None]]:
    """(offset in the bucket, length, segment or `None` for the packed part) of each message of a section."""
    packed = [(section.offset, section.packed_bytes, None)]
    return packed + [(section.offset + item.offset, item.num_bytes, item) for item in section.direct]


class Scatter:
    """Point-to-point: rank 0 sends each rank only the sections that it needs.

    Wire: each shard leaves rank 0 once for each rank that holds it. Ranks that map rank 0's ring are sent the status of
    a bucket only, read their sections there, and answer when they have. Every rank calls `send` or `receive` for the
    same buckets in the same order.
    """

    name = "scatter"

    def __init__(
        self,
        shards: ShardMap,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
        ring: SharedRing | None = None,
    ) -> None:
        self._shards = shards
        self._timeout = timedelta(seconds=timeout_s)
        self._group = group
        self.ring = ring
        self.wire_bytes = 0
        self.shared_bytes = 0

    def needs_buffer(self, section: Section) -> bool:
        """Whether any rank but rank 0 needs this section."""
        if section.shard_index == REPLICATED:
            return self._shards.world_size > 1
        return self._shards.holders[section.shard_index] != (self._shards.rank,)

    def send(self, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        """Rank 0: start sending a bucket; the buffer must not change until `wait` returned."""
        ops = []
        for peer in range(self._shards.world_size):
            if peer == self._shards.rank:
                continue
            sections = sections_for(bucket, self._shards.index_of(peer))
            if self.ring is not None and peer in self.ring.peers:
                # The answer is part of the bucket's messages: the buffer is not filled again before it came.
                ops.append(dist.P2POp(dist.isend, buffer[sections[0].offset :][:STATUS_BYTES], peer, self._group))
                ops.append(dist.P2POp(dist.irecv, torch.empty(1, dtype=torch.uint8), peer, self._group))
                self.wire_bytes += STATUS_BYTES
                self.shared_bytes += sum(section.num_bytes for section in sections)
                continue
            for section in sections:
                for offset, length, _ in _messages(section):
                    piece = buffer[offset : offset + length]
                    ops.append(dist.P2POp(dist.isend, piece, peer, self._group))
                    self.wire_bytes += length
        return _start(ops)

    def receive(self, bucket: Bucket, buffer: torch.Tensor, direct: DirectTarget) -> tuple[list[dist.Work], Received]:
        """Other ranks: post the receives of a bucket; its data is there once `wait` returned."""
        if self.ring is not None:
            status = torch.empty(STATUS_BYTES, dtype=torch.uint8)
            return _start([dist.P2POp(dist.irecv, status, 0, self._group)]), Received(bucket, buffer, shared=True)
        ops = []
        landed = set()
        for section in sections_for(bucket, self._shards.shard_index):
            for offset, length, segment in _messages(section):
                piece = buffer[offset : offset + length]
                if segment is not None and (memory := direct(segment)) is not None:
                    piece = memory
                    landed.add((segment.tensor, segment.start))
                ops.append(dist.P2POp(dist.irecv, piece, 0, self._group))
        return _start(ops), Received(bucket, buffer, frozenset(landed))

    def release(self, received: Received) -> None:
        """Other ranks: a received bucket was placed, or is not wanted: rank 0 may fill a shared buffer again."""
        if received.shared:
            # Rank 0 receives one answer for each bucket that it sent: left out, it would wait for it.
            self.wait(_start([dist.P2POp(dist.isend, torch.ones(1, dtype=torch.uint8), 0, self._group)]))

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for the messages of a bucket, at most the time-out: a peer that stops cannot hold this rank for ever."""
        _wait(works, self._timeout)


class Broadcast:
    """One broadcast a bucket: every rank is sent everything and keeps its part.

    Wire: W − 1 times the checkpoint on gloo (its broadcast sends to each rank). Same protocol as `Scatter`.
    """

    name = "broadcast"

    def __init__(self, shards: ShardMap, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        self._shards = shards
        self._timeout = timedelta(seconds=timeout_s)
        self._group = group
        self.ring: SharedRing | None = None
        self.wire_bytes = 0
        self.shared_bytes = 0

    def needs_buffer(self, section: Section) -> bool:
        """Whether rank 0 must fill this section: always, since the bucket travels whole."""
        return self._shards.world_size > 1

    def send(self, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        """Rank 0: start sending a bucket; the buffer must not change until `wait` returned."""
        self.wire_bytes += bucket.num_bytes * (self._shards.world_size - 1)
        return self._broadcast(bucket, buffer)

    def receive(self, bucket: Bucket, buffer: torch.Tensor, direct: DirectTarget) -> tuple[list[dist.Work], Received]:
        """Other ranks: post the receive of a bucket; its data is there once `wait` returned."""
        return self._broadcast(bucket, buffer), Received(bucket, buffer)

    def release(self, received: Received) -> None:
        """Nothing: every rank has a buffer of its own."""

    def _broadcast(self, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        # Every rank enters for every bucket, also after a failed read: a rank that left early would hold the others.
        work = dist.broadcast(buffer[: bucket.num_bytes], src=0, group=self._group, async_op=True)
        return [work] if work is not None else []

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for the broadcast of a bucket, at most the time-out, so that a stopped peer cannot hold this rank."""
        _wait(works, self._timeout)


BucketTransport = Scatter | Broadcast


def make_transport(
    loading: Loading, shards: ShardMap, timeout_s: float, plan: BucketPlan, device: torch.device
) -> tuple[BucketTransport, str]:
    """Pick the transport and say why; collective, every rank passes the same arguments.

    Returns:
        The transport and the reason for it, in words for the load report.
    """
    if loading.transport == "broadcast":
        return Broadcast(shards, timeout_s), "asked for"
    reason = "asked for" if loading.transport == "scatter" else "auto: each rank is sent only its own part"
    # Device memory is not shared this way, and NCCL needs no help inside a host.
    shares = loading.shared_memory and device.type == "cpu" and shards.world_size > 1
    ring = share_ring(RING_SIZE, plan.max_bucket_bytes) if shares else None
    return Scatter(shards, timeout_s, ring=ring), reason


def make_ring(transport: BucketTransport, plan: BucketPlan, device: torch.device, pinned: bool) -> list[torch.Tensor]:
    """The buffers of this rank, uint8 [max_bucket_bytes] each: rank 0's where they are shared, else its own."""
    if transport.ring is not None:
        return list(transport.ring.slots)
    size = plan.max_bucket_bytes
    return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(RING_SIZE)]


def _start(ops: list[Any]) -> list[dist.Work]:
    # One batch a bucket: on NCCL, sends to several peers outside of a batch would wait for each other.
    works: list[dist.Work] = dist.batch_isend_irecv(ops) if ops else []
    return works


def _wait(works: Sequence[dist.Work], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
