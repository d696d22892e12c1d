"""Routes: which rank reads each section, and which ranks forward it. Pure arithmetic, the same on every rank.

Note: one rule for every transport.
    Some ranks are *readers*. A section is read once, by a reader that holds its shard if there is one, else by the
    readers in turn, which so share the reading in disjoint stripes. It is forwarded along its *path*: reader, first
    holder, next replica. Every byte leaves the source once, and replicas are filled by their peers. With rank 0 as the
    only reader this is a scatter; if every rank is a reader, only replicas need messages.

    Ranks that map the reader's buffers (`shared_memory.py`) are *served* there. The others form a *chain* of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raysharding.distributed.fully_shard import ShardMap
from raysharding.distributed.transfer.bucket_plan import REPLICATED, Bucket, Section


@dataclass(frozen=True)
class Routes:
    """Readers and paths of all sections."""

    shards: ShardMap
    """Which rank holds which shard."""
    readers: tuple[int, ...]
    """Ranks that read files; rank 0 is always one."""
    num_ranged: int
    """Buckets before this index are ranges of files; only rank 0 can make the later ones."""
    shared: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Reader → ranks that map its buffers."""

    _paths: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def path(self, index: int, shard_index: int) -> tuple[int, ...]:
        """Return the path of a shard's section of bucket `index`, with its reader first."""
        turn = index % len(self.readers) if index < self.num_ranged else -1
        path = self._paths.get((turn, shard_index))
        if path is None:
            path = self._paths[turn, shard_index] = self._find_path(turn, shard_index)
        return path

    def _find_path(self, turn: int, shard_index: int) -> tuple[int, ...]:
        shards = self.shards
        holders = tuple(range(shards.world_size)) if shard_index == REPLICATED else shards.holders[shard_index]
        # In turn, so that replicas that see the files share the reading, and use both directions of a link.
        readers = (0,) if turn < 0 else self.readers[turn:] + self.readers[:turn]
        reader = next((rank for rank in readers if rank in holders), readers[shard_index % len(readers)])
        return reader, *(rank for rank in holders if rank != reader)

    def served(self, index: int, shard_index: int) -> frozenset[int]:
        """Return the ranks that copy a section from the reader's buffer."""
        path = self.path(index, shard_index)
        return self.shared.get(path[0], frozenset()).intersection(path[1:])

    def chain(self, index: int, shard_index: int) -> tuple[int, ...]:
        """Return the path without served ranks: each rank sends the section to the next."""
        served = self.served(index, shard_index)
        return tuple(rank for rank in self.path(index, shard_index) if rank not in served)

    def travelling(self, index: int, bucket: Bucket, rank: int) -> list[Section]:
        """Return the sections of a bucket that `rank` reads for others, or receives."""
        return [section for section in bucket.sections if self._concerns(index, section, rank, alone=False)]

    def alone(self, index: int, bucket: Bucket, rank: int) -> list[Section]:
        """Return the sections of a bucket that `rank` reads and no other rank needs."""
        return [section for section in bucket.sections if self._concerns(index, section, rank, alone=True)]

    def _concerns(self, index: int, section: Section, rank: int, alone: bool) -> bool:
        path = self.path(index, section.shard_index)
        return rank in path and (len(path) == 1) == alone

    def offsets(self, index: int, bucket: Bucket, rank: int) -> dict[int, int]:
        """Return shard index → first byte in `rank`'s buffer of its sections: shared ones first, then its own.

        Ranks that map a reader's buffer also use this to find their sections.
        """
        offsets: dict[int, int] = {}
        position = 0
        for section in [*self.travelling(index, bucket, rank), *self.alone(index, bucket, rank)]:
            offsets[section.shard_index] = position
            position += section.num_bytes
        return offsets

    def any_travels(self, buckets: Sequence[Bucket]) -> bool:
        """Return True if a rank needs a section that another rank reads."""
        return any(
            len(self.path(index, section.shard_index)) > 1
            for index, bucket in enumerate(buckets)
            for section in bucket.sections
        )
