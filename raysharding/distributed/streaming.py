"""The stream of a load: bucket by bucket, what this rank reads, gets, passes on and places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from raysharding.distributed.agreement import Pulse
from raysharding.distributed.memory import MemoryPeak
from raysharding.distributed.placing import Placer
from raysharding.distributed.plan import BucketPlan, Segment
from raysharding.distributed.read_ahead import ReadAhead
from raysharding.distributed.ring import Slot
from raysharding.distributed.source import ElementSource
from raysharding.distributed.transport import BucketTransport, Passage

BucketDone = Callable[[int], None]
"""Called with a bucket's index when it was sent or placed."""
BucketReading = Callable[[int, int], None]
"""Called with a bucket's index while it is read for long, and how many bytes came."""


@dataclass
class StreamTimes:
    """Where a rank's time went, in seconds."""

    read_s: float = 0.0
    """Reading files, in a thread."""
    send_s: float = 0.0
    """Starting and waiting for messages."""
    place_s: float = 0.0
    """Copying out of buffers into shards."""


@dataclass
class BucketStream:
    """One load's stream on one rank. Every rank calls `run` once."""

    plan: BucketPlan
    transport: BucketTransport
    placer: Placer
    slots: Sequence[Slot]
    device: torch.device
    """Device of the messages: the mesh's."""
    timeout_s: float
    """Longest wait for one bucket."""
    peak: MemoryPeak
    """Looks at this process's memory after each bucket."""
    done: BucketDone
    reading: BucketReading
    times: StreamTimes = field(default_factory=StreamTimes)

    def run(self, source: ElementSource | None) -> Exception | None:
        """Read, send, receive and place every bucket.

        Args:
            source: Where the bytes come from; `None` on a rank that reads nothing.

        Returns:
            This rank's own first error, after which it went on until all ranks agreed to stop, so that nobody was left
            waiting for it.
        """
        with ExitStack() as stack:
            ahead = None
            if source is not None:
                ahead = ReadAhead(self.plan, source, self.transport, self.placer, self.slots, self.device)
                stack.enter_context(ahead)
            try:
                return self._run(ahead)
            finally:
                self.times.read_s = 0.0 if ahead is None else ahead.read_s

    def _run(self, ahead: ReadAhead | None) -> Exception | None:
        pulse = Pulse(len(self.plan.buckets), self.timeout_s)
        error: Exception | None = None
        for index in range(len(self.plan.buckets)):
            error = self._finish(self._start(index, ahead), ahead, error)
            self.peak.sample()
            self.done(index)
            if pulse.beat(index, failed=error is not None):
                break
        pulse.close()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # offloaded shards are read by the host next
        return error

    def _start(self, index: int, ahead: ReadAhead | None) -> Passage:
        if ahead is not None:
            ahead.next(self.timeout_s, partial(self.reading, index))
        passage = Passage(index, self.plan.buckets[index], self.slots[index % len(self.slots)].wire)
        with self._sending():
            self.transport.start(passage, self._landing)
        return passage

    def _finish(self, passage: Passage, ahead: ReadAhead | None, error: Exception | None) -> Exception | None:
        with self._sending():
            self.transport.arrive(passage, self._landing)
        if ahead is not None:
            error = error or ahead.error
        if error is None:
            error = self._place(passage)
        with self._sending():
            self.transport.release(passage)
        if ahead is not None:
            ahead.release(passage.index)
        return error

    @contextmanager
    def _sending(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self.times.send_s += perf_counter() - started

    def _landing(self, segment: Segment) -> torch.Tensor | None:
        return self.placer.memory(segment) if self.placer.lands(segment, self.device.type) else None

    def _place(self, passage: Passage) -> Exception | None:
        """Copy what arrived into the shards; an error is returned, to be told when all ranks agree on the outcome."""
        started = perf_counter()
        try:
            for found in self.transport.found(passage):
                self.placer.place_section(found.section, found.memory, passage.landed)
        except RuntimeError as error:  # out of memory, mostly
            return error
        finally:
            self.times.place_s += perf_counter() - started
        return None
