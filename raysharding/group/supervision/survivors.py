"""`Survivors`: which ranks of a group are lost, and whether and how long the others are kept for a restart.

`Replicas`: which ranks of a group hold the same shard (HSDP), so that the group can lose some of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from raysharding.config import Sharding
from raysharding.group.rpc import StateChange


@dataclass(frozen=True, slots=True)
class Replicas:
    """Rank r holds shard `r % num_shards`, in replica `r // num_shards`; see `distributed.init_mesh`."""

    world_size: int
    """Number of ranks."""
    num_shards: int
    """Ranks of one replica."""

    @classmethod
    def of(cls, sharding: Sharding, world_size: int) -> Replicas:
        """Return the layout of a group; without replicas if their number does not divide the ranks."""
        count = sharding.replicate_size
        return cls(world_size, world_size // count if world_size % count == 0 else world_size)

    @property
    def are_several(self) -> bool:
        """True if there is more than one replica."""
        return self.num_shards < self.world_size

    def bare_shard(self, lost: Collection[int]) -> int | None:
        """Return the first shard that only lost ranks hold; `None` without one."""
        shards = range(self.num_shards)
        return next((shard for shard in shards if all(rank in lost for rank in self._holders(shard))), None)

    def sources(self, lost: Collection[int]) -> dict[int, int]:
        """Return, for each lost rank, the lowest other rank that holds its shard."""
        holders = {rank: self._holders(rank % self.num_shards) for rank in sorted(lost)}
        return {rank: next(one for one in held if one not in lost) for rank, held in holders.items()}

    def are_alike(self, changes: Mapping[int, StateChange]) -> bool:
        """Return True if a call changed all copies of each shard alike, by the reports of the ranks."""
        if not all(change.whole for change in changes.values()):
            return False  # partial changes of two ranks may differ
        kinds = {(rank % self.num_shards, change) for rank, change in changes.items()}
        return len(kinds) == len({shard for shard, _ in kinds})

    def _holders(self, shard: int) -> range:
        return range(shard, self.world_size, self.num_shards)


_POLL_S = 0.02

TORN = "the failure left weights or optimizer changed in part"
BUSY = "ranks that had not ended their part of the call had to be stopped"
STOPPED = "its ranks were stopped"


@dataclass(frozen=True, slots=True)
class RecoverableState:
    """What is left of a group after a failure."""

    lost: frozenset[int] = frozenset()
    """Ranks that died, or hang and are stopped."""
    why_not: str = STOPPED
    """Why the other ranks cannot continue with their state; empty if they can."""
    pending: frozenset[int] = frozenset()
    """Ranks that have not finished the failed call; their state is unknown until then."""
    done: str = ""
    """Name of the failed call, if all other ranks finished it and hold its changes."""


NOTHING = RecoverableState()
"""All ranks are stopped."""


class Survivors:
    """Tracks lost and kept ranks. The supervision thread changes it; properties are thread-safe."""

    def __init__(self, replicas: Replicas, keep_s: float) -> None:
        """Start with all ranks alive.

        Args:
            replicas: Which ranks hold the same shard.
            keep_s: Time for which ranks are kept, in seconds.
        """
        self.lock = threading.Lock()
        self.replicas = replicas
        self.dead: set[int] = set()
        self.recoverable = RecoverableState(why_not="the group had not failed")
        self._keep_s = keep_s
        self._until = 0.0
        self._is_kept = False
        self._copies_differ = False

    @property
    def is_kept(self) -> bool:
        """True if ranks of a broken group are kept for a restart."""
        return self._is_kept

    @property
    def left_s(self) -> float:
        """Seconds until kept ranks are stopped."""
        return max(0.0, self._until - time.monotonic())

    def compare(self, changes: Mapping[int, StateChange]) -> None:
        """Record whether a call made copies of a shard differ. Nothing is known to make them equal again."""
        if self.replicas.are_several and not self._copies_differ:
            self._copies_differ = not self.replicas.are_alike(changes)

    def why_not(self, lost: Collection[int]) -> str:
        """Return why the group cannot continue without these and the dead ranks; empty if it can."""
        return self._why_lost({*self.dead, *lost}) or ("" if self._keep_s else "Timeouts(keep_s=0) keeps no ranks")

    def _why_lost(self, lost: Collection[int]) -> str:
        shard = self.replicas.bare_shard(lost)
        if shard is not None:
            copies = f", and so did every other rank that held shard {shard}" if self.replicas.are_several else ""
            return f"its shards went with it{copies}"
        if lost and self._copies_differ:
            return "a call had changed some copies of a shard and not the others, so none can be taken for another"
        return ""

    def hear_death(self, rank: int) -> bool:
        """Record the death of a rank; call with the lock held.

        If kept ranks lose a shard by it, `recoverable.why_not` says so, and they are to be stopped.

        Returns:
            True if the rank was not known as lost.
        """
        is_news = rank not in self.dead and rank not in self.recoverable.lost
        self.dead.add(rank)
        if is_news and self._is_kept:
            lost = self.recoverable.lost | {rank}
            self.recoverable = replace(self.recoverable, lost=lost, why_not=self._why_lost(lost))
        return is_news

    def keep(self, recoverable: RecoverableState) -> None:
        """Keep the ranks that are not lost, if the state is recoverable; call with the lock held."""
        self.recoverable = recoverable
        self._is_kept, self._until = not recoverable.why_not, time.monotonic() + self._keep_s

    def wait_settled(self, timeout_s: float, then_s: float) -> None:
        """Wait until no kept rank is pending. Ranks are kept for that time and `then_s` longer."""
        with self.lock:
            self._until = max(self._until, time.monotonic() + timeout_s + then_s)
        _wait_until(lambda: not (self._is_kept and self.recoverable.pending), timeout_s)

    def wait_gone(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until Ray reports the death of lost ranks; return True if it did in time."""
        return _wait_until(lambda: self.dead.issuperset(ranks), timeout_s)

    def settle(self, recoverable: RecoverableState) -> None:
        """Set the recoverable state, unless ranks are no longer kept."""
        with self.lock:
            if self._is_kept:
                self.recoverable = recoverable

    def drop(self) -> bool:
        """Stop keeping ranks, unless a restart has begun; return True if they were kept."""
        with self.lock:
            was_kept, self._is_kept = self._is_kept, False
            if was_kept and not self.recoverable.why_not:
                why = f"the ranks that were left were kept for Timeouts(keep_s={self._keep_s:g}) only"
                self.recoverable = RecoverableState(self.recoverable.lost, why)
            return was_kept

    def take(self, silent: Collection[int]) -> RecoverableState | None:
        """Return the recoverable state for a restart, `None` without one; call with the lock held.

        Args:
            silent: Ranks that have just failed to answer; they count as lost.
        """
        lost = self.recoverable.lost | self.dead | frozenset(silent)
        is_known = self._is_kept and not self.recoverable.why_not and not self.recoverable.pending
        if not is_known or self._why_lost(lost):
            return None
        self.recoverable, self._is_kept = replace(self.recoverable, lost=lost), False
        return self.recoverable


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True
