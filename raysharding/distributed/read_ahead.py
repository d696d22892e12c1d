"""Rank 0's reading thread: fills the next bucket's buffer while the last one is being sent."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

import torch

from raysharding.distributed.layout import ShardMap
from raysharding.distributed.placing import Placer
from raysharding.distributed.plan import REPLICATED, Bucket, BucketPlan, Section
from raysharding.distributed.source import ElementSource
from raysharding.distributed.transport import OK, BucketTransport, make_ring


@dataclass
class Slot:
    """One buffer of the ring: `host` is read into, `wire` is sent; on the CPU they are one."""

    host: torch.Tensor
    wire: torch.Tensor
    copied: torch.cuda.Event | None = None
    """On a GPU: `wire` holds what `host` held."""
    sent: torch.cuda.Event | None = None
    """On a GPU: the messages and copies out of `wire` are done."""


@dataclass
class FilledBucket:
    """A bucket that was read, or the error that stopped the reading."""

    bucket: Bucket
    slot: Slot
    error: Exception | None


class ReadAhead:
    """Rank 0's thread that fills the ring; a context manager that ends the thread."""

    def __init__(
        self,
        plan: BucketPlan,
        source: ElementSource,
        transport: BucketTransport,
        placer: Placer,
        shards: ShardMap,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._source = source
        self._transport = transport
        self._placer = placer
        self._shards = shards
        self._device = device
        self._free: queue.Queue[Slot | None] = queue.Queue()
        self._filled: queue.Queue[FilledBucket] = queue.Queue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        on_gpu = device.type == "cuda"
        for host in make_ring(transport, plan, torch.device("cpu"), pinned=on_gpu):
            wire = torch.empty_like(host, device=device) if on_gpu else host
            self._free.put(Slot(host, wire))
        self._thread = threading.Thread(target=self._run, name="raysharding-read-ahead", daemon=True)
        self.read_s = 0.0

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._free.put(None)
        # A read of a local file ends by itself; the bound is for a file system that hangs.
        self._thread.join(timeout=5.0)

    def next(self, timeout_s: float) -> FilledBucket:
        """The next bucket, read.

        Raises:
            TimeoutError: When no bucket was read within `timeout_s`.
        """
        try:
            return self._filled.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no bucket was read within {timeout_s:.0f} s: the checkpoint's disk stalls") from None

    def release(self, filled: FilledBucket) -> None:
        """Give a sent bucket's buffer back to the ring."""
        if self._stream is not None:
            # On NCCL a finished wait means queued behind, not done: the copy of the next bucket waits for this event.
            filled.slot.sent = torch.cuda.Event()
            filled.slot.sent.record()
        self._free.put(filled.slot)

    def _run(self) -> None:
        for bucket in self._plan.buckets:
            slot = self._free.get()
            if slot is None:
                return
            started = perf_counter()
            error: Exception | None = None
            try:
                self._fill(bucket, slot)
            except Exception as raised:  # noqa: BLE001 - handed to the sending thread, which tells every rank
                error = raised
            self.read_s += perf_counter() - started
            self._filled.put(FilledBucket(bucket, slot, error))
            if error is not None:
                return

    def _fill(self, bucket: Bucket, slot: Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()  # the last copy to the device still reads this buffer
        for section in bucket.sections:
            slot.host[section.offset] = OK
            if self.reads_into_shard(section):
                self._read_own(section)
            elif self._wanted(section):
                self._read_section(section, slot.host)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                if slot.sent is not None:
                    self._stream.wait_event(slot.sent)
                slot.wire[: bucket.num_bytes].copy_(slot.host[: bucket.num_bytes], non_blocking=True)
                slot.copied = torch.cuda.Event()
                slot.copied.record(self._stream)

    def _wanted(self, section: Section) -> bool:
        own = section.shard_index in (self._shards.shard_index, REPLICATED)
        return own or self._transport.needs_buffer(section)

    def reads_into_shard(self, section: Section) -> bool:
        """Whether a section is rank 0's alone and its shards are in host memory: then no buffer is needed."""
        own = section.shard_index in (self._shards.shard_index, REPLICATED)
        return own and self._device.type == "cpu" and not self._transport.needs_buffer(section)

    def _read_section(self, section: Section, buffer: torch.Tensor) -> None:
        for segment in section.segments:
            start = section.offset + segment.offset
            planned = self._plan.tensors[segment.tensor]
            out = buffer[start : start + segment.num_bytes].view(planned.wire_dtype)
            self._source.read(planned.layout.fqn, segment.start, segment.stop, out)

    def _read_own(self, section: Section) -> None:
        for segment in section.segments:
            planned = self._plan.tensors[segment.tensor]
            memory = self._placer.memory(segment, "cpu")
            data = torch.empty(segment.num_bytes, dtype=torch.uint8) if memory is None else memory
            self._source.read(planned.layout.fqn, segment.start, segment.stop, data.view(planned.wire_dtype))
            if memory is None:
                self._placer.place(segment, data)
