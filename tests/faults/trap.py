"""Faults at a chosen moment, in real processes: what a rank does to itself, and what the driver does to a rank.

A model callable runs on every rank. The one that `trapped` returns watches the `RankStatus` of the rank's `Worker` from
there on, and when it comes to the moment asked for, the process kills, stops or blocks itself for real. What the
library does afterwards is its own code, unchanged.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from tests.clock import now

How = Literal["kill", "terminate", "stop", "segfault", "hold the GIL"]

WIDTH = 32
NUM_LAYERS = 8
BUCKET_BYTES = 4096


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when."""

    how: How
    """SIGKILL, SIGTERM, SIGSTOP, a segmentation fault, or a thread that keeps the GIL for good."""
    rank: int
    """The rank."""
    call: str
    """`RankStatus.last_call` at that moment."""
    phase: str
    """`RankStatus.phase` at that moment."""
    min_bytes: int = 0
    """Bytes that the load or save must have moved."""


class Trap:
    """One fault of one group, and the clock of when it struck."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.fault = fault
        self._clock = folder / f"struck-{fault.rank}"

    @property
    def struck_at(self) -> float:
        """`now()` of the fault."""
        return float(self._clock.read_text())

    def since(self) -> float:
        """Seconds from the fault until now."""
        return now() - self.struck_at

    def model(self) -> Callable[[], nn.Module]:
        """Return the model callable that sets the trap on every rank."""
        return trapped(self.fault, str(self._clock))


def striker(how: How, clock: str) -> Callable[[], None]:
    """Return a function that notes the time and then does the fault to its own process. Pickles by value."""

    def strike() -> None:
        import ctypes
        import os
        import signal

        from tests.clock import now

        # Whole before it is seen, and seen before the process is gone.
        with open(clock + "-partial", "w") as file:
            file.write(repr(now()))
        os.rename(clock + "-partial", clock)
        signals = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
        if how in signals:
            os.kill(os.getpid(), signals[how])
        elif how == "segfault":
            ctypes.string_at(0)
        else:
            ctypes.PyDLL(None).sleep(1000)

    return strike


def trapped(fault: Fault, clock: str) -> Callable[[], nn.Module]:
    """Return a callable that builds the model and watches the status of its `Worker`. Pickles by value."""
    strike, width, num_layers = striker(fault.how, clock), WIDTH, NUM_LAYERS
    moment, min_bytes = (fault.rank, fault.call, fault.phase), fault.min_bytes

    def build() -> nn.Module:
        import sys
        from typing import Any

        from torch import nn

        frame: Any = sys._getframe()
        while type(frame.f_locals.get("self")).__name__ != "Worker":
            frame = frame.f_back
        status = frame.f_locals["self"].status

        class Watched(type(status)):  # type: ignore[misc]
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                # What the worker sets last when a call begins, and when bytes have moved.
                if name not in ("last_call", "bytes_done") or (self.rank, self.last_call, self.phase) != moment:
                    return
                if not min_bytes or (name == "bytes_done" and value >= min_bytes):
                    strike()

        status.__class__ = Watched
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    return build


def slow_reads(seconds_per_read: float) -> Callable[[], nn.Module]:
    """Return a model callable that, once on a rank, makes every read of a checkpoint file slow. Pickles by value."""
    width, num_layers = WIDTH, NUM_LAYERS

    def build() -> nn.Module:
        from typing import Any

        from torch import nn

        from raysharding.checkpoint import FileReader

        read_ranges = FileReader.read_ranges

        def slow(reader: FileReader, file: int, ranges: Any) -> None:
            for item in ranges:
                time.sleep(seconds_per_read)
                read_ranges(reader, file, [item])

        FileReader.read_ranges = slow  # type: ignore[method-assign,assignment]
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    return build


def signal_rank(pid: int, how: How) -> None:
    """Send a rank what the operating system can send it."""
    os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def plain_model() -> Callable[[], nn.Module]:
    """The model of `trapped`. Pickles by value."""
    width, num_layers = WIDTH, NUM_LAYERS

    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    return build
