"""`Ownership` of a rank by one driver at a time, and `RankLease`, which ends the rank of a driver that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICKS = 20  # checks of the lease per lease time
_MAX_TICK_S = 0.5


class RankLease:
    """Counts down on a thread of the rank, and calls `end` when the lease expires."""

    def __init__(self, end: Callable[[float], None]) -> None:
        """Start without a lease.

        Args:
            end: Ends the process; called with the length of the expired lease, in seconds.
        """
        self._end = end
        self._lock = threading.Lock()
        self._lease_s: float | None = None
        self._left_s = 0.0
        self._order = (0, 0)
        self._thread: threading.Thread | None = None

    def renew(self, lease_s: float | None, order: tuple[int, int] = (0, 0)) -> None:
        """Renew the lease.

        Args:
            lease_s: Length from now, in seconds; `None` ends the lease.
            order: Epoch of the driver and number of the renewal. Control calls may arrive out of order; an earlier
                renewal that arrives late has no effect.
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


class Ownership:
    """The epoch of the driver that owns a rank. Every driver of a group has its own; later ones are greater."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._given = 0

    def next_epoch(self) -> int:
        """Return the epoch for a new driver; it takes effect by `accept_epoch`."""
        with self._changed:
            self._given = max(self._given, self._epoch) + 1
            return self._given

    def accept_epoch(self, epoch: int) -> None:
        """Make the driver of this epoch the owner, unless a later one is the owner."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            self._changed.notify_all()

    def owns(self, epoch: int) -> bool:
        """Return True if the driver of this epoch owns the rank."""
        return epoch >= self._epoch

    def wait_superseded(self, epoch: int) -> None:
        """Block until a later driver is the owner, or the process ends: without a deadline, on a thread of its own."""
        with self._changed:
            self._changed.wait_for(lambda: not self.owns(epoch))
