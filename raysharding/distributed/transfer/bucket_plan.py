"""The bucket plan: which ranges of which tensors travel together. Pure arithmetic on layouts, the same on every rank.

Note: buckets, sections, messages.
    A *bucket* is what moves together. It has a *section* for each shard index, so that a bucket keeps every rank busy,
    and one for what all ranks need (buffers, 0-dim parameters). A section begins with its small segments, packed, and
    ends with its large ones. The packed part is one message; each large segment is a message of its own, because it can
    be received straight into the shard.

    Tensors are taken in the order given (for a load: file order, so that the disk reads forward). A tensor that does
    not fit what is left of a bucket goes on in the next: bucket k then holds the k-th column of every shard of it.

Note: the default of 32 MiB.
    A bucket is read while the one before is on its way, so the memory is two buckets, 64 MiB. Each bucket costs every
    rank a few messages and wake-ups, some 0.5 ms together: 5 % of the 10 ms that 32 MiB take from page cache, 2 % of
    those from a disk of 1 GB/s; half the size doubled the loss (warm, 4 ranks, 2 cores: 0.6 s at 32 MiB, 0.8 s at 16).
    A fabric of 50 GB/s needs 0.6 ms for a bucket: there the file, not the bucket, is the limit, and a larger
    `bucket_bytes` is for those who feed it from memory. At W = 64 a section is 0.5 MiB, still ten times what a message
    costs. Where each rank reads straight into its shard nothing is buffered, and a bucket of 64 MiB is only the step of
    progress and of stopping together. Other sizes: `raysharding bench`, or
    `tests/bench/loading.py --loading '{"bucket_bytes": ...}'`.

A bucket plan that takes tensors from their first element to their last: for a file that is written in order.

`plan_buckets` keeps every shard busy with each bucket, and so brings a tensor in columns; streams into an object
store take bytes in order alone. Here a bucket is a range of the tensors laid end to end, whoever holds it. Files are
written by several ranks, each at another place, so that the ranks that send are several, too.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import torch

from raysharding.distributed.fully_shard import TensorLayout
from raysharding.units import MIB

BUCKET_BYTES = 32 * MIB
"""Default size of a bucket; see the note above."""
STRAIGHT_BYTES = 64 * MIB
"""Default size of a rank's part of a bucket that is read straight into its shard, which takes no buffer."""
ALIGNMENT_BYTES = 16
"""Segments start at multiples of this, so that a slice of the buffer can be viewed as any dtype."""
DIRECT_BYTES = 256 << 10
"""Segments from this size on are messages of their own."""
REPLICATED = -1
"""Shard index of the section that every rank needs."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to move."""

    layout: TensorLayout
    """Where its elements live in the module."""
    wire_dtype: torch.dtype
    """dtype in which its elements travel."""


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
    """What one shard index needs of a bucket."""

    shard_index: int
    """The shard, or `REPLICATED`."""
    offset: int
    """First byte in the bucket; a multiple of `ALIGNMENT_BYTES`."""
    packed_bytes: int
    """Length of the first message, the small segments; 0 if there are none."""
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
    """What one buffer holds."""

    sections: tuple[Section, ...]
    """Those that hold something: by shard index, then the replicated one."""
    num_bytes: int
    """Bytes of all sections together, padding included."""
    payload_bytes: int
    """Bytes of all segments, those of unwanted shards included."""


