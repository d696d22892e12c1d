"""Sources of a reader: ranges of checkpoint files, read directly into buffers and shards.

A source splits what is requested into jobs, which `ReadAhead` runs in several threads: one thread reaches neither the
rate of a fast disk nor that of the page cache.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from raysharding.checkpoint import Checkpoint, FileReader, TensorInfo
from raysharding.checkpoint.format import Checksums
from raysharding.checkpoint.storage import is_remote
from raysharding.models import Target

Job = Callable[[], None]
"""Reads a part of what was requested; jobs of one source run at once unless it says otherwise."""

JOB_BYTES = 4 << 20
"""Bytes per job of several ranges, which ends when it reaches this. For an accelerator, longer ranges of a local file
are read in pieces of this size: many threads share a bucket, and what one has read is in the cache when it is copied.
"""
PIECE_BYTES = 16 << 20
"""A longer range of a local file is read in pieces, so that a slow disk reports progress."""
LOCAL_GAP_BYTES = 0
REMOTE_GAP_BYTES = 256 << 10
"""Ranges of a remote file that are closer than this are read by one request, including the gap, because a request takes
as long as that many bytes. A local read has no such cost."""
MAX_OVERREAD = 1.0625
"""Bytes of a request to a store ÷ bytes wanted of it; gaps that would make it more are not read."""
SCRATCH_BYTES = 1 << 20
"""Size of a thread's scratch buffer for values whose dtype in the file is wider than on the wire; for a remote file
that of a job, because a request takes as long as many bytes."""


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
    """A range of a tensor, and the memory for its bytes; or a part of such a request."""

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
    tag: Any = None
    """Anything of the caller's, which parts of the request keep."""

    def part(self, start: int, stop: int) -> Request:
        """Return the part from element `start` to `stop`."""
        first, last = ((end - self.start) * self.dtype.itemsize for end in (start, stop))
        return self._replace(start=start, stop=stop, memory=self.memory[first:last])


