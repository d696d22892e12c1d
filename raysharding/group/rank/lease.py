"""`RankLease`: ends a rank that its controller does not reach any more, on a node that is cut off for good."""

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
        self._thread: threading.Thread | None = None

    def renew(self, lease_s: float | None) -> None:
        """Renew the lease.

        Control calls may arrive out of order, which is harmless: one controller renews, by one length.

        Args:
            lease_s: Length from now, in seconds; `None` ends the lease.
        """
        with self._lock:
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
