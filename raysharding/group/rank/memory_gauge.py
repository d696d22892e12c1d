"""Exports the memory of a rank as a metric of Ray, from a thread of its own, also while a command runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Gauge

_EXPORT_S = 5.0


def export_memory(group: str, rank: int, status: Callable[[], Mapping[str, Any]]) -> None:
    """Start a thread that gives Ray the resident and the device memory of this process every 5 s, in bytes.

    Args:
        group: The tag `group`.
        rank: The tag `rank`.
        status: Returns the rank's status, with the keys `host_bytes` and `device_bytes`.
    """
    described = "Memory of a rank in bytes: resident on the host, and allocated by torch on its device"
    gauge = Gauge("raysharding_memory_bytes", described, tag_keys=("group", "rank", "kind"))

    def run() -> None:
        while True:  # the thread is a daemon: it ends with the process
            now = status()
            for kind in ("host", "device"):
                gauge.set(now[f"{kind}_bytes"], tags={"group": group, "rank": str(rank), "kind": kind})
            time.sleep(_EXPORT_S)

    threading.Thread(target=run, name="export memory", daemon=True).start()
