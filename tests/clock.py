"""`now`: a clock for upper bounds on machines that are shared, and stand still for seconds at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def now() -> float:
    """Return the time in seconds, less those for which the hypervisor ran other machines than this one.

    For `assert now() - begun < most` in whatever process on this machine, never for a lower bound: where all CPUs
    were taken away at once, each one's seconds are subtracted. On a machine of its own it is `time.time()`.
    """
    return time.time() - stolen()


def stolen() -> float:
    """Return the seconds, since the machine started, that its CPUs had work for and did not get (proc(5): steal)."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def wait_until(is_so: Callable[[], Any], within_s: float, what: str, every_s: float = 0.05) -> float:
    """Wait until something is so; returns how long it took, by `now`."""
    begun = now()
    while not is_so():
        assert now() - begun < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)
    return now() - begun
