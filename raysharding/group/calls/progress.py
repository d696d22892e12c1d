"""Progress of loads and runs: a bar in a terminal or notebook, lines on stderr elsewhere (a job's log)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn, Self, TypeAlias

from tqdm.auto import tqdm

from raysharding.group.calls.call import Call
from raysharding.group.cluster import tell
from raysharding.units import format_bytes

ProgressOption = bool | Callable[[int, int], None] | None
_REFRESH_S = 0.1
_LINE_S = 10.0
_PARTS = 10
_PART_S = 1.0


class LogLines:
    """Progress as lines on stderr, with the methods of a tqdm bar that this package uses.

    The first line comes after 10 s. The next ones come every 10 s or every tenth of the total, whichever is first, but
    at most once a second. The last line comes at the end.
    """

    def __init__(self, title: str, unit: str, total: int | None, done: int) -> None:
        """Begin; no line is written yet.

        Args:
            title: Beginning of each line.
            unit: What is counted; `B`: bytes.
            total: Number at the end; `None` if unknown.
            done: Number at the beginning.
        """
        self.n = done
        self.total = total
        self._title, self._unit = title, unit
        self._note = ""
        self._first = self._n_written = done
        self._begun = self._written_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write(time.monotonic())

    def set_postfix_str(self, note: str, refresh: bool = False) -> None:
        """Set what the next line says beside the numbers."""
        self._note = note

    def update(self, number: int) -> None:
        """Add to the number that is done; write a line if it is time."""
        self.n += number
        now = time.monotonic()
        is_part = bool(self.total) and (self.n - self._n_written) * _PARTS >= (self.total or 0)
        is_due = now - self._written_at >= (_PART_S if is_part else _LINE_S)
        if is_due and now - self._begun >= _LINE_S and self.n != self.total:
            self._write(now)

    def _write(self, now: float) -> None:
        seconds, done = now - self._begun, self.n - self._first
        is_bytes = self._unit == "B"
        show = format_bytes if is_bytes else "{:,}".format
        unit = "" if is_bytes else f" {self._unit}"
        whole = f" of {show(self.total)}{unit} ({self.n / self.total:.0%})" if self.total else unit
        rate = f"{format_bytes(done / seconds)}/s" if is_bytes and seconds else ""
        if self._unit == "rows" and seconds:
            rate = f"{done / seconds:,.1f} rows/s"
        took = f"{tqdm.format_interval(seconds)} passed"
        left = ""
        if self.total and done and self.n < self.total:
            left = f"{tqdm.format_interval((self.total - self.n) * seconds / done)} left"
        tell(
            ", ".join(part for part in (f"{self._title}: {show(self.n)}{whole}", self._note, rate, took, left) if part)
        )
        self._written_at, self._n_written = now, self.n


ProgressBar: TypeAlias = "tqdm[NoReturn] | LogLines"


def progress_bar(option: bool | None, title: str, unit: str, total: int | None, done: int = 0) -> ProgressBar:
    """Return what shows progress: a context with `n`, `total`, `update(number)` and `set_postfix_str(note)`.

    Args:
        option: `True`: a bar; `False`: nothing; `None`: a bar in a terminal or notebook, lines on stderr elsewhere.
        title: Label.
        unit: What is counted; `B`: bytes.
        total: Number at the end; `None` if unknown.
        done: Number at the beginning.
    """
    if option is None and not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return LogLines(title, unit, total, done)
    scale = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return tqdm(desc=title, unit=unit, total=total, initial=done, disable=option is False, **scale)


def follow(call: Call, title: str, num_bytes: int, option: ProgressOption) -> None:
    """Show a call's progress in bytes until the call ends, with or without an error.

    Args:
        call: A call with `watch_progress`, whose bytes the controller asks the ranks for.
        title: Label of the bar.
        num_bytes: Bytes in total, used until the ranks report their own total.
        option: A callable is called with the bytes done and the bytes in total, about five times a second and once at
            the end. Else as of `progress_bar`.
    """
    if callable(option):
        _watch(call, num_bytes, option)
        return
    with progress_bar(option, title, "B", num_bytes) as bar:

        def draw(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        _watch(call, num_bytes, draw)


def _watch(call: Call, num_bytes: int, show: Callable[[int, int], None]) -> None:
    reported = None
    while True:
        is_done = call.wait(_REFRESH_S)
        done, total = call.progress
        total = total or num_bytes
        # The ranks were last probed before the last byte: a load that succeeded is complete.
        now = (total, total) if is_done and call.error() is None else (done, total)
        if now != reported:
            show(*now)
            reported = now
        if is_done:
            return
