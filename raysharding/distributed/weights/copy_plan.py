"""The plan of a copy between two groups: which rank sends which ranges to which, and the buckets that carry them.

Note: every rank computes the same.
    A shard is one contiguous range of the flattened tensor in either group. The ranges that a rank of the target lacks
    are cut where the source's shards meet. Each piece is sent once, straight from a rank that holds it to the rank that
    needs it: by one on the same host if there is one, else by the replica that has the least to send. No rank holds a
    full tensor, and the target's replicas are filled one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raysharding.distributed.transfer import Segment, wire_dtype
from raysharding.distributed.weights.model_layout import ModelLayout

Pair = tuple[int, int]
"""(rank of the source, rank of the target)."""
Bucket = tuple[Segment, ...]
"""What one message carries; offsets are from its start."""


_ALIGNMENT = 64
"""A slot begins at a multiple of this: any dtype can be viewed there."""


class _Range(NamedTuple):
    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class CopyPlan:
    """The plan of one copy, as far as it concerns one rank."""

    names: tuple[str, ...]
    """Names of the tensors, in the order of transfer."""
    wire: tuple[torch.dtype, ...]
    """dtype of each on the wire: the narrower of the two groups'; the source's if they are equally wide."""
    buckets: Mapping[Pair, tuple[Bucket, ...]]
    """Pair that this rank is part of → buckets, in order."""
    num_bytes: int
    """Bytes that all pairs carry, in the dtype on the wire."""

    def slot_bytes(self, pair: Pair) -> int:
        """Return the size of a slot for any bucket of a pair; slots may lie behind each other."""
        return -(-max(map(bucket_bytes, self.buckets[pair])) // _ALIGNMENT) * _ALIGNMENT


def bucket_bytes(bucket: Bucket) -> int:
    """Return the size of a bucket on the wire."""
    return bucket[-1].offset + bucket[-1].num_bytes


def plan_copy(
    source: ModelLayout,
    target: ModelLayout,
    hosts: tuple[Sequence[object], Sequence[object]],
    round_bytes: int,
    of: tuple[int | None, int | None],
) -> CopyPlan:
    """Plan a copy; the same on every rank but for `of`.

    Args:
        source: Layout of the source.
        target: Layout of the target, with the same names and shapes.
        hosts: Identities of the hosts of the source's and the target's ranks, by rank.
        round_bytes: Bytes that a rank sends, or receives, in one round, over all its pairs.
        of: Rank of the source, or `None`, and rank of the target, or `None`, whose buckets are wanted.
    """
    names = tuple(target.tensors)
    wire = tuple(wire_dtype(source.tensors[name].dtype, target.tensors[name].dtype) for name in names)
    ranges = _ranges(source, target, hosts, [dtype.itemsize for dtype in wire])
    num_peers = [Counter(pair[side] for pair in ranges) for side in (0, 1)]
    buckets = {
        pair: _cut(found, wire, round_bytes // max(num_peers[0][pair[0]], num_peers[1][pair[1]]))
        for pair, found in ranges.items()
        if of[0] == pair[0] or of[1] == pair[1]
    }
    num_bytes = sum((one.stop - one.start) * wire[one.tensor].itemsize for found in ranges.values() for one in found)
    return CopyPlan(names, wire, buckets, num_bytes)


def _ranges(
    source: ModelLayout, target: ModelLayout, hosts: tuple[Sequence[object], Sequence[object]], itemsizes: Sequence[int]
) -> dict[Pair, list[_Range]]:
    """Return the ranges that each pair carries, in the order of the tensors."""
    found: dict[Pair, list[_Range]] = defaultdict(list)
    sent = [0] * len(hosts[0])
    for index, (name, wanted) in enumerate(target.tensors.items()):
        cuts, holders = source.tensors[name].ranges(), source.holders[name]
        starts = [start for start, _ in cuts]
        for (first, last), ranks in zip(wanted.ranges(), target.holders[name], strict=True):
            shard = max(0, bisect_right(starts, first) - 1) if last > first else len(cuts)
            while shard < len(cuts) and cuts[shard][0] < last:
                start, stop = max(first, cuts[shard][0]), min(last, cuts[shard][1])
                for rank in ranks if start < stop else ():
                    # Buffers may differ between ranks: rank 0's are saved, and copied.
                    senders = holders[shard] if source.tensors[name].num_shards else (0,)
                    *_, sender = min((hosts[0][one] != hosts[1][rank], sent[one], one) for one in senders)
                    sent[sender] += (stop - start) * itemsizes[index]
                    found[sender, rank].append(_Range(index, start, stop))
                shard += 1
    return dict(sorted(found.items()))


def _cut(ranges: Sequence[_Range], wire: Sequence[torch.dtype], limit: int) -> tuple[Bucket, ...]:
    """Cut ranges into buckets of at most `limit` bytes, and at least one element. Each begins at its own alignment."""
    buckets: list[list[Segment]] = [[]]
    end = 0
    for tensor, start, stop in ranges:
        itemsize = wire[tensor].itemsize
        while start < stop:
            offset = -(-end // itemsize) * itemsize
            take = min(stop - start, max(limit - offset, 0) // itemsize)
            if take == 0 and buckets[-1]:
                buckets.append([])
                end = 0
                continue
            take = max(take, 1)
            buckets[-1].append(Segment(tensor, start, start + take, offset, take * itemsize))
            start, end = start + take, offset + take * itemsize
    return tuple(map(tuple, buckets))
