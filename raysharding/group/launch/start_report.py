"""`StartReport`: where the time from the call of `from_checkpoint` to a READY group went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raysharding.report import Report, Table

_HEADER = ("phase", "seconds", "on the slowest rank")
_LEAST_S = 0.05


@dataclass(frozen=True)
class StartPhase:
    """One phase of a start."""

    name: str
    """Name of what the driver did, or waited for."""
    seconds: float
    """Seconds of the driver."""
    slowest: Mapping[str, float]
    """Part → its seconds on the rank for which they sum to most. Processes start while the model is checked here, and a
    model's code is imported while ranks connect: such parts are longer than what the driver waited for them."""


@dataclass(frozen=True, repr=False)
class StartReport(Report):
    """Report of a start or restart. `str(report)` is for people, `as_dict()` for programs."""

    phases: tuple[StartPhase, ...]
    """The phases, one after the other: their seconds sum to `seconds`."""

    @property
    def seconds(self) -> float:
        """Seconds from the call to the READY group, by the driver's clock."""
        return sum(phase.seconds for phase in self.phases)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and `seconds` as a JSON value."""
        return asdict(self) | {"seconds": self.seconds}

    def line(self) -> str:
        """Return the longest phases in one line, for logs."""
        longest = [f"{one.name} {one.seconds:.1f}" for one in self.phases if one.seconds >= _LEAST_S]
        return f"{self._title()}{': ' if longest else ''}{', '.join(longest)}"

    def _title(self) -> str:
        return f"ready after {self.seconds:.2f} s"

    def _parts(self) -> list[Table]:
        return [Table(_HEADER, [(one.name, f"{one.seconds:.2f}", _listed(one.slowest)) for one in self.phases])]


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


class StartClock:
    """Splits the time of a start into phases: the end of one is the beginning of the next."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._phases: list[StartPhase] = []

    def end(self, name: str, ranks: Sequence[Mapping[str, float]] = ()) -> None:
        """End a phase.

        Args:
            name: What the driver did, or waited for.
            ranks: By rank: part → seconds.
        """
        now = time.monotonic()
        slowest = max(ranks, key=lambda parts: sum(parts.values()), default={})
        self._phases.append(StartPhase(name, now - self._begun, dict(slowest)))
        self._begun = now

    def report(self) -> StartReport:
        """Return the report of the phases that have ended."""
        return StartReport(tuple(self._phases))
