"""`Replicas`: which ranks of a group hold the same shard (HSDP), so that some of them may be lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from raysharding.config import Sharding
from raysharding.group.outcome import Stamp


@dataclass(frozen=True, slots=True)
class Replicas:
    """Rank r holds shard `r % num_shards`, in replica `r // num_shards`; see `distributed.mesh.init_mesh`."""

    world_size: int
    """Number of ranks."""
    num_shards: int
    """Ranks of one replica."""

    @classmethod
    def of(cls, sharding: Sharding, world_size: int) -> Replicas:
        """The layout of a group. Where the replicas do not divide the ranks, the ranks will refuse it: no replicas."""
        count = sharding.replicate_size
        return cls(world_size, world_size // count if world_size % count == 0 else world_size)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one replica."""
        return self.num_shards < self.world_size

    def covers(self, lost: Collection[int]) -> bool:
        """Whether the other ranks hold every shard."""
        return self.bare_shard(lost) is None

    def bare_shard(self, lost: Collection[int]) -> int | None:
        """The first shard that no rank holds but lost ones; `None` where there is none."""
        shards = range(self.num_shards)
        return next((shard for shard in shards if all(rank in lost for rank in self._holders(shard))), None)

    def sources(self, lost: Collection[int]) -> dict[int, int]:
        """Lost rank → the lowest of the others that holds its shard."""
        found = {}
        for rank in sorted(lost):
            found[rank] = next(one for one in self._holders(rank % self.num_shards) if one not in lost)
        return found

    def are_alike(self, stamps: Mapping[int, Stamp]) -> bool:
        """Whether a call did the same to every copy of a shard, by what the ranks say of it."""
        if not all(stamp.whole for stamp in stamps.values()):
            return False  # two that were torn may have been torn at different places
        kinds = {(rank % self.num_shards, stamp) for rank, stamp in stamps.items()}
        return len(kinds) == len({shard for shard, _ in kinds})

    def _holders(self, shard: int) -> range:
        return range(shard, self.world_size, self.num_shards)
