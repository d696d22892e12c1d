"""`Survivors`: which ranks of a group are gone, and whether the others are kept for a restart, and until when.

`Replicas`: which ranks of a group hold the same shard (HSDP), so that some of them may be lost.
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

    def are_alike(self, changes: Mapping[int, StateChange]) -> bool:
        """Whether a call did the same to every copy of a shard, by what the ranks say of it."""
        if not all(change.whole for change in changes.values()):
            return False  # two that were torn may have been torn at different places
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
    """What a failure has left of a group."""

    lost: frozenset[int] = frozenset()
    """Ranks that are gone, or that hang and are stopped."""
    why_not: str = STOPPED
    """Why the others cannot go on with what they hold; empty where they can."""
    pending: frozenset[int] = frozenset()
    """Ranks whose part of the failed call has not ended yet: until it has, nobody knows what they hold."""
    done: str = ""
    """The failed call, where all of the others had ended it and its change is in what they hold."""


NOTHING = RecoverableState()
"""All ranks are stopped."""


class Survivors:
    """The supervision thread changes it; `revive` and the properties are for any thread."""

    def __init__(self, replicas: Replicas, keep_s: float) -> None:
        """All ranks are there.

        Args:
            replicas: Who holds what.
            keep_s: How long ranks are kept.
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
        """Whether ranks of a broken group wait for a restart."""
        return self._is_kept

    @property
    def left_s(self) -> float:
        """Seconds until kept ranks are to be stopped."""
        return max(0.0, self._until - time.monotonic())

    def compare(self, changes: Mapping[int, StateChange]) -> None:
        """Note what a call did to the ranks: what made copies of a shard differ is never undone, as far as we know."""
        if self.replicas.are_several and not self._copies_differ:
            self._copies_differ = not self.replicas.are_alike(changes)

    def why_not(self, lost: Collection[int]) -> str:
        """Why the group cannot do without these ranks and the dead ones; empty where it can."""
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
        """With the lock held: note that a rank's process is gone. Return whether that is news: it may be given up.

        Kept ranks whose shards are not all there any more are to be stopped: `recoverable` says why not, then.
        """
        is_news = rank not in self.dead and rank not in self.recoverable.lost
        self.dead.add(rank)
        if is_news and self._is_kept:
            lost = self.recoverable.lost | {rank}
            self.recoverable = replace(self.recoverable, lost=lost, why_not=self._why_lost(lost))
        return is_news

    def keep(self, recoverable: RecoverableState) -> None:
        """With the lock held: the group is broken: keep the ranks that are not lost, where they can go on."""
        self.recoverable = recoverable
        self._is_kept, self._until = not recoverable.why_not, time.monotonic() + self._keep_s

    def wait_settled(self, timeout_s: float, then_s: float) -> None:
        """Wait until it is known what kept ranks hold; they are kept meanwhile, and `then_s` longer."""
        with self.lock:
            self._until = max(self._until, time.monotonic() + timeout_s + then_s)
        _wait_until(lambda: not (self._is_kept and self.recoverable.pending), timeout_s)

    def wait_gone(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until Ray says that ranks which were given up are gone; return whether they are."""
        return _wait_until(lambda: self.dead.issuperset(ranks), timeout_s)

    def settle(self, recoverable: RecoverableState) -> None:
        """What kept ranks hold is known now, or too late."""
        with self.lock:
            if self._is_kept:
                self.recoverable = recoverable

    def drop(self) -> bool:
        """Keep the ranks no longer, unless a restart has begun; return whether they were kept."""
        with self.lock:
            was_kept, self._is_kept = self._is_kept, False
            if was_kept and not self.recoverable.why_not:
                why = f"the ranks that were left were kept for Timeouts(keep_s={self._keep_s:g}) only"
                self.recoverable = RecoverableState(self.recoverable.lost, why)
            return was_kept

    def take(self, silent: Collection[int]) -> RecoverableState | None:
        """For a restart, with the lock held: what there is to go on with, `None` where the ranks cannot.

        Args:
            silent: Ranks that have not answered just now: they are lost, too.
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
