"""Sources of a reader: ranges of checkpoint files, read directly into buffers and shards.

Several threads read at a time: one thread reaches neither the rate of a fast disk nor that of the page cache.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from raysharding.checkpoint import Checkpoint, FileReader, TensorInfo
from raysharding.checkpoint.format import Checksums
from raysharding.checkpoint.storage import is_remote
from raysharding.models import Target

Job = Callable[[], None]


class _Batch:
    """Jobs of one `ReadThreads.run`."""

    def __init__(self, num_jobs: int) -> None:
        self._left = num_jobs
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.error: Exception | None = None

    def run(self, job: Job) -> None:
        try:
            if self.error is None:
                job()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = self.error or error
        with self._lock:
            self._left -= 1
            if not self._left:
                self.done.set()


_END_S = 0.2
"""Longest wait for the end of a thread, in seconds; it may hang in a read."""


class ReadThreads:
    """Runs jobs in a few threads, including the caller's; a context manager that ends the other threads.

    The threads are daemons: a read that hangs on a dead file system must not prevent the exit of the process.

    Args:
        num_threads: Number of jobs that run at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Batch, Job] | None] = queue.SimpleQueue()
        make = partial(threading.Thread, target=self._work, name="raysharding-read", daemon=True)
        self._others = [make() for _ in range(num_threads - 1)]
        for thread in self._others:
            thread.start()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs and wait for them; raises the first error of a job."""
        if not self._others:
            for job in jobs:
                job()
            return
        batch = _Batch(len(jobs))
        for job in jobs[1:]:
            self._jobs.put((batch, job))
        for job in jobs[:1]:
            batch.run(job)
            self._help()
            batch.done.wait()
        if batch.error is not None:
            raise batch.error

    def _help(self) -> None:
        """Run jobs until none is left."""
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            if item is None:  # closed while it ran, after a read that stalled: the end of another thread
                self._jobs.put(None)
                return
            item[0].run(item[1])

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            item[0].run(item[1])

    def __enter__(self) -> ReadThreads:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in self._others:
            self._jobs.put(None)
        for thread in self._others:
            thread.join(_END_S)  # it holds the memory that it read into last


JOB_BYTES = 4 << 20
"""Bytes per job; a read call, and a job of several calls, ends when it reaches this."""
LOCAL_GAP_BYTES = 0
REMOTE_GAP_BYTES = 256 << 10
"""Ranges of a remote file that are closer than this are read by one request, including the gap, because a request takes
as long as that many bytes. A local read has no such cost."""
MAX_OVERREAD = 1.0625
"""Bytes of a request to a store ÷ bytes wanted of it; gaps that would make it more are not read."""
PIECE_BYTES = 16 << 20
"""A longer range of a local file is read in pieces, so that a slow disk reports progress."""
SCRATCH_BYTES = 4 << 20
"""Size of the scratch buffer for values whose dtype in the file is wider than on the wire."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a 1-D contiguous tensor as uint8."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a 1-D contiguous CPU tensor."""
    memory: memoryview = as_bytes(tensor).numpy().data
    return memory


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the dtype on the wire: the narrower of file and module dtype; the file's if they are equally wide."""
    return target if target.itemsize < source.itemsize else source


class Extent(NamedTuple):
    """A range of a tensor that is contiguous in one file."""

    start: int
    """First element, in the flattened tensor."""
    num_elements: int
    """Length."""
    file: int
    """Index into the checkpoint's files."""
    offset: int
    """First byte, from the start of the file."""
    key: str
    """Checkpoint key of the bytes."""
    key_offset: int
    """First byte of the key's tensor in the file."""
    dtype: torch.dtype
    """dtype in the file."""


_Piece = tuple[int, int, memoryview, Extent]
"""(file, first byte, destination, extent)."""
_Part = tuple[Extent, "Request"]
"""An extent, and what is requested of it."""
Extents = tuple[Extent, ...] | None
"""Extents of a tensor, ascending; `None` if rank 0 computes it by transformers' operations."""


def extents_of(checkpoint: Checkpoint, target: Target) -> Extents:
    """Return the extents of a target in the files."""
    if target.runs is None:
        return None
    extents = []
    for run in target.runs:
        info = checkpoint.tensors[run.source]
        offset = info.offset + run.source_start * info.dtype.itemsize
        extents.append(
            Extent(run.target_start, run.num_elements, info.file, offset, run.source, info.offset, info.dtype)
        )
    return tuple(extents)