class Cut(NamedTuple):
    """What a bucket holds of a tensor: the same elements of every shard, as far as it is long enough."""

    tensor: int
    """Index into `BucketPlan.tensors`."""
    first: int
    """First element, counted from the start of each shard."""
    length: int
    """Elements, of a shard that is long enough."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _OpenSection:
    """A section that is being filled: small and large segments apart, offsets still relative to each part."""

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


def fill_section(shard_index: int, offset: int, ranges: Sequence[tuple[int, int, int, int]]) -> Section:
    """Lay out ranges of tensors that one shard holds.

    Args:
        shard_index: The shard, or `REPLICATED`.
        offset: First byte in the bucket.
        ranges: Tensor, first element, one past the last, bytes of an element.
    """
    section = _OpenSection(is_wanted=True)
    for tensor, start, stop, itemsize in ranges:
        section.add(tensor, start, stop, itemsize)
    return section.close(shard_index, offset)


class Buckets(Sequence[Bucket]):
    """The buckets of a plan, each made when it is looked at, and the last few kept.

    Those of 140 GB on 64 ranks would take more memory than the ring, each bucket having 64 sections; cuts take little.
    """

    _NUM_KEPT = 16
    """More than are under way at once, and all of a small plan."""

    def __init__(
        self,
        tensors: Sequence[PlannedTensor],
        cuts: Sequence[tuple[Cut, ...]],
        num_shards: int,
        wanted: Container[int],
    ) -> None:
        self._tensors = tensors
        self._cuts = cuts
        self._num_shards = num_shards
        self._wanted = wanted
        self._kept: dict[int, Bucket] = {}
        self._lock = threading.Lock()  # a reader's thread is ahead of the one that sends

    def __len__(self) -> int:
        return len(self._cuts)

    @overload
    def __getitem__(self, index: int) -> Bucket: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bucket]: ...
    def __getitem__(self, index: int | slice) -> Bucket | list[Bucket]:
        if isinstance(index, slice):
            return [self._bucket(number) for number in range(len(self))[index]]
        return self._bucket(range(len(self))[index])

    def _bucket(self, index: int) -> Bucket:
        with self._lock:
            if index not in self._kept:
                if len(self._kept) == self._NUM_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[index] = self._make(index)
            return self._kept[index]

    def last_tensor(self, index: int) -> PlannedTensor:
        """The last tensor of which bucket `index` holds some."""
        return self._tensors[self._cuts[index][-1].tensor]

    def payload_bytes(self, index: int) -> int:
        """Bytes of all segments of bucket `index`, which need not be made for it."""
        return sum(_payload_bytes(self._tensors[cut.tensor], cut) for cut in self._cuts[index])

    def _make(self, index: int) -> Bucket:
        shards = [_OpenSection(shard in self._wanted) for shard in range(self._num_shards)]
        replicated = _OpenSection(is_wanted=True)
        for tensor, first, length in self._cuts[index]:
            planned = self._tensors[tensor]
            open_sections = shards if planned.layout.num_shards else [replicated]
            itemsize = planned.wire_dtype.itemsize
            for section, (start, stop) in zip(open_sections, planned.layout.ranges(), strict=True):
                if start + first < stop:
                    section.add(tensor, start + first, min(start + first + length, stop), itemsize)
        sections: list[Section] = []
        offset = 0
        for shard_index, part in [*enumerate(shards), (REPLICATED, replicated)]:
            if part.num_bytes:
                sections.append(part.close(shard_index, offset))
                offset += part.num_bytes
        return Bucket(tuple(sections), offset, self.payload_bytes(index))


def _payload_bytes(planned: PlannedTensor, cut: Cut) -> int:
    """Bytes of a cut, all shards together: those of full length, and of the one that ends early."""
    total = planned.layout.num_elements
    longest = planned.layout.local_range(0)[1]
    rest = min(max(total % longest - cut.first, 0), cut.length)
    return (total // longest * cut.length + rest) * planned.wire_dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a transfer."""

    tensors: tuple[PlannedTensor, ...]
    """The tensors, in the order in which they travel."""
    buckets: Buckets
    """The buckets, in order."""
    num_shards: int
    """Number of shard indices."""
    num_first_buckets: int
    """How many of the buckets hold the tensors that were to come first."""
    max_bucket_bytes: int
    """No bucket is larger: what a buffer of the ring must hold."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that travel into shards: each tensor once, in its wire dtype."""
        return sum(item.layout.num_elements * item.wire_dtype.itemsize for item in self.tensors)


