"""`GroupState`, the state of a group, and `GroupStatus`, which tracks it.

`Survivors`: which ranks of a group are lost, and whether and how long the others are kept for a restart.

`Replicas`: which ranks of a group hold the same shard (HSDP), so that the group can lose some of them.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from raysharding.config import Sharding
from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.rpc import StateChange
from raysharding.group.supervision import failures


class GroupState(enum.Enum):
    """States of a group: STARTING → READY ↔ BUSY → BROKEN → CLOSED; every state can change to CLOSED."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    BROKEN = "broken"
    CLOSED = "closed"


class GroupStatus:
    """Tracks the state of a group. The supervision thread and `revive` change it; any thread may read it."""

    def __init__(self, name: str) -> None:
        """Start as STARTING.

        Args:
            name: Name of the group in errors.
        """
        self._name = name
        self.is_started = False
        """True if the model is loaded and no restart has begun since."""
        self.is_dropped = False
        """True if the last reference to the group is gone."""
        self.is_closing = False
        """True if the group is shut down or shutting down."""
        self.cause: GroupError | None = None
        """The error that broke the group."""
        self._reviver: int | None = None
        self._revived_from: GroupError | None = None

    def state(self, *, is_busy: bool) -> GroupState:
        """Return the state.

        Args:
            is_busy: True if a call runs or is queued.
        """
        if self.is_closing:
            return GroupState.CLOSED
        if self.cause is not None:
            return GroupState.BROKEN
        if not self.is_started:
            return GroupState.STARTING
        return GroupState.BUSY if is_busy else GroupState.READY

    @property
    def is_usable(self) -> bool:
        """True if calls can be sent."""
        return self.cause is None and not self.is_closing

    @property
    def is_restarting(self) -> bool:
        """True while kept ranks form the group again."""
        return self._reviver is not None

    def refuse_if_unusable(self) -> None:
        """Raise the error of a call on a broken or closed group.

        Raises:
            GroupBrokenError: The group is broken (with the cause), shut down, or being restarted by another thread.
        """
        if self.is_closing:
            raise GroupBrokenError(f"{self._name} is shut down; make a new group")
        if self.cause is not None:
            raise failures.broken(self._name, self.cause)
        if self._reviver not in (None, threading.get_ident()):
            raise GroupBrokenError(f"{self._name} is being restarted: its ranks have not met again yet")

    def start(self) -> None:
        """Leave STARTING."""
        self.is_started, self._reviver, self._revived_from = True, None, None

    def fail(self, error: GroupError) -> None:
        """Enter BROKEN."""
        # A copy: the traceback of the error that the user gets would keep the user's frames, and so the group.
        self.cause = failures.twin(error)

    def revive(self) -> None:
        """Change from BROKEN to STARTING: until `start`, only this thread can submit calls."""
        self._reviver = threading.get_ident()
        self._revived_from, self.cause, self.is_started = self.cause, None, False

    def first_cause(self, error: GroupError) -> GroupError:
        """Return the error for later calls: after a failed restart, the error that broke the group before."""
        return error if self.is_started or self._revived_from is None else self._revived_from


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
        found = {}
        for rank in sorted(lost):
            found[rank] = next(one for one in self._holders(rank % self.num_shards) if one not in lost)
        return found

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