def extents_to_json(extents: Extents) -> Any:
    """Encode as JSON."""
    if extents is None:
        return None
    return [(*extent[:-1], str(extent.dtype).removeprefix("torch.")) for extent in extents]


def extents_from_json(value: Any) -> Extents:
    """Undo `extents_to_json`."""
    if value is None:
        return None
    return tuple(Extent._make((*fields, getattr(torch, dtype))) for *fields, dtype in value)


class Request(NamedTuple):
    """A range of a tensor, and the memory for its bytes."""

    fqn: str
    """The tensor."""
    start: int
    """First element, in the flattened tensor."""
    stop: int
    """One past the last element."""
    dtype: torch.dtype
    """dtype of the bytes in memory."""
    memory: memoryview
    """Writable memory of the size of the elements in `dtype`."""


@dataclass
class TensorSource(ABC):
    """Reads ranges of full tensors through their extents, or through transformers' own operations.

    A tensor with extents is read range by range, never as a whole. A tensor without extents (a transpose, a RoPE
    permutation) is converted as a whole, once, on rank 0, and cached.
    """

    tensors: Mapping[str, TensorInfo]
    """Tensors of the checkpoint; needed only on rank 0."""
    extents: Mapping[str, Extents]
    """FQN → extents."""
    targets: Mapping[str, Target]
    """FQN → target; needed only for conversions."""
    cache_bytes: int
    """Size of the cache of converted targets: that of a bucket, whose sections request ranges in turn."""
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @property
    @abstractmethod
    def num_bytes_read(self) -> int:
        """Bytes read so far."""

    def read(self, requests: Iterable[Request]) -> None:
        """Fill the memory of every request.

        Raises:
            CheckpointError: A file is unreadable.
            PlanError: A value of a state dict changed since the plan.
        """
        parts: list[_Part] = []
        computed: dict[str, list[Request]] = {}
        for request in requests:
            extents = self.extents[request.fqn]
            if extents is None:
                computed.setdefault(request.fqn, []).append(request)
                continue
            for extent, start, stop in overlaps(extents, request.start, request.stop):
                first, last = ((end - request.start) * request.dtype.itemsize for end in (start, stop))
                part = request._replace(start=start, stop=stop, memory=request.memory[first:last])
                parts.append((extent, part))
        self._read_parts(parts)
        for fqn, wanted in computed.items():  # one after the other: each is computed once
            whole = self._converted(fqn)
            for request in wanted:
                torch.frombuffer(request.memory, dtype=request.dtype).copy_(whole[request.start : request.stop])

    @abstractmethod
    def _read_parts(self, parts: Sequence[_Part]) -> None:
        """Fill the memory of requests that lie in one extent each."""

    @abstractmethod
    def _read_whole(self, key: str) -> torch.Tensor:
        """Return the full tensor of a checkpoint key, on the CPU."""

    def _converted(self, fqn: str) -> torch.Tensor:
        """Return the flattened value that transformers' operations compute, on the CPU."""
        if fqn not in self._kept:
            target = self.targets[fqn]
            num_bytes = prod(target.shape) * target.source_dtype.itemsize
            # Evict the oldest, before the next one is computed.
            while self._kept and num_bytes + sum(value.nbytes for value in self._kept.values()) > self.cache_bytes:
                del self._kept[next(iter(self._kept))]
            self._kept[fqn] = target.convert(self._read_whole).reshape(-1)
        return self._kept[fqn]