class _Cutter:
    """Fills one bucket after the other."""

    def __init__(self, num_shards: int, bucket_bytes: int) -> None:
        self.buckets: list[tuple[Cut, ...]] = []
        self.max_bucket_bytes = 0
        self._num_shards = num_shards
        self._limit(bucket_bytes)
        self._open()

    def _limit(self, bucket_bytes: int) -> None:
        # Room for an element of any dtype in every section.
        self._bucket_bytes = max(bucket_bytes, (self._num_shards + 1) * 4 * ALIGNMENT_BYTES)

    def _open(self) -> None:
        self._cuts: list[Cut] = []
        self._longest = _OpenSection(is_wanted=False)
        self._replicated = _OpenSection(is_wanted=False)

    @property
    def _used_bytes(self) -> int:
        # Shard 0 is never shorter than another, so it stands for all.
        return self._num_shards * self._longest.num_bytes + self._replicated.num_bytes

    def _room(self, itemsize: int, parts: int) -> int:
        """Elements that still fit into each of `parts` sections."""
        free = (self._bucket_bytes - self._used_bytes) // parts // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return max(free, 0) // itemsize

    def close(self, bucket_bytes: int | None = None) -> None:
        """End the bucket that is being filled, if anything is in it; those to come may have another size."""
        if self._cuts:
            self.buckets.append(tuple(self._cuts))
            self.max_bucket_bytes = max(self.max_bucket_bytes, self._used_bytes)
            self._open()
        if bucket_bytes is not None:
            self._limit(bucket_bytes)

    def add(self, index: int, layout: TensorLayout, itemsize: int) -> None:
        parts = max(layout.num_shards, 1)
        longest = layout.local_range(0)[1]
        done = 0
        while done < longest:
            room = self._room(itemsize, parts)
            rest = longest - done
            # Start a new bucket rather than leave a sliver of a tensor in this one.
            if room < rest and room * itemsize < min(DIRECT_BYTES, self._bucket_bytes // (2 * parts)):
                self.close()
                room = self._room(itemsize, parts)
            take = min(room, rest)
            assert take > 0, "an empty bucket has room for at least one element"
            section = self._longest if layout.num_shards else self._replicated
            section.add(index, done, done + take, itemsize)
            self._cuts.append(Cut(index, done, take))
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
        tensors: What travels, in the order in which it should.
        num_shards: Number of shard indices; every sharded layout must have this `num_shards`.
        bucket_bytes: Upper bound of a bucket, all sections and padding included.
        num_first: No bucket holds both some of so many first tensors and some of the rest. Default: all.
        wanted: Shard indices whose segments are listed; of the others only lengths are, which saves most of the time
            of a plan for many ranks. Default: all.
        rest_bytes: Upper bound of a bucket after the first `num_first` tensors. Default: `bucket_bytes`.

    Returns:
        The plan: equal on every rank that passes equal arguments, but for what is not wanted.
    """
    cutter = _Cutter(num_shards, bucket_bytes)
    num_first_buckets = 0
    for index, planned in enumerate(tensors):
        assert planned.layout.num_shards in (0, num_shards), f"{planned.layout.fqn}: cut over another number of ranks"
        if index == num_first:
            cutter.close(rest_bytes)
            num_first_buckets = len(cutter.buckets)
        cutter.add(index, planned.layout, planned.wire_dtype.itemsize)
    cutter.close()
    if num_first is None or num_first >= len(tensors):
        num_first_buckets = len(cutter.buckets)
    planned_tensors = tuple(tensors)
    buckets = Buckets(planned_tensors, cutter.buckets, num_shards, range(num_shards) if wanted is None else wanted)
    return BucketPlan(planned_tensors, buckets, num_shards, num_first_buckets, cutter.max_bucket_bytes)


class OrderedBuckets(Buckets):
    """Buckets whose cuts are ranges of the flattened whole tensors."""

    def payload_bytes(self, index: int) -> int:
        """See `Buckets`."""
        return sum(length * self._tensors[tensor].wire_dtype.itemsize for tensor, _, length in self._cuts[index])

    def _make(self, index: int) -> Bucket:
        ranges: dict[int, list[tuple[int, int, int, int]]] = {}
        for tensor, first, length in self._cuts[index]:
            planned = self._tensors[tensor]
            itemsize = planned.wire_dtype.itemsize
            for shard, (start, stop) in enumerate(planned.layout.ranges()):
                begin, end = max(start, first), min(stop, first + length)
                if begin < end:
                    held_by = shard if planned.layout.num_shards else REPLICATED
                    ranges.setdefault(held_by, []).append((tensor, begin, end, itemsize))
        sections: list[Section] = []
        offset = 0
        for shard in sorted(ranges, key=lambda shard: (shard == REPLICATED, shard)):
            sections.append(fill_section(shard, offset, ranges[shard]))
            offset += sections[-1].num_bytes
        return Bucket(tuple(sections), offset, self.payload_bytes(index))


def plan_in_order(tensors: Sequence[PlannedTensor], num_shards: int, bucket_bytes: int) -> BucketPlan:
    """Cut tensors into buckets that follow each other in the tensors laid end to end.

    Args:
        tensors: What travels, in the order of the file.
        num_shards: Number of shard indices.
        bucket_bytes: Payload of a bucket at most; one element, where that is larger.
    """
    cuts: list[tuple[Cut, ...]] = []
    current: list[Cut] = []
    room = bucket_bytes
    for index, planned in enumerate(tensors):
        itemsize, first = planned.wire_dtype.itemsize, 0
        while first < planned.layout.num_elements:
            if room < itemsize and current:
                cuts.append(tuple(current))
                current, room = [], bucket_bytes
            take = min(planned.layout.num_elements - first, max(room // itemsize, 1))
            current.append(Cut(index, first, take))
            first, room = first + take, room - take * itemsize
    if current:
        cuts.append(tuple(current))
    buckets = OrderedBuckets(tuple(tensors), cuts, num_shards, range(num_shards))
    # Each range of a shard may be padded.
    largest = max(
        (buckets.payload_bytes(index) + _padding(cuts[index], num_shards) for index in range(len(cuts))), default=0
    )
    return BucketPlan(tuple(tensors), buckets, num_shards, len(cuts), largest)


def _padding(cuts: Sequence[Cut], num_shards: int) -> int:
    return len(cuts) * max(num_shards, 1) * ALIGNMENT_BYTES
