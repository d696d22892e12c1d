"""`Survivors`: whether and how long the ranks of a broken group are kept for a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

TORN = "the failure left weights or optimizer changed in part"
BUSY = "ranks that had not ended their part of the call had to be stopped"
STOPPED = "its ranks were stopped"
LOST = "its shards went with it"


@dataclass(frozen=True, slots=True)
class RecoverableState:
    """What is left of a group after a failure."""

    why_not: str = STOPPED
    """Why the ranks cannot continue with their state; empty if they can."""
    done: str = ""
    """Name of the failed call, if all ranks finished it and hold its changes."""


NOTHING = RecoverableState()
"""All ranks are stopped."""


class Survivors:
    """Tracks dead and kept ranks. The supervision thread changes it; properties are thread-safe."""

    def __init__(self, keep_s: float) -> None:
        """Start with all ranks alive.

        Args:
            keep_s: Time for which ranks are kept, in seconds.
        """
        self.lock = threading.Lock()
        self.dead: set[int] = set()
        self.recoverable = RecoverableState(why_not="the group had not failed")
        self._keep_s = keep_s
        self._until = 0.0
        self._is_kept = False

    @property
    def is_kept(self) -> bool:
        """True if ranks of a broken group are kept for a restart."""
        return self._is_kept

    @property
    def left_s(self) -> float:
        """Seconds until kept ranks are stopped."""
        return max(0.0, self._until - time.monotonic())

    def why_not(self, lost: Collection[int]) -> str:
        """Return why the group cannot continue with its ranks; empty if it can.

        Args:
            lost: Ranks that hang.
        """
        if lost or self.dead:
            return LOST
        return "" if self._keep_s else "Timeouts(keep_s=0) keeps no ranks"

    def hear_death(self, rank: int) -> bool:
        """Record the death of a rank; call with the lock held. Kept ranks are then to be stopped.

        Returns:
            True if the rank was not known to be dead.
        """
        is_news = rank not in self.dead
        self.dead.add(rank)
        if is_news and self._is_kept:
            self.recoverable = RecoverableState(LOST)
        return is_news

    def keep(self, recoverable: RecoverableState) -> None:
        """Keep the ranks if the state is recoverable; call with the lock held."""
        self.recoverable = recoverable
        self._is_kept, self._until = not recoverable.why_not, time.monotonic() + self._keep_s

    def keep_for(self, at_least_s: float) -> None:
        """Keep the ranks for this time at least, if they are kept."""
        with self.lock:
            self._until = max(self._until, time.monotonic() + at_least_s)

    def drop(self) -> bool:
        """Stop keeping ranks, unless a restart has begun; return True if they were kept."""
        with self.lock:
            was_kept, self._is_kept = self._is_kept, False
            if was_kept and not self.recoverable.why_not:
                self.recoverable = RecoverableState(f"the ranks were kept for Timeouts(keep_s={self._keep_s:g}) only")
            return was_kept

    def take(self) -> RecoverableState | None:
        """Return the recoverable state for a restart, `None` without one; call with the lock held."""
        if not self._is_kept or self.recoverable.why_not or self.dead:
            return None
        self._is_kept = False
        return self.recoverable
