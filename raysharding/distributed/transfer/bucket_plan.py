"""The bucket plan: which ranges of tensors are sent together. Pure arithmetic on layouts, the same on every rank.

Note: buckets, sections, messages.
    A *bucket* is the unit of transfer. It has a *section* per shard index, so that every bucket involves all ranks, and
    a section for data that all ranks need (buffers, 0-dim parameters). A section holds its small segments, packed into
    one message, followed by its large segments, each a message of its own that can be received directly into the shard.

    Tensors are planned in the given order (for a load: file order, so that the disk reads forward). A tensor that does
    not fit into the rest of a bucket continues in the next: bucket k then holds the k-th column of each of its shards.

Note: the default of 32 MiB.
    A bucket is read while the one before is sent, so the memory is two buckets, 64 MiB. Each bucket costs every rank a
    few messages and wake-ups, about 0.5 ms together: 5 % of the 10 ms that 32 MiB take from page cache, 2 % of those
    from a disk of 1 GB/s; half the size doubled the loss (warm, 4 ranks, 2 cores: 0.6 s at 32 MiB, 0.8 s at 16). A
    network of 50 GB/s needs 0.6 ms for a bucket: there the file is the limit, and a larger `bucket_bytes` helps only
    sources in memory. At W = 64 a section is 0.5 MiB, still ten times the cost of a message. If each rank reads
    directly into its shard, nothing is buffered, and a bucket of 64 MiB is only the interval of progress reports and
    failure checks. Other sizes:
    `python -m tests.bench.loading --loading '{"bucket_bytes": ...}'`.

`plan_in_order` plans tensors from their first element to their last, for files that are written in order.
`plan_buckets` involves every shard in each bucket, and so transfers a tensor by columns, but streams into an object
store take bytes in order only. A bucket of `plan_in_order` is a range of the concatenated tensors, whichever ranks hold
it. Several ranks write files at different places at a time, so that several ranks also send.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from raysharding.distributed.fully_shard import TensorLayout
from raysharding.units import MIB

BUCKET_BYTES = 32 * MIB
"""Default size of a bucket; the note above has the measurements."""
STRAIGHT_BYTES = 64 * MIB
"""Default size of a rank's part of a bucket that is read directly into its shard, without a buffer."""
ALIGNMENT_BYTES = 16
"""Segments start at multiples of this, so that a slice of a buffer can be viewed as any dtype."""
DIRECT_BYTES = 256 << 10
"""Segments of at least this size are messages of their own."""
REPLICATED = -1
"""Shard index of the section that every rank needs."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to transfer."""

    layout: TensorLayout
    """Layout of its elements in the module."""
    wire_dtype: torch.dtype
    """dtype of the elements on the wire."""


