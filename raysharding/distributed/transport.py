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

from raysharding.distributed.layout import ShardMap
from raysharding.distributed.plan import REPLICATED, Bucket, Section, Segment

OK = 0
FAILED = 1

DirectTarget = Callable[[Segment], torch.Tensor | None]
"""Gives the uint8 memory into which a large segment may be received, or `None` if it must be staged."""


@dataclass
class Received:
    """A bucket's sections in this process after they arrived."""

    bucket: Bucket
    """The bucket."""
    buffer: torch.Tensor
    """uint8 [bucket bytes]: holds this rank's sections at their offsets, but for `landed` segments."""
    landed: frozenset[tuple[int, int]]
    """(tensor, start) of the segments that went straight into the shard."""


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

    Wire: each shard leaves rank 0 once for each rank that holds it. Every rank calls `send` or `receive` for the same
    buckets in the same order.
    """

    name = "scatter"

    def __init__(self, shards: ShardMap, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        self._shards = shards
        self._timeout = timedelta(seconds=timeout_s)
        self._group = group
        self.wire_bytes = 0

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
            for section in sections_for(bucket, self._shards.index_of(peer)):
                for offset, length, _ in _messages(section):
                    piece = buffer[offset : offset + length]
                    ops.append(dist.P2POp(dist.isend, piece, peer, self._group))
                    self.wire_bytes += length
        return _start(ops)

    def receive(self, bucket: Bucket, buffer: torch.Tensor, direct: DirectTarget) -> tuple[list[dist.Work], Received]:
        """Other ranks: post the receives of a bucket; its data is there once `wait` returned."""
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
        self.wire_bytes = 0

    def needs_buffer(self, section: Section) -> bool:
        """Whether rank 0 must fill this section: always, since the bucket travels whole."""
        return self._shards.world_size > 1

    def send(self, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        """Rank 0: start sending a bucket; the buffer must not change until `wait` returned."""
        self.wire_bytes += bucket.num_bytes * (self._shards.world_size - 1)
        return self._broadcast(bucket, buffer)

    def receive(self, bucket: Bucket, buffer: torch.Tensor, direct: DirectTarget) -> tuple[list[dist.Work], Received]:
        """Other ranks: post the receive of a bucket; its data is there once `wait` returned."""
        return self._broadcast(bucket, buffer), Received(bucket, buffer, frozenset())

    def _broadcast(self, bucket: Bucket, buffer: torch.Tensor) -> list[dist.Work]:
        # Every rank enters for every bucket, also after a failed read: a rank that left early would hold the others.
        work = dist.broadcast(buffer[: bucket.num_bytes], src=0, group=self._group, async_op=True)
        return [work] if work is not None else []

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for the broadcast of a bucket, at most the time-out, so that a stopped peer cannot hold this rank."""
        _wait(works, self._timeout)


BucketTransport = Scatter | Broadcast


def make_transport(name: str, shards: ShardMap, timeout_s: float) -> tuple[BucketTransport, str]:
    """Pick the transport and say why; every rank passes the same name.

    Returns:
        The transport and the reason for it, in words for the load report.
    """
    if name == "broadcast":
        return Broadcast(shards, timeout_s), "asked for"
    reason = "asked for" if name == "scatter" else "auto: each rank is sent only its own part"
    return Scatter(shards, timeout_s), reason


def _start(ops: list[Any]) -> list[dist.Work]:
    # One batch a bucket: on NCCL, sends to several peers outside of a batch would wait for each other.
    works: list[dist.Work] = dist.batch_isend_irecv(ops) if ops else []
    return works


def _wait(works: Sequence[dist.Work], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
