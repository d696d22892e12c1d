"""A bucket plan that takes tensors from their first element to their last: for a file that is written in order.

`plan.plan_buckets` keeps every shard busy with each bucket, and so brings a tensor in columns; streams into an object
store take bytes in order alone. Here a bucket is a range of the tensors laid end to end, whoever holds it. Files are
written by several ranks, each at another place, so that the ranks that send are several, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysharding.distributed.plan import (
    ALIGNMENT_BYTES,
    REPLICATED,
    Bucket,
    BucketPlan,
    Buckets,
    Cut,
    PlannedTensor,
    Section,
    fill_section,
)


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