class Segment(NamedTuple):
    """A contiguous range of one tensor inside a section."""

    tensor: int
    """Index into `BucketPlan.tensors`."""
    start: int
    """First element, in the flattened global tensor."""
    stop: int
    """One past the last element."""
    offset: int
    """First byte, from the start of the section."""
    num_bytes: int
    """Length on the wire."""


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a bucket for one shard index."""

    shard_index: int
    """The shard, or `REPLICATED`."""
    offset: int
    """First byte in the bucket; a multiple of `ALIGNMENT_BYTES`."""
    packed_bytes: int
    """Length of the first message, which has the small segments; 0 if there are none."""
    num_bytes: int
    """Length of the whole section."""
    packed: tuple[Segment, ...]
    """Small segments; none are listed for an unwanted shard."""
    direct: tuple[Segment, ...]
    """Large segments, each its own message; none are listed for an unwanted shard."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, in order of their offset."""
        return self.packed + self.direct

    @property
    def messages(self) -> list[tuple[int, int, Segment | None]]:
        """(first byte in the section, length, large segment or `None` for the packed part) of each message."""
        packed: list[tuple[int, int, Segment | None]] = [(0, self.packed_bytes, None)] if self.packed_bytes else []
        return packed + [(item.offset, item.num_bytes, item) for item in self.direct]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Contents of one buffer."""

    sections: tuple[Section, ...]
    """Sections that are not empty, by shard index, then the replicated one."""
    num_bytes: int
    """Bytes of all sections together, padding included."""
    payload_bytes: int
    """Bytes of all segments, those of unwanted shards included."""


class Cut(NamedTuple):
    """Part of a tensor in a bucket: the same elements of every shard that is long enough, or a range of the tensor."""

    tensor: int
    """Index into `BucketPlan.tensors`."""
    first: int
    """First element, counted from the start of each shard; in order, from the start of the tensor."""
    length: int
    """Elements, of a shard that is long enough; in order, over all shards."""
    payload_bytes: int
    """Bytes on the wire, over all shards."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _OpenSection:
    """A section under construction; offsets are relative to the small and the large part."""

    is_wanted: bool
    packed: list[Segment] = field(default_factory=list)
    direct: list[Segment] = field(default_factory=list)
    packed_bytes: int = 0
    direct_bytes: int = 0

    def add(self, tensor: int, start: int, stop: int, itemsize: int) -> None:
        num_bytes = (stop - start) * itemsize
        if num_bytes >= DIRECT_BYTES:
            if self.is_wanted:
                self.direct.append(Segment(tensor, start, stop, self.direct_bytes, num_bytes))
            self.direct_bytes += _aligned(num_bytes)
        else:
            if self.is_wanted:
                self.packed.append(Segment(tensor, start, stop, self.packed_bytes, num_bytes))
            self.packed_bytes += _aligned(num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.packed_bytes + self.direct_bytes

    def close(self, shard_index: int, offset: int) -> Section:
        moved = tuple(self.direct)
        if self.packed_bytes:
            moved = tuple(item._replace(offset=item.offset + self.packed_bytes) for item in self.direct)
        return Section(shard_index, offset, self.packed_bytes, self.num_bytes, tuple(self.packed), moved)


_NUM_KEPT = 16
"""Made buckets that are kept: more than are in flight at once, and all of a small plan."""


@dataclass(eq=False)
class BucketPlan:
    """The buckets of a transfer in order, each made on access; the last few are kept.

    All buckets of 140 GB on 64 ranks, with 64 sections each, would take more memory than the ring; cuts take little.
    """

    tensors: Sequence[PlannedTensor]
    """The tensors, in the order of transfer."""
    cuts: Sequence[Sequence[Cut]]
    """Parts of tensors in each bucket."""
    num_shards: int
    """Number of shard indices."""
    wanted: Container[int]
    """Shard indices whose segments are listed."""
    max_bucket_bytes: int
    """Size of the largest bucket, and of a buffer of the ring."""
    num_first_buckets: int
    """Number of buckets that hold the first tensors."""
    in_order: bool = False
    """True if cuts are ranges of the flattened full tensors."""

    def __post_init__(self) -> None:
        self._made = lru_cache(_NUM_KEPT)(self._make)

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> Bucket:
        return self._made(range(len(self))[index])

    def __iter__(self) -> Iterator[Bucket]:
        return map(self._made, range(len(self)))

    def last_tensor(self, index: int) -> PlannedTensor:
        """Return the last tensor with elements in bucket `index`."""
        return self.tensors[self.cuts[index][-1].tensor]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, once each, in their wire dtype."""
        return sum(item.layout.num_elements * item.wire_dtype.itemsize for item in self.tensors)

    def payload_bytes(self, index: int) -> int:
        """Return the bytes of all segments of bucket `index`, without making it."""
        return sum(cut.payload_bytes for cut in self.cuts[index])

    def _make(self, index: int) -> Bucket:
        shards = [_OpenSection(shard in self.wanted) for shard in range(self.num_shards)]
        replicated = _OpenSection(is_wanted=True)
        for cut in self.cuts[index]:
            planned = self.tensors[cut.tensor]
            open_sections = shards if planned.layout.num_shards else [replicated]
            for section, (start, stop) in zip(open_sections, planned.layout.ranges(), strict=True):
                begin = cut.first if self.in_order else start + cut.first
                first, last = max(start, begin), min(stop, begin + cut.length)
                if first < last:
                    section.add(cut.tensor, first, last, planned.wire_dtype.itemsize)
        sections: list[Section] = []
        offset = 0
        for shard_index, part in [*enumerate(shards), (REPLICATED, replicated)]:
            if part.num_bytes:
                sections.append(part.close(shard_index, offset))
                offset += part.num_bytes
        return Bucket(tuple(sections), offset, self.payload_bytes(index))


class _Cutter:
    """Fills buckets one after the other with columns of shards."""

    def __init__(self, num_shards: int, bucket_bytes: int) -> None:
        self.buckets: list[list[Cut]] = []
        self.max_bucket_bytes = 0
        self._num_shards = num_shards
        # Space for an element of any dtype in every section.
        self._bucket_bytes = max(bucket_bytes, (num_shards + 1) * 4 * ALIGNMENT_BYTES)
        self._open()

    def _open(self) -> None:
        self._cuts: list[Cut] = []
        self._longest = _OpenSection(is_wanted=False)
        self._replicated = _OpenSection(is_wanted=False)

    @property
    def _used_bytes(self) -> int:
        # Shard 0 is never shorter than another.
        return self._num_shards * self._longest.num_bytes + self._replicated.num_bytes

    def _room(self, itemsize: int, parts: int) -> int:
        """Return the number of elements that still fit into each of `parts` sections."""
        free = (self._bucket_bytes - self._used_bytes) // parts // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return max(free, 0) // itemsize

    def close(self) -> None:
        """End the current bucket unless it is empty."""
        if self._cuts:
            self.buckets.append(self._cuts)
            self.max_bucket_bytes = max(self.max_bucket_bytes, self._used_bytes)
            self._open()

    def add(self, index: int, layout: TensorLayout, itemsize: int) -> None:
        assert layout.num_shards in (0, self._num_shards), f"{layout.fqn}: cut over another number of ranks"
        parts = max(layout.num_shards, 1)
        longest, total = layout.local_range(0)[1], layout.num_elements
        done = 0
        while done < longest:
            room = self._room(itemsize, parts)
            rest = longest - done
            # Start a new bucket instead of a very small segment in this one.
            if room < rest and room * itemsize < min(DIRECT_BYTES, self._bucket_bytes // (2 * parts)):
                self.close()
                room = self._room(itemsize, parts)
            take = min(room, rest)
            assert take > 0, "an empty bucket has space for at least one element"
            section = self._longest if layout.num_shards else self._replicated
            section.add(index, done, done + take, itemsize)
            # Of the shards, some have full length, and one may end early.
            short = min(max(total % longest - done, 0), take)
            self._cuts.append(Cut(index, done, take, (total // longest * take + short) * itemsize))
            done += take


def plan_buckets(
    tensors: Sequence[PlannedTensor],
    num_shards: int,
    bucket_bytes: int,
    num_first: int | None = None,
    wanted: Container[int] | None = None,
    rest_bytes: int | None = None,
) -> BucketPlan:
    """Cut tensors into buckets of at most `bucket_bytes`.

    Args:
        tensors: The tensors, in the order of transfer.
        num_shards: Number of shard indices; every sharded layout must have this `num_shards`.
        bucket_bytes: Upper bound of a bucket, all sections and padding included.
        num_first: Number of first tensors that share no bucket with later ones. Default: all.
        wanted: Shard indices whose segments are listed. Others have only lengths, which saves most of the time of a
            plan for many ranks. Default: all.
        rest_bytes: Upper bound of a bucket after the first `num_first` tensors. Default: `bucket_bytes`.

    Returns:
        The plan, equal on all ranks with equal arguments, except for unwanted segments.
    """
    num_first = len(tensors) if num_first is None else num_first
    first, rest = _Cutter(num_shards, bucket_bytes), _Cutter(num_shards, rest_bytes or bucket_bytes)
    for index, planned in enumerate(tensors):
        cutter = first if index < num_first else rest
        cutter.add(index, planned.layout, planned.wire_dtype.itemsize)
    first.close()
    rest.close()
    wanted = range(num_shards) if wanted is None else wanted
    largest = max(first.max_bucket_bytes, rest.max_bucket_bytes)
    return BucketPlan(tensors, first.buckets + rest.buckets, num_shards, wanted, largest, len(first.buckets))


def plan_in_order(tensors: Sequence[PlannedTensor], num_shards: int, bucket_bytes: int) -> BucketPlan:
    """Cut tensors into buckets that are consecutive ranges of the concatenated tensors.

    Args:
        tensors: The tensors, in the order of the file.
        num_shards: Number of shard indices.
        bucket_bytes: Largest payload of a bucket; a larger element is a bucket of its own.
    """
    cuts: list[list[Cut]] = []
    room = 0
    for index, planned in enumerate(tensors):
        itemsize, first = planned.wire_dtype.itemsize, 0
        while first < planned.layout.num_elements:
            if room < itemsize:
                cuts.append([])
                room = bucket_bytes
            take = min(planned.layout.num_elements - first, max(room // itemsize, 1))
            cuts[-1].append(Cut(index, first, take, take * itemsize))
            first, room = first + take, room - take * itemsize
    # Each range of a shard may be padded.
    padding = max(num_shards, 1) * ALIGNMENT_BYTES
    largest = max((sum(cut.payload_bytes + padding for cut in bucket) for bucket in cuts), default=0)
    return BucketPlan(tensors, cuts, num_shards, range(num_shards), largest, len(cuts), in_order=True)
