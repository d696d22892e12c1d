"""The stream of a load: rank 0 reads bucket k + 1 on a thread while bucket k is sent; the others receive and place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist

from raysharding.distributed.layout import ShardMap
from raysharding.distributed.memory import MemoryPeak
from raysharding.distributed.placing import Placer
from raysharding.distributed.plan import BucketPlan, Section, Segment
from raysharding.distributed.read_ahead import FilledBucket, ReadAhead
from raysharding.distributed.source import ElementSource
from raysharding.distributed.transport import (
    FAILED,
    RING_SIZE,
    BucketTransport,
    Received,
    make_ring,
    sections_for,
    status_of,
)

BucketDone = Callable[[int], None]
"""Called with a bucket's index when it was sent or placed."""


@dataclass
class StreamTimes:
    """Where a rank's time went, in seconds."""

    read_s: float = 0.0
    """Reading files (rank 0's thread)."""
    send_s: float = 0.0
    """Starting and waiting for messages: sends on rank 0, receives elsewhere."""
    place_s: float = 0.0
    """Copying out of buffers into shards."""


@dataclass
class BucketStream:
    """One load's stream on one rank. Rank 0 calls `send`, every other rank `receive`, once."""

    plan: BucketPlan
    transport: BucketTransport
    placer: Placer
    shards: ShardMap
    device: torch.device
    """Device of the messages: the mesh's."""
    timeout_s: float
    """Longest wait for one bucket."""
    peak: MemoryPeak
    done: BucketDone
    times: StreamTimes = field(default_factory=StreamTimes)

    def send(self, source: ElementSource) -> Exception | None:
        """Rank 0: read, send and place every bucket.

        Returns:
            The error that ended the reading, after the others were told, or the first one of this rank's placing;
            `None` if all went well.
        """
        with ReadAhead(self.plan, source, self.transport, self.placer, self.shards, self.device) as ahead:
            try:
                return self._send_buckets(ahead)
            finally:
                self.times.read_s = ahead.read_s

    def _send_buckets(self, ahead: ReadAhead) -> Exception | None:
        in_flight: deque[tuple[FilledBucket, list[dist.Work]]] = deque()
        error: Exception | None = None
        for index in range(len(self.plan.buckets)):
            filled = ahead.next(self.timeout_s)
            started = perf_counter()
            # Sent before the last one is waited for: the others have receives for both.
            in_flight.append((filled, self._send_bucket(filled)))
            self.times.send_s += perf_counter() - started  # gloo writes what the socket takes at once
            if filled.error is not None:
                error = filled.error
                self._send_posted(filled, index)
                break
            error = error or self._place_own(ahead, filled)
            if len(in_flight) == RING_SIZE:
                self._finish_oldest(ahead, in_flight)
            self.done(index)
        while in_flight:
            self._finish_oldest(ahead, in_flight)
        return error

    def _finish_oldest(self, ahead: ReadAhead, in_flight: deque[tuple[FilledBucket, list[dist.Work]]]) -> None:
        started = perf_counter()
        filled, works = in_flight.popleft()
        self.transport.wait(works)
        ahead.release(filled)
        self.times.send_s += perf_counter() - started

    def _send_posted(self, failed: FilledBucket, index: int) -> None:
        """After a failed read: serve the receives that the others posted ahead, or a later message would land there."""
        for bucket in self.plan.buckets[index + 1 : index + RING_SIZE]:
            self.transport.wait(self._send_bucket(FilledBucket(bucket, failed.slot, failed.error)))

    def _send_bucket(self, filled: FilledBucket) -> list[dist.Work]:
        wire = filled.slot.wire
        if filled.error is not None:
            for section in filled.bucket.sections:
                wire[section.offset] = FAILED
        elif filled.slot.copied is not None:
            torch.cuda.current_stream().wait_event(filled.slot.copied)
        return self.transport.send(filled.bucket, wire)

    def _place_own(self, ahead: ReadAhead, filled: FilledBucket) -> Exception | None:
        own = sections_for(filled.bucket, self.shards.shard_index)
        buffered = [section for section in own if not ahead.reads_into_shard(section)]
        error = self._place(buffered, filled.slot.wire)
        self.peak.sample()
        return error

    def receive(self) -> Exception | None:
        """Other ranks: receive and place every bucket, the next one's receives posted while this one is placed.

        Returns:
            This rank's own first error, after which it kept receiving, so that rank 0 was not left sending to it. Where
            rank 0 reported a failed read, the stream ends early; rank 0 tells why when all agree on the outcome.
        """
        buckets = self.plan.buckets
        ring = make_ring(self.transport, self.plan, self.device, pinned=False)
        posted: list[tuple[list[dist.Work], Received]] = []
        error: Exception | None = None
        for index, bucket in enumerate(buckets):
            posted += [
                self.transport.receive(buckets[ahead], ring[ahead % RING_SIZE], self._landing)
                for ahead in range(index + len(posted), min(index + RING_SIZE, len(buckets)))
            ]
            works, received = posted.pop(0)
            started = perf_counter()
            self.transport.wait(works)
            self.times.send_s += perf_counter() - started
            own = sections_for(bucket, self.shards.shard_index)
            if any(status_of(section, received.buffer) == FAILED for section in own):
                self.transport.release(received)
                for works, ahead in posted:  # rank 0 serves these too: see _send_posted
                    self.transport.wait(works)
                    self.transport.release(ahead)
                return error
            error = error or self._place(own, received.buffer, received.landed)
            self.transport.release(received)
            self.peak.sample()
            self.done(index)
        return error

    def _landing(self, segment: Segment) -> torch.Tensor | None:
        return self.placer.memory(segment, self.device.type)

    def _place(
        self, sections: Sequence[Section], buffer: torch.Tensor, landed: frozenset[tuple[int, int]] = frozenset()
    ) -> Exception | None:
        """Copy sections into the shards; an error is returned, to be told when all ranks agree on the outcome."""
        started = perf_counter()
        try:
            for section in sections:
                self.placer.place_section(section, buffer, landed)
        except RuntimeError as error:  # out of memory, mostly
            return error
        finally:
            self.times.place_s += perf_counter() - started
        return None