class _FilePiece(NamedTuple):
    """A part of a request that one job reads."""

    file: int
    """Index into the checkpoint's files."""
    offset: int
    """First byte in the file."""
    part: Request
    """The part."""
    extent: Extent
    """The extent that holds it."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return (self.part.stop - self.part.start) * self.extent.dtype.itemsize

    @property
    def narrows(self) -> bool:
        """True if the elements are wider in the file."""
        return self.extent.dtype != self.part.dtype


@dataclass
class TensorSource(ABC):
    """Reads ranges of full tensors through their extents, or through transformers' own operations.

    A tensor with extents is read range by range, never as a whole. A tensor without extents (a transpose, a RoPE
    permutation) is converted as a whole, on rank 0, and the last one is kept: the next bucket may continue it.
    """

    tensors: Mapping[str, TensorInfo]
    """Tensors of the checkpoint; needed only on rank 0."""
    extents: Mapping[str, Extents]
    """FQN → extents."""
    targets: Mapping[str, Target]
    """FQN → target; needed only for conversions."""
    _converted: tuple[str, torch.Tensor] | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    @abstractmethod
    def num_bytes_read(self) -> int:
        """Bytes read so far."""

    def read(self, requests: Iterable[Request]) -> None:
        """Fill the memory of every request, by one job after the other; raises as `jobs`."""
        for job in self.jobs(requests, lambda parts: None):
            job()

    def jobs(self, requests: Iterable[Request], filled: Callable[[Sequence[Request]], None]) -> list[Job]:
        """Return jobs that together fill the memory of every request.

        Args:
            requests: The requests.
            filled: Called by each job at its end, with the parts of requests whose memory it has filled.

        Returns:
            The jobs, which raise CheckpointError if a file is unreadable, and PlanError if a value of a state dict
            changed since the plan.
        """
        parts: list[_Part] = []
        computed: dict[str, list[Request]] = {}
        for request in requests:
            extents = self.extents[request.fqn]
            if extents is None:
                computed.setdefault(request.fqn, []).append(request)
                continue
            parts += [
                (extent, request.part(start, stop))
                for extent, start, stop in overlaps(extents, request.start, request.stop)
            ]
        jobs = self._part_jobs(parts, filled)
        return [*jobs, *(partial(self._compute, fqn, wanted, filled) for fqn, wanted in computed.items())]

    @abstractmethod
    def _part_jobs(self, parts: Sequence[_Part], filled: Callable[[Sequence[Request]], None]) -> list[Job]:
        """Return jobs that fill the memory of requests that lie in one extent each."""

    def _compute(self, fqn: str, wanted: Sequence[Request], filled: Callable[[Sequence[Request]], None]) -> None:
        # One thread at a time: one target is in memory.
        with self._lock:
            if self._converted is None or self._converted[0] != fqn:
                self._converted = None  # before the next one is computed
                self._converted = fqn, self.targets[fqn].convert(self._read_whole).reshape(-1)
            for request in wanted:
                part = self._converted[1][request.start : request.stop]
                torch.frombuffer(request.memory, dtype=request.dtype).copy_(part)
        filled(wanted)

    @abstractmethod
    def _read_whole(self, key: str) -> torch.Tensor:
        """Return the full tensor of a checkpoint key, on the CPU."""


@dataclass
class CheckpointSource(TensorSource):
    """Tensors of checkpoint files; ranges that are close in a file take one call."""

    reader: FileReader
    """Reads the files."""
    checksums: Checksums | None = None
    """Receives all bytes that are read."""
    piece_bytes: int | None = None
    """Longest range of a local file that a job reads at once. Default: `PIECE_BYTES`."""

    def __post_init__(self) -> None:
        self._remote = [is_remote(file.path) for file in self.reader.files]

    @property
    def num_bytes_read(self) -> int:
        """Bytes read so far, over all threads."""
        return self.reader.num_bytes_read

    def _part_jobs(self, parts: Sequence[_Part], filled: Callable[[Sequence[Request]], None]) -> list[Job]:
        """Return jobs for the parts, adjacent ones of a file together."""
        pieces = sorted((piece for extent, part in parts for piece in self._pieces(extent, part)), key=_position)
        jobs: list[list[Sequence[_FilePiece]]] = []
        num_bytes = 0
        for found in self._ranges(pieces):
            file = found[0].file
            if not jobs or num_bytes >= JOB_BYTES or self._remote[file] or file != jobs[-1][0][0].file:
                jobs.append([])
                num_bytes = 0
            jobs[-1].append(found)
            num_bytes += sum(piece.num_bytes for piece in found)
        return [partial(self._read_ranges, job, filled) for job in jobs]

    def _pieces(self, extent: Extent, part: Request) -> Iterator[_FilePiece]:
        size = extent.dtype.itemsize
        step = part.stop - part.start if self._remote[extent.file] else (self.piece_bytes or PIECE_BYTES) // size
        for start in range(part.start, part.stop, step):
            own = part.part(start, min(start + step, part.stop))
            yield _FilePiece(extent.file, extent.offset + (start - extent.start) * size, own, extent)

    def _ranges(self, pieces: Sequence[_FilePiece]) -> Iterator[Sequence[_FilePiece]]:
        """Yield pieces that are close in a file, each time of up to `JOB_BYTES`."""
        first = 0
        while first < len(pieces):
            head, last = pieces[first], first + 1
            end = head.offset + head.num_bytes
            gap = REMOTE_GAP_BYTES if self._remote[head.file] else LOCAL_GAP_BYTES
            wanted = head.num_bytes
            while last < len(pieces) and end - head.offset < JOB_BYTES:
                piece = pieces[last]
                wanted += piece.num_bytes
                next_end = piece.offset + piece.num_bytes
                is_close = 0 <= piece.offset - end <= gap and next_end - head.offset <= MAX_OVERREAD * wanted
                if piece.file != head.file or not is_close or head.narrows or piece.narrows:
                    break
                end = next_end
                last += 1
            yield pieces[first:last]
            first = last

    def _read_ranges(self, ranges: Sequence[Sequence[_FilePiece]], filled: Callable[[Sequence[Request]], None]) -> None:
        """Read some ranges of one file."""
        plain = [pieces for pieces in ranges if not pieces[0].narrows]
        if plain:
            self.reader.read_ranges(plain[0][0].file, [(pieces[0].offset, _views(pieces)) for pieces in plain])
        if self.checksums is not None:
            for piece in chain.from_iterable(plain):
                self.checksums.add(piece.extent.key, piece.offset - piece.extent.key_offset, piece.part.memory)
        for pieces in ranges:
            if pieces[0].narrows:
                self._read_narrowing(pieces[0])
        filled([piece.part for piece in chain.from_iterable(ranges)])

    def _read_narrowing(self, piece: _FilePiece) -> None:
        """Read elements that are wider in the file than on the wire."""
        extent, out = piece.extent, torch.frombuffer(piece.part.memory, dtype=piece.part.dtype)
        step = (JOB_BYTES if self._remote[piece.file] else SCRATCH_BYTES) // extent.dtype.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=extent.dtype)
        for done in range(0, out.numel(), step):
            read = scratch[: min(step, out.numel() - done)]
            first = piece.offset + done * extent.dtype.itemsize
            self.reader.read_into(extent.file, first, as_bytes(read))
            if self.checksums is not None:
                self.checksums.add(extent.key, first - extent.key_offset, as_memory(read))
            out[done : done + read.numel()].copy_(read)

    def _read_whole(self, key: str) -> torch.Tensor:
        value = self.reader.read_tensor(self.tensors[key])
        if self.checksums is not None:
            self.checksums.add(key, 0, as_memory(value.reshape(-1)))
        return value


def _views(pieces: Sequence[_FilePiece]) -> list[memoryview]:
    """Return the memory of pieces that are close in a file, and scratch memory for the gaps."""
    views: list[memoryview] = []
    end = pieces[0].offset
    for piece in pieces:
        if piece.offset > end:
            views.append(memoryview(bytearray(piece.offset - end)))
        views.append(piece.part.memory)
        end = piece.offset + piece.num_bytes
    return views


_position = attrgetter("file", "offset")
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