@dataclass
class CheckpointSource(TensorSource):
    """Tensors of checkpoint files; ranges that are close in a file take one call."""

    reader: FileReader
    """Reads the files."""
    checksums: Checksums | None = None
    """Receives all bytes that are read."""
    threads: ReadThreads = field(default_factory=lambda: ReadThreads(1))
    """Run the reads. Default: one read at a time."""

    def __post_init__(self) -> None:
        self._remote = [is_remote(file.path) for file in self.reader.files]

    @property
    def num_bytes_read(self) -> int:
        """See `TensorSource`."""
        return self.reader.num_bytes_read

    def _read_parts(self, parts: Sequence[_Part]) -> None:
        pieces: list[_Piece] = []
        for extent, part in parts:
            offset = extent.offset + (part.start - extent.start) * extent.dtype.itemsize
            if extent.dtype != part.dtype:
                self._read_narrowing(extent, offset, torch.frombuffer(part.memory, dtype=part.dtype))
                continue
            step = part.memory.nbytes if self._remote[extent.file] else PIECE_BYTES
            pieces += [
                (extent.file, offset + done, part.memory[done : done + step], extent)
                for done in range(0, part.memory.nbytes, step)
            ]
        pieces.sort(key=lambda piece: piece[:2])
        self._read_pieces(pieces)

    def _read_pieces(self, pieces: Sequence[_Piece]) -> None:
        """Read sorted pieces, adjacent ones by one call, with several calls at once."""
        jobs: list[list[Sequence[_Piece]]] = []
        num_bytes = 0
        for file, found in self._ranges(pieces):
            if not jobs or num_bytes >= JOB_BYTES or self._remote[file] or file != jobs[-1][0][0][0]:
                jobs.append([])
                num_bytes = 0
            jobs[-1].append(found)
            num_bytes += sum(piece[2].nbytes for piece in found)
        self.threads.run([partial(self._read_ranges, job) for job in jobs])

    def _ranges(self, pieces: Sequence[_Piece]) -> Iterator[tuple[int, Sequence[_Piece]]]:
        """Yield (file, pieces that are close in it), each of up to `JOB_BYTES`."""
        first = 0
        while first < len(pieces):
            file, start, memory, _ = pieces[first]
            end, last = start + memory.nbytes, first + 1
            gap = REMOTE_GAP_BYTES if self._remote[file] else LOCAL_GAP_BYTES
            wanted = memory.nbytes
            while last < len(pieces) and end - start < JOB_BYTES:
                next_file, offset, memory, _ = pieces[last]
                wanted += memory.nbytes
                is_close = 0 <= offset - end <= gap and offset + memory.nbytes - start <= MAX_OVERREAD * wanted
                if next_file != file or not is_close:
                    break
                end = offset + memory.nbytes
                last += 1
            yield file, pieces[first:last]
            first = last

    def _read_ranges(self, ranges: Sequence[Sequence[_Piece]]) -> None:
        """Read some ranges of one file."""
        self.reader.read_ranges(ranges[0][0][0], [(pieces[0][1], _views(pieces)) for pieces in ranges])
        if self.checksums is not None:
            for _, offset, memory, extent in chain.from_iterable(ranges):
                self.checksums.add(extent.key, offset - extent.key_offset, memory)

    def _read_narrowing(self, extent: Extent, offset: int, out: torch.Tensor) -> None:
        """Read elements that are wider in the file than on the wire."""
        step = SCRATCH_BYTES // extent.dtype.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=extent.dtype)
        for done in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - done)]
            first = offset + done * extent.dtype.itemsize
            self.reader.read_into(extent.file, first, as_bytes(part))
            if self.checksums is not None:
                self.checksums.add(extent.key, first - extent.key_offset, as_memory(part))
            out[done : done + part.numel()].copy_(part)

    def _read_whole(self, key: str) -> torch.Tensor:
        value = self.reader.read_tensor(self.tensors[key])
        if self.checksums is not None:
            self.checksums.add(key, 0, as_memory(value.reshape(-1)))
        return value


def _views(pieces: Sequence[_Piece]) -> list[memoryview]:
    """Return the memory of pieces that are close in a file, and scratch memory for the gaps."""
    views: list[memoryview] = []
    end = pieces[0][1]
    for _, offset, memory, _ in pieces:
        if offset > end:
            views.append(memoryview(bytearray(offset - end)))
        views.append(memory)
        end = offset + memory.nbytes
    return views


_start = attrgetter("start")


def overlaps(extents: Sequence[Extent], start: int, stop: int) -> Iterable[tuple[Extent, int, int]]:
    """Return the extents of elements `start` to `stop`, with the range in each."""
    index = bisect_right(extents, start, key=_start) - 1
    while start < stop:
        extent = extents[index]
        last = min(stop, extent.start + extent.num_elements)
        yield extent, start, last
        start = last
        index += 1
