"""Teardown of a group: stop the actors, remove the placement group, also at the exit of the program.

Leases of ranks: a rank exits unless its driver renews its lease, by `LeaseRenewal`; `RankLease` counts down.

Note [Lease]: Ray frees the ranks of a driver that died, but not the ranks of a frozen driver (SIGSTOP, a debugger, a
paused machine) or of a named group. A lease frees these. The driver renews it by a control call, which does not wait
for running calls, on a thread, which does not wait for a busy main thread (a main thread that keeps the interpreter
lock is a frozen driver). Time in which the rank did not run counts as two ticks at most: renewals of that time are in
its queue, and it must get the chance to process them. A rank that never releases the interpreter lock therefore does
not end itself.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import ray

from raysharding.group.ranks import Member

_STOP_S = 3.0


class Closable(Protocol):
    """An object that must clean up when the program ends."""

    def leave(self) -> None:
        """Clean up, and wait until that is done."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # they belong to the parent process


def close_at_exit(closable: Closable) -> None:
    """Call `closable.leave()` at exit, before Ray's exit handlers: this module is imported after Ray."""
    _open.add(closable)


@atexit.register
def _close_all() -> None:
    for closable in list(_open):
        closable.leave()


class Teardown:
    """Stops the actors of one group and removes its placement group, once."""

    def __init__(self, members: Sequence[Member], release: Callable[[], None]) -> None:
        """Record the actors.

        Args:
            members: Members, by rank.
            release: Removes the placement group.
        """
        self._members = members
        self._release = release
        self._session = _ray_session()
        self._is_stopped = False
        self.is_let_go = False

    def has_ray(self) -> bool:
        """Return True if the Ray session of the ranks is still connected; after a new `ray.init()` it is not."""
        return _ray_session() == self._session

    def let_go(self) -> None:
        """Leave the actors and the placement group to another driver; `stop` then does nothing."""
        self._is_stopped = self.is_let_go = True

    def stop(self, *, gcs_answers: bool = True) -> None:
        """Stop the actors and remove the placement group.

        Args:
            gcs_answers: True if the GCS answers. Without the GCS Ray cannot stop actors, and waits: the ranks are told
                to exit at once, else after 3 s.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if not self.has_ray():
            return  # the shutdown of Ray has ended the job and its actors
        stopping = threading.Thread(target=self._stop, name="stop ranks", daemon=True)
        stopping.start()
        stopping.join(_STOP_S if gcs_answers else 0.0)
        if stopping.is_alive():
            for member in self._members:
                member.actor.end.remote()  # from process to process, without the GCS

    def stop_some(self, ranks: Collection[int]) -> None:
        """Stop some actors and keep the others; does not wait."""
        if ranks and not self._is_stopped and self.has_ray():
            threading.Thread(target=self._kill, args=(ranks,), name="stop lost ranks", daemon=True).start()

    def _kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if self.has_ray():  # after ray.shutdown(), ray.kill would start Ray anew
                ray.kill(self._members[rank].actor, no_restart=True)

    def _stop(self) -> None:
        self._kill(range(len(self._members)))
        if self.has_ray():
            self._release()


def _ray_session() -> tuple[str, str] | None:
    """Return an identifier of this program's Ray session; `None` without one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()  # job ids alone repeat in a new cluster


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
