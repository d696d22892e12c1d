"""A rank's lease: it lives while its driver renews it. `RankLease` is the rank's end, `LeaseRenewal` the driver's.

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

_RENEWALS = 3  # in one lease


class LeaseRenewal:
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
