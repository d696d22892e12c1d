"""A reader's thread: fills the next bucket's buffer, and shards that nobody else needs, while messages travel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from types import TracebackType

import torch

from raysharding.distributed.placing import Placer
from raysharding.distributed.plan import Bucket, BucketPlan, Segment
from raysharding.distributed.ring import Slot
from raysharding.distributed.source import ElementSource, Request, as_memory
from raysharding.distributed.transport import BucketTransport

_LOOK_S = 1.0
"""Time between two looks at whether a slow disk gives bytes."""


class ReadAhead:
    """The thread that fills the ring; a context manager that ends the thread.

    After an error it goes on to hand out buckets, unread, until its rank stops: the others have receives for them.
    """

    def __init__(
        self,
        plan: BucketPlan,
        source: ElementSource,
        transport: BucketTransport,
        placer: Placer,
        slots: Sequence[Slot],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._source = source
        self._transport = transport
        self._placer = placer
        self._slots = slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free = threading.Semaphore(len(slots))
        self._filled: queue.Queue[int] = queue.Queue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="raysharding-read-ahead", daemon=True)
        self.error: Exception | None = None
        self.read_s = 0.0

    def __enter__(self) -> ReadAhead:
        if self._stream is not None:
            # Kernels that still write to the shards' memory come first.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped = True
        self._free.release()
        # A read of a local file ends by itself; the bound is for a file system that hangs.
        self._thread.join(timeout=5.0)
        if self._stream is not None:
            self._stream.synchronize()  # shards that are filled by this stream are complete

    def next(self, timeout_s: float, reading: Callable[[int], None]) -> None:
        """Wait until the next bucket was read, or given up.

        Args:
            timeout_s: Longest wait for a byte.
            reading: Called now and then, while bytes come, with how many came since the wait began.

        Raises:
            TimeoutError: When nothing was read for `timeout_s`.
        """
        index = self._wait(timeout_s, reading)
        copied = self._slots[index % len(self._slots)].copied
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def _wait(self, timeout_s: float, reading: Callable[[int], None]) -> int:
        first = seen = self._source.num_bytes_read
        since = monotonic()
        while True:
            try:
                return self._filled.get(timeout=min(_LOOK_S, timeout_s))
            except queue.Empty:
                if (now := self._source.num_bytes_read) > seen:
                    seen, since = now, monotonic()
                    reading(seen - first)
                elif monotonic() - since >= timeout_s:
                    what = f"nothing was read for {timeout_s:.0f} s: the checkpoint's disk stalls"
                    raise TimeoutError(what) from None

    def release(self, index: int) -> None:
        """Bucket `index` was sent and placed: its buffer may be filled again."""
        if self._stream is not None:
            # On NCCL a finished wait means queued behind, not done: the copy of the next bucket waits for this event.
            slot = self._slots[index % len(self._slots)]
            slot.sent = torch.cuda.Event()
            slot.sent.record()
        self._free.release()

    def _run(self) -> None:
        for index, bucket in enumerate(self._plan.buckets):
            self._free.acquire()
            if self._stopped:
                return
            started = perf_counter()
            if self.error is None:
                try:
                    self._fill(index, bucket, self._slots[index % len(self._slots)])
                except Exception as raised:  # noqa: BLE001 - handed to the streaming thread, which tells every rank
                    self.error = raised
            self.read_s += perf_counter() - started
            self._filled.put(index)

    def _fill(self, index: int, bucket: Bucket, slot: Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()  # the last copy to the device still reads this buffer
        offsets = self._transport.offsets(index, bucket)
        requests: list[Request] = []
        staged: list[tuple[Segment, torch.Tensor]] = []
        sent: list[slice] = []
        for section in self._transport.reads(index, bucket):
            first = offsets[section.shard_index]
            alone = self._transport.is_alone(index, section)
            if not alone:
                sent.append(slice(first, first + section.num_bytes))
            for segment in section.segments:
                if alone and self._placer.lands(segment, "cpu"):
                    requests.append(self._request(segment, as_memory(self._placer.values(segment))))
                    continue
                part = slice(first + segment.offset, first + segment.offset + segment.num_bytes)
                requests.append(self._request(segment, slot.memory[part]))
                if alone:
                    staged.append((segment, slot.host[part]))
        self._source.read(requests)
        if self._stream is None:
            self._place(staged)
        else:
            self._copy_to_device(self._stream, slot, sent, staged)

    def _place(self, staged: Sequence[tuple[Segment, torch.Tensor]]) -> None:
        for segment, data in staged:
            self._placer.place(segment, data)

    def _copy_to_device(
        self,
        stream: torch.cuda.Stream,
        slot: Slot,
        sent: Sequence[slice],
        staged: Sequence[tuple[Segment, torch.Tensor]],
    ) -> None:
        with torch.cuda.stream(stream):
            if slot.sent is not None:
                stream.wait_event(slot.sent)
            for part in sent:
                slot.wire[part].copy_(slot.host[part], non_blocking=True)
            self._place(staged)
            slot.copied = torch.cuda.Event()
            slot.copied.record(stream)

    def _request(self, segment: Segment, memory: memoryview) -> Request:
        planned = self._plan.tensors[segment.tensor]
        return Request(planned.layout.fqn, segment.start, segment.stop, planned.wire_dtype, memory)
