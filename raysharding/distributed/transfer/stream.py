"""The stream of a load: reads, receives, forwards and places the buckets of this rank.

`ReadAhead`, a thread of a reader, fills the next bucket's buffer, and shards that only this rank needs, while messages
are in flight.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter

import torch

from raysharding.distributed.comm import FailureFlag, device_module, is_accelerator, wait_for_event
from raysharding.distributed.transfer.bucket_plan import Bucket, BucketPlan, Segment
from raysharding.distributed.transfer.buffers import LocalShards, Slot
from raysharding.distributed.transfer.memory import MemoryPeak
from raysharding.distributed.transfer.sources import Request, TensorSource, as_memory
from raysharding.distributed.transfer.transport import BucketTransfer, BucketTransport

_LOOK_S = 1.0
"""Seconds between two checks for progress of a slow disk."""
_END_S = 5.0
"""Longest wait for the reading thread to end."""


@dataclass
class ReadAhead:
    """Thread that fills the ring; a context manager that ends the thread.

    After an error it continues to release buckets, unread, until its rank stops: other ranks wait for their messages.
    """

    plan: BucketPlan
    source: TensorSource
    transport: BucketTransport
    local_shards: LocalShards
    slots: Sequence[Slot]
    device: torch.device
    error: Exception | None = None
    """The first error of a read."""
    read_s: float = 0.0
    """Seconds of reading."""

    def __post_init__(self) -> None:
        self._stream = device_module(self.device).Stream(self.device) if is_accelerator(self.device) else None
        self._copied: deque[torch.Event] = deque(maxlen=len(self.slots))
        self._free = threading.Semaphore(len(self.slots))
        self._filled: queue.Queue[int] = queue.Queue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="raysharding-read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        if self._stream is not None:
            # Wait for kernels that still write to the shards.
            self._stream.wait_stream(device_module(self.device).current_stream(self.device))
        self._thread.start()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self._stopped = True
        self._free.release()
        # A read of a local file ends by itself; the timeout is for a file system that hangs.
        self._thread.join(_END_S)
        if self._stream is not None:
            # All shards that this stream fills are complete then. After an error, that error is the one to raise.
            with suppress(TimeoutError) if error is not None else nullcontext():
                wait_for_event(self._stream.record_event(), _END_S)

    def next(self, timeout_s: float, reading: Callable[[int], None]) -> None:
        """Wait until the next bucket was read, or has failed.

        Args:
            timeout_s: Longest time without progress, in seconds.
            reading: Called repeatedly while bytes arrive, with their number since the wait began.

        Raises:
            TimeoutError: Nothing was read for `timeout_s`, or other ranks did not take earlier buckets.
        """
        if len(self._copied) == len(self.slots):
            # The thread fills this buffer once the last copy has left it, which waits for messages to other ranks.
            wait_for_event(self._copied[0], timeout_s)
        index = self._wait(timeout_s, reading)
        copied = self.slots[index % len(self.slots)].copied
        if copied is not None:
            self._copied.append(copied)
            device_module(self.device).current_stream(self.device).wait_event(copied)

    def _wait(self, timeout_s: float, reading: Callable[[int], None]) -> int:
        first = seen = self.source.num_bytes_read
        since = monotonic()
        while True:
            try:
                return self._filled.get(timeout=min(_LOOK_S, timeout_s))
            except queue.Empty:
                if (now := self.source.num_bytes_read) > seen:
                    seen, since = now, monotonic()
                    reading(seen - first)
                elif monotonic() - since >= timeout_s:
                    what = f"nothing was read for {timeout_s:.0f} s: the checkpoint's disk stalls"
                    raise TimeoutError(what) from None

    def release(self, index: int) -> None:
        """Release the buffer of bucket `index`, which was sent and placed."""
        if self._stream is not None:
            # On NCCL a completed wait means stream-ordered, not done: the copy of the next bucket waits for this event.
            slot = self.slots[index % len(self.slots)]
            slot.sent = device_module(self.device).Event()
            slot.sent.record()
        self._free.release()

    def _run(self) -> None:
        if self._stream is not None:
            # The current device is thread-local: the first use of device 0 by this thread would make a context there.
            device_module(self.device).set_device(self.device)
        for index, bucket in enumerate(self.plan.buckets):
            self._free.acquire()
            if self._stopped:
                return
            started = perf_counter()
            if self.error is None:
                try:
                    self._fill(index, bucket, self.slots[index % len(self.slots)])
                except Exception as raised:  # noqa: BLE001 - handed to the streaming thread, which tells every rank
                    self.error = raised
            self.read_s += perf_counter() - started
            self._filled.put(index)

    def _fill(self, index: int, bucket: Bucket, slot: Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()  # the last copy to the device may still read this buffer
        offsets = self.transport.offsets(index, bucket)
        requests: list[Request] = []
        staged: list[tuple[Segment, slice]] = []
        sent: list[slice] = []
        for section in self.transport.reads(index, bucket):
            first = offsets[section.shard_index]
            alone = self.transport.is_alone(index, section)
            if not alone:
                sent.append(slice(first, first + section.num_bytes))
            for segment in section.segments:
                memory = self.local_shards.memory(segment, "cpu") if alone else None
                if memory is not None:
                    requests.append(self._request(segment, as_memory(memory)))
                    continue
                part = slice(first + segment.offset, first + segment.offset + segment.num_bytes)
                requests.append(self._request(segment, slot.memory[part]))
                if alone:
                    staged.append((segment, part))
        self.source.read(requests)
        if self._stream is None:
            for segment, part in staged:
                self.local_shards.place(segment, slot.host[part])
        else:
            self._copy_to_device(self._stream, slot, sent, staged)

    def _copy_to_device(
        self,
        stream: torch.Stream,
        slot: Slot,
        sent: Sequence[slice],
        staged: Sequence[tuple[Segment, slice]],
    ) -> None:
        with device_module(self.device).stream(stream):
            if slot.sent is not None:
                stream.wait_event(slot.sent)
            for part in sent:
                slot.wire[part].copy_(slot.host[part], non_blocking=True)
            for segment, part in staged:
                data = slot.host[part]
                if self.local_shards.converts_on_device(segment.tensor):
                    data = slot.wire[part].copy_(data, non_blocking=True)
                self.local_shards.place(segment, data)
            slot.copied = device_module(self.device).Event()
            slot.copied.record(stream)

    def _request(self, segment: Segment, memory: memoryview) -> Request:
        planned = self.plan.tensors[segment.tensor]
        return Request(planned.layout.fqn, segment.start, segment.stop, planned.wire_dtype, memory)


@dataclass
class StreamTimes:
    """Times of a rank, in seconds."""

    read_s: float = 0.0
    """Reading files, in a thread."""
    send_s: float = 0.0
    """Starting and waiting for messages."""
    place_s: float = 0.0
    """Copying from buffers into shards."""


@dataclass
class BucketStream:
    """Stream of one load on one rank. Every rank calls `run` once."""

    plan: BucketPlan
    transport: BucketTransport
    local_shards: LocalShards
    slots: Sequence[Slot]
    device: torch.device
    """Device of the messages, which is that of the mesh."""
    timeout_s: float
    """Longest wait for one bucket, in seconds."""
    peak: MemoryPeak
    """Samples the memory of this process after each bucket."""
    progress: Callable[[int, int], None]
    """Called with the index of a bucket and its bytes so far: at its end, and repeatedly during a long read."""
    times: StreamTimes = field(default_factory=StreamTimes)

    def run(self, source: TensorSource | None) -> Exception | None:
        """Read, send, receive and place every bucket.

        Args:
            source: Source of the bytes; `None` on a rank that does not read.

        Returns:
            The first error of this rank. After an error it continues until all ranks agree to stop, so that no rank
            waits for it.
        """
        if source is None:
            return self._run(None)
        with ReadAhead(self.plan, source, self.transport, self.local_shards, self.slots, self.device) as ahead:
            error = self._run(ahead)
        self.times.read_s = ahead.read_s
        return error

    def _run(self, ahead: ReadAhead | None) -> Exception | None:
        flag = FailureFlag(len(self.plan.buckets), self.timeout_s)
        error: Exception | None = None
        for index in range(len(self.plan.buckets)):
            error = self._finish(self._start(index, ahead), ahead, error)
            self.peak.sample()
            self.progress(index, self.plan.buckets.payload_bytes(index))
            if flag.check(index, failed=error is not None):
                break
        flag.close()
        if is_accelerator(self.device):
            # The host reads offloaded shards next.
            wait_for_event(device_module(self.device).current_stream(self.device).record_event(), self.timeout_s)
        return error

    def _start(self, index: int, ahead: ReadAhead | None) -> BucketTransfer:
        if ahead is not None:
            ahead.next(self.timeout_s, partial(self.progress, index))
        transfer = BucketTransfer(index, self.plan.buckets[index], self.slots[index % len(self.slots)].wire)
        with self._sending():
            self.transport.start(transfer)
        return transfer

    def _finish(self, transfer: BucketTransfer, ahead: ReadAhead | None, error: Exception | None) -> Exception | None:
        with self._sending():
            self.transport.arrive(transfer)
        if ahead is not None:
            error = error or ahead.error
        if error is None:
            error = self._place(transfer)
        with self._sending():
            self.transport.release(transfer)
        if ahead is not None:
            ahead.release(transfer.index)
        return error

    @contextmanager
    def _sending(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self.times.send_s += perf_counter() - started

    def _place(self, transfer: BucketTransfer) -> Exception | None:
        """Copy received sections into the shards. Return an error, which all ranks exchange later."""
        started = perf_counter()
        try:
            for section, memory in self.transport.received(transfer):
                for segment in section.segments:
                    if segment not in transfer.in_place:
                        self.local_shards.place(segment, memory[segment.offset : segment.offset + segment.num_bytes])
        except RuntimeError as error:  # usually out of memory
            return error
        finally:
            self.times.place_s += perf_counter() - started
        return None
