"""A rank's lease: it lives while its driver renews it. `RankLease` is the rank's end, `Renewal` the driver's.

Note [Lease]: Ray frees the ranks of a driver that is dead, not those of one that is frozen (SIGSTOP, a debugger, a
paused machine), nor those of a named group. A lease does. Ranks are told by a control call, which no running call
holds up, from a thread of the driver, which a busy main thread does not hold up (one that keeps the interpreter lock
does: that is a frozen driver). Time in which the rank itself did not run counts for two ticks at most: the renewals of
that time wait in its queue, and it must get the chance to read them. So a rank that never lets the interpreter lock
go does not end itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import ray

from raysharding.group.ranks import Member

_TICKS = 20  # of the rank's watch, in one lease
_MAX_TICK_S = 0.5
_RENEWALS = 3  # in one lease


class RankLease:
    """Counts down on a thread of the rank, and calls `end` when nobody has renewed it."""

    def __init__(self, end: Callable[[float], None]) -> None:
        """No lease: the rank lives as long as Ray lets it.

        Args:
            end: Ends the process; it is given the length of the lease that ran out.
        """
        self._end = end
        self._lock = threading.Lock()
        self._lease_s: float | None = None
        self._left_s = 0.0
        self._order = (0, 0)
        self._thread: threading.Thread | None = None

    def renew(self, lease_s: float | None, order: tuple[int, int] = (0, 0)) -> None:
        """Begin the lease anew.

        Args:
            lease_s: Its length from now; `None`: no lease any more.
            order: The driver's epoch and number of this renewal: control calls may overtake each other, and of two
                that do the later one stands.
        """
        with self._lock:
            if order < self._order:
                return
            self._order = order
            self._left_s = 0.0 if lease_s is None else lease_s
            self._lease_s = lease_s
            if lease_s is not None and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="raysharding-lease", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            lease_s = self._lease_s
            tick_s = _MAX_TICK_S if lease_s is None else min(_MAX_TICK_S, lease_s / _TICKS)
            begun = time.monotonic()
            time.sleep(tick_s)
            with self._lock:
                self._left_s -= min(time.monotonic() - begun, 2 * tick_s)
                has_run_out = self._lease_s is not None and self._left_s <= 0
            if has_run_out and lease_s is not None:
                self._end(lease_s)


class Renewal:
    """Renews the leases of a group's ranks on a thread of the driver."""

    def __init__(self, members: Sequence[Member], lease_s: float | None, has_ray: Callable[[], bool]) -> None:
        """Begin, where there is a lease.

        Args:
            members: By rank.
            lease_s: Length of the lease; `None`: there is none.
            has_ray: Whether the Ray that runs the ranks is still connected.
        """
        self._members = members
        self._lease_s = lease_s
        self._told_s: float | None = math.nan  # equal to nothing: nothing has been told yet
        self._has_ray = has_ray
        self._changed = threading.Event()
        self._is_stopped = False
        self._renewed_at = time.monotonic()
        self._longest_gap_s = 0.0
        self._asked: dict[int, ray.ObjectRef] = {}
        self._number = 0
        self._thread = threading.Thread(target=self._loop, name="raysharding-renewal", daemon=True)
        if lease_s is not None:
            self._thread.start()

    def change(self, lease_s: float | None) -> None:
        """Give the ranks another lease, at once; `None`: none any more."""
        self._lease_s = lease_s
        self._changed.set()

    def stop(self) -> None:
        """Renew no more; but a change of a moment ago is still told."""
        self._is_stopped = True
        self._changed.set()

    def wait_heard(self, timeout_s: float) -> None:
        """After `stop`: wait until the ranks have heard the last of it, or the time is over.

        Ranks that go on without this driver would end themselves by the lease that they had before.
        """
        until = time.monotonic() + timeout_s
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._has_ray() and (asked := list(self._asked.values())):
            ray.wait(asked, num_returns=len(asked), timeout=max(0.0, until - time.monotonic()))

    def explain(self) -> str:
        """Say, for the error of a rank that died, that the lease had run out; empty where it had not."""
        gap_s = max(self._longest_gap_s, time.monotonic() - self._renewed_at)
        if self._lease_s is None or gap_s < self._lease_s:
            return ""
        return f"; its lease of {self._lease_s:g} s had run out: this driver did not run for {gap_s:.1f} s"

    def _loop(self) -> None:
        while self._has_ray():
            lease_s = self._lease_s
            self._changed.clear()
            if self._is_stopped and lease_s == self._told_s:
                return
            self._number += 1
            for rank, member in enumerate(self._members):
                self._renew(rank, member, lease_s)
            self._told_s = lease_s
            now = time.monotonic()
            self._longest_gap_s = max(self._longest_gap_s, now - self._renewed_at)
            self._renewed_at = now
            if lease_s is None:
                return
            if self._lease_s == lease_s:
                self._changed.wait(lease_s / _RENEWALS)

    def _renew(self, rank: int, member: Member, lease_s: float | None) -> None:
        before = self._asked.get(rank)
        # A rank that has not read the last renewal yet needs no other, unless this one says something new.
        if before is not None and lease_s is not None and not ray.wait([before], timeout=0)[0]:
            return
        self._asked[rank] = member.actor.renew.remote(member.epoch, self._number, lease_s)
