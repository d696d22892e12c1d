"""The stream of a load: reads, receives, forwards and places the buckets of this rank.

`ReadAhead`, the threads of a reader, fill the next bucket's buffer, and shards that only this rank needs, while
messages are in flight.

Note: no thread waits for another.
    A bucket is read in jobs of a few MiB. The thread that has read a job copies it to the device, or converts it into
    the shard, and takes the next one, which may be of the next bucket: threads wait only where both buffers are in use.
    The copies of all threads go through one stream, so that one event tells when a buffer was copied.

Note: what orders the use of a buffer.
    Buckets k and k + 2 use the same `Slot`. The semaphore `_free` keeps reads of bucket k + 2 out of it until `release`
    of bucket k, behind the waits for its messages. On the CPU that is all. On an accelerator the host runs ahead of two
    streams: the copy stream of `ReadAhead`, and the current stream of the thread of `BucketStream`, on which copies
    into shards are queued and behind which NCCL's messages start. Two events order these:

    `Slot.copied` is recorded on the copy stream by the thread that ends the last job of a bucket: by then all threads
    have queued their copies. The current stream waits for it before the messages of bucket k (`next`); the host waits
    for it before the reads of bucket k + 2, which overwrite the pinned memory (`_wait_for_copies`).

    `Slot.sent` is recorded on the current stream behind the messages of bucket k and its copies into shards
    (`release`). The copy stream waits for it before the copies of bucket k + 2, which overwrite `Slot.wire`.

    A rank that does not read needs neither: the current stream alone orders its messages and its copies into shards.
    No tensor is recorded on the copy stream (`Tensor.record_stream`): `ReadAhead` holds ring and shards, and its
    `__exit__` waits for the stream (for a few seconds, after an error), so that the allocator gets no block back which
    a copy still uses.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple

import torch

from raysharding.distributed.comm import FailureFlag, device_module, is_accelerator, wait_for_event
from raysharding.distributed.transfer.bucket_plan import ALIGNMENT_BYTES, Bucket, BucketPlan, Segment
from raysharding.distributed.transfer.buffers import LocalShards, Slot
from raysharding.distributed.transfer.memory import MemoryPeak
from raysharding.distributed.transfer.sources import Job, Request, TensorSource, as_memory
from raysharding.distributed.transfer.transport import BucketTransfer, BucketTransport

_LOOK_S = 1.0
"""Seconds between two checks for progress of a slow disk."""
_END_S = 5.0
"""Longest wait for the reading thread to end."""


class _Staged(NamedTuple):
    """A segment that is read into a buffer."""

    segment: Segment
    first: int
    """First byte in the buffer."""
    alone: bool
    """True if only this rank needs it."""


@dataclass
class ReadAhead:
    """Threads that fill the ring; a context manager that ends them.

    After an error they continue to release buckets, unread, until their rank stops: other ranks wait for its messages.
    The threads are daemons: a read that hangs on a dead file system must not prevent the exit of the process.
    """

    plan: BucketPlan
    source: TensorSource
    transport: BucketTransport
    local_shards: LocalShards
    slots: Sequence[Slot]
    device: torch.device
    num_threads: int = 1
    """Jobs that run at once."""
    error: Exception | None = None
    """The first error of a read."""
    read_s: float = 0.0
    """Seconds of reading, of one thread on average."""

    def __post_init__(self) -> None:
        self._stream = device_module(self.device).Stream(self.device) if is_accelerator(self.device) else None
        # `copied` of the buckets that were taken last; in the slots may already be those of later buckets.
        self._copied: deque[torch.Event] = deque(maxlen=len(self.slots))
        self._free = threading.Semaphore(len(self.slots))  # buffers that may be read into
        self._filled = [threading.Event() for _ in self.slots]
        self._num_left = [0 for _ in self.slots]  # jobs of the buffer's bucket that have not ended, under `_lock`
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._stopped = False
        self._taken = 0
        make = partial(threading.Thread, daemon=True)
        self._thread = make(target=self._run, args=(self._offer,), name="raysharding-read-ahead")
        # Without a device the first thread reads, too: beside few readers, one that only waits would cost more.
        num_others = self.num_threads - (self._stream is None)
        self._readers = [make(target=self._run, args=(self._work,), name="raysharding-read") for _ in range(num_others)]

    def __enter__(self) -> ReadAhead:
        if self._stream is not None:
            # Wait for kernels that still write to the shards.
            self._stream.wait_stream(device_module(self.device).current_stream(self.device))
        for thread in (*self._readers, self._thread):
            thread.start()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self._stopped = True
        self._free.release()  # the offering thread may wait for a buffer; it looks at `_stopped` next
        # A read of a local file ends by itself; the timeout is for a file system that hangs.
        until = monotonic() + _END_S
        self._thread.join(_END_S)  # first, so that it offers no job behind the readers' ends
        for _ in (*self._readers, self._thread):
            self._jobs.put(None)
        for thread in self._readers:
            thread.join(max(0.0, until - monotonic()))  # it holds the memory that it read into last
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
            # The bucket before in this slot. Its copy waits for `Slot.sent`, and so for other ranks; the offering
            # thread waits for the copy, without a deadline. Waited for here, too, a hang of another rank is not
            # reported as that of the disk.
            wait_for_event(self._copied[0], timeout_s)
        self._wait(timeout_s, reading)
        copied = self.slots[self._taken % len(self.slots)].copied
        self._taken += 1
        if copied is not None:
            self._copied.append(copied)
            device_module(self.device).current_stream(self.device).wait_event(copied)

    def _wait(self, timeout_s: float, reading: Callable[[int], None]) -> None:
        filled = self._filled[self._taken % len(self.slots)]
        first = seen = self.source.num_bytes_read
        since = monotonic()
        while not filled.wait(min(_LOOK_S, timeout_s)):
            if (now := self.source.num_bytes_read) > seen:
                seen, since = now, monotonic()
                reading(seen - first)
            elif monotonic() - since >= timeout_s:
                raise TimeoutError(f"nothing was read for {timeout_s:.0f} s: the checkpoint's disk stalls")
        filled.clear()

    def release(self, index: int) -> None:
        """Release the buffer of bucket `index`, which was sent and placed."""
        if self._stream is not None:
            # `Work.wait` of NCCL lets the current stream wait, not the host: this event comes after the messages.
            slot = self.slots[index % len(self.slots)]
            slot.sent = device_module(self.device).Event()
            slot.sent.record()
        self._free.release()

    def _run(self, target: Callable[[], None]) -> None:
        if self._stream is not None:
            # The current device is thread-local: the first use of device 0 by this thread would make a context there.
            device_module(self.device).set_device(self.device)
        target()

    def _offer(self) -> None:
        """Split one bucket after the other into jobs, which are offered once the bucket's buffer is free."""
        for index, bucket in enumerate(self.plan):
            slot = self.slots[index % len(self.slots)]
            jobs: list[Job] = []
            with self._catching():
                jobs = self._split(index, bucket, slot)
            self._free.acquire()
            if self._stopped:
                return
            with self._catching():
                self._wait_for_copies(slot)
            jobs = jobs or [lambda: None]
            self._num_left[index % len(self.slots)] = len(jobs)
            for job in jobs:
                self._jobs.put((index, job))
            if self._stream is None:
                with suppress(queue.Empty):
                    self._work(block=False)

    def _wait_for_copies(self, slot: Slot) -> None:
        """Wait until a buffer may be read into, and let copies wait until its bytes on the device were sent."""
        if slot.copied is not None:
            slot.copied.synchronize()  # the last copy to the device may still read this buffer
        if self._stream is not None and slot.sent is not None:
            self._stream.wait_event(slot.sent)

    def _work(self, block: bool = True) -> None:
        while (item := self._jobs.get(block)) is not None:
            index, job = item
            started = perf_counter()
            with self._catching():
                if self.error is None and not self._stopped:
                    job()
            with self._lock:
                self.read_s += (perf_counter() - started) / self.num_threads
                self._num_left[index % len(self.slots)] -= 1
                is_last = not self._num_left[index % len(self.slots)]
            if is_last:
                with self._catching():
                    self._record(self.slots[index % len(self.slots)])
                # After the event is in the slot, where `next` reads it; after an error, too: the bucket is sent unread.
                self._filled[index % len(self.slots)].set()

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """Keep the first error for the streaming thread, which exchanges it with the other ranks."""
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - a thread that ended would leave buckets unfilled
            self.error = self.error or raised

    def _record(self, slot: Slot) -> None:
        """Record that a buffer was copied to the device, after all threads have started their copies."""
        if self._stream is not None:
            slot.copied = device_module(self.device).Event()
            slot.copied.record(self._stream)

    def _split(self, index: int, bucket: Bucket, slot: Slot) -> list[Job]:
        """Return the jobs of a bucket."""
        offsets = self.transport.offsets(index, bucket)
        requests: list[Request] = []
        for section in self.transport.reads(index, bucket):
            alone = self.transport.is_alone(index, section)
            for segment in section.segments:
                memory = self.local_shards.memory(segment, "cpu") if alone else None
                if memory is not None:
                    requests.append(self._request(segment, as_memory(memory)))
                    continue
                first = offsets[section.shard_index] + segment.offset
                part = slot.memory[first : first + segment.num_bytes]
                requests.append(self._request(segment, part, _Staged(segment, first, alone)))
        return self.source.jobs(requests, partial(self._copy, slot))

    def _copy(self, slot: Slot, parts: Sequence[Request]) -> None:
        """Copy what was read into a buffer: into the shard, or what other ranks need to the device."""
        sent: list[slice] = []
        with nullcontext() if self._stream is None else device_module(self.device).stream(self._stream):
            for part in parts:
                if part.tag is None or self._stopped:
                    continue  # in the shard; or the load has failed, and its module is on meta again
                segment, first, alone = part.tag
                first += (part.start - segment.start) * part.dtype.itemsize
                piece = slice(first, first + part.memory.nbytes)
                if alone:
                    data = slot.host[piece]
                    if self.local_shards.converts_on_device(segment.tensor):
                        data = slot.wire[piece].copy_(data, non_blocking=True)
                    self.local_shards.place(segment._replace(start=part.start, stop=part.stop), data)
                elif sent and 0 <= first - sent[-1].stop < ALIGNMENT_BYTES:
                    sent[-1] = slice(sent[-1].start, piece.stop)  # one copy for small segments, with the padding
                else:
                    sent.append(piece)
            for piece in sent if self._stream is not None else ():
                slot.wire[piece].copy_(slot.host[piece], non_blocking=True)

    def _request(self, segment: Segment, memory: memoryview, staged: _Staged | None = None) -> Request:
        planned = self.plan.tensors[segment.tensor]
        return Request(planned.layout.fqn, segment.start, segment.stop, planned.wire_dtype, memory, staged)


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
    read_s: float = 0.0
    """Seconds of reading files, of one of the threads on average."""
    send_s: float = 0.0
    """Seconds of starting and waiting for messages."""
    place_s: float = 0.0
    """Seconds of copying from buffers into shards."""

    def run(self, source: TensorSource | None, num_threads: int = 1) -> Exception | None:
        """Read, send, receive and place every bucket.

        Args:
            source: Source of the bytes; `None` on a rank that does not read.
            num_threads: Threads that read.

        Returns:
            The first error of this rank. After an error it continues until all ranks agree to stop, so that no rank
            waits for it.
        """
        if source is None:
            return self._run(None)
        shards, slots = self.local_shards, self.slots
        with ReadAhead(self.plan, source, self.transport, shards, slots, self.device, num_threads) as ahead:
            error = self._run(ahead)
        self.read_s = ahead.read_s
        return error

    def _run(self, ahead: ReadAhead | None) -> Exception | None:
        flag = FailureFlag(len(self.plan), self.timeout_s)
        error: Exception | None = None
        for index in range(len(self.plan)):
            error = self._finish(self._start(index, ahead), ahead, error)
            self.peak.sample()
            self.progress(index, self.plan.payload_bytes(index))
            if flag.check(index, failed=error is not None):
                break
        flag.close()
        if is_accelerator(self.device):
            # Copies from `wire` into offloaded shards are asynchronous, and the host reads these shards next.
            wait_for_event(device_module(self.device).current_stream(self.device).record_event(), self.timeout_s)
        return error

    def _start(self, index: int, ahead: ReadAhead | None) -> BucketTransfer:
        if ahead is not None:
            ahead.next(self.timeout_s, partial(self.progress, index))
        transfer = BucketTransfer(index, self.plan[index], self.slots[index % len(self.slots)].wire)
        with self._sending():
            self.transport.start(transfer)
        return transfer

    def _finish(self, transfer: BucketTransfer, ahead: ReadAhead | None, error: Exception | None) -> Exception | None:
        # Every rank makes all calls of the transport, after an error, too: each message has a counterpart elsewhere.
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
        self.send_s += perf_counter() - started

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
            self.place_s += perf_counter() - started
        return None
