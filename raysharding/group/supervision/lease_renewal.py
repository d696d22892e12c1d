"""Leases of ranks: a rank exits unless its driver renews its lease, by `LeaseRenewal`.

`RankLease`, in `actors/ownership.py`, counts down on the rank.

Note [Lease]: Ray frees the ranks of a driver that died, but not the ranks of a frozen driver (SIGSTOP, a debugger, a
paused machine) or of a named group. A lease frees these. The driver renews it by a control call, which does not wait
for running calls, on a thread, which does not wait for a busy main thread (a main thread that keeps the interpreter
lock is a frozen driver). Time in which the rank did not run counts as two ticks at most: renewals of that time are in
its queue, and it must get the chance to process them. A rank that never releases the interpreter lock therefore does
not end itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import ray

from raysharding.group.ranks import Member

_RENEWALS = 3  # renewals per lease


class LeaseRenewal:
    """Renews the leases of the ranks of a group, on a thread of the driver."""

    def __init__(self, members: Sequence[Member], lease_s: float | None, has_ray: Callable[[], bool]) -> None:
        """Start the thread, if there is a lease.

        Args:
            members: Members, by rank.
            lease_s: Length of the lease, in seconds; `None` for no lease.
            has_ray: Returns True if the Ray session of the ranks is still connected.
        """
        self._members = members
        self._lease_s = lease_s
        self._told_s: float | None = math.nan  # equal to no lease: none has been sent
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
        """Change the lease of the ranks at once; `None` ends it."""
        self._lease_s = lease_s
        self._changed.set()

    def stop(self) -> None:
        """Stop renewing, after a pending change has been sent."""
        self._is_stopped = True
        self._changed.set()

    def wait_heard(self, timeout_s: float) -> None:
        """Wait until the ranks have received the last change, after `stop`, or `timeout_s` passed.

        Ranks that outlive this driver would otherwise exit when their earlier lease expires.
        """
        until = time.monotonic() + timeout_s
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._has_ray() and (asked := list(self._asked.values())):
            ray.wait(asked, num_returns=len(asked), timeout=max(0.0, until - time.monotonic()))

    def explain(self) -> str:
        """Return a note for the error of a dead rank that its lease had expired; empty if it had not."""
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
        # A rank that has not processed the last renewal needs no other one, unless the lease changes.
        if before is not None and lease_s is not None and not ray.wait([before], timeout=0)[0]:
            return
        self._asked[rank] = member.actor.renew.remote(member.epoch, self._number, lease_s)
