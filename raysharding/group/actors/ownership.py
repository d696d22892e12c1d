"""`Ownership`: a rank obeys one driver at a time, the one that came last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICKS = 20  # of the rank's watch, in one lease
_MAX_TICK_S = 0.5


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


class Ownership:
    """The epoch of the driver that a rank obeys. Every driver of a group has its own; later ones are greater."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._given = 0

    def next_epoch(self) -> int:
        """Return the epoch of a driver that comes now; it begins with `accept_epoch`."""
        with self._changed:
            self._given = max(self._given, self._epoch) + 1
            return self._given

    def accept_epoch(self, epoch: int) -> None:
        """Obey the driver of this epoch from now on, unless a later one is here already."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            self._changed.notify_all()

    def owns(self, epoch: int) -> bool:
        """Whether the driver of this epoch is the one to obey."""
        return epoch >= self._epoch

    def wait_superseded(self, epoch: int) -> None:
        """Block until a later driver comes, or the process ends: no deadline, the caller's thread is there for that."""
        with self._changed:
            self._changed.wait_for(lambda: not self.owns(epoch))
