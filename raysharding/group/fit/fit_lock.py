"""`FitLock`: one `fit` or `predict` runs on a group at a time, and nothing else changes the model during it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raysharding.errors import CallCancelledError, GroupError
from raysharding.group.calls import MaskedInterrupts
from raysharding.group.fit.report import FitReport, FitStep


class FitLock:
    """Held by the `fit` or `predict` that runs on a group, also through restarts of its ranks. Thread-safe."""

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.Lock()
        self._running: object | None = None
        self._what = "fit"
        self._is_interrupted = False
        self.last_report: FitReport | None = None
        """Report of the last run that has ended, complete or not."""
        self._last_step: FitStep | None = None

    @property
    def last_step(self) -> str:
        """The last step of the running `fit`, or of the last one, for people; empty before a step."""
        if self._last_step is None:
            return ""
        return f"{'fit' if self.is_running and self._what == 'fit' else 'last fit'}: {self._last_step}"

    def note(self, step: FitStep) -> None:
        """Store the last step; a callback of `FitRun`."""
        self._last_step = step

    @property
    def is_running(self) -> bool:
        """True while a `fit` or `predict` runs."""
        return self._running is not None

    @contextmanager
    def running(self, group: str, what: str = "fit") -> Iterator[None]:
        """Return a context in which a `fit` or `predict` holds the lock.

        Args:
            group: The group's name in errors.
            what: Name of the method that runs.

        Raises:
            GroupError: Another one runs.
        """
        run = object()
        try:
            with MaskedInterrupts(), self._lock:
                if self.is_running:
                    raise GroupError(
                        f"{group}: {self._what} already runs on it, in another thread or around the callback that made "
                        f"this call; a rank has the data of one run at a time: wait for that {self._what} to end, or "
                        "call interrupt()"
                    )
                self._running, self._is_interrupted, self._what = run, False, what
                if what == "fit":
                    self._last_step = None
            yield
        finally:
            if self._running is run:
                self._running = None

    def refuse(self, group: str, method: str) -> None:
        """Refuse a method that must not run between the steps of a `fit` or `predict`.

        Args:
            group: The group's name in errors.
            method: Name of the refused method.

        Raises:
            GroupError: One runs.
        """
        if self.is_running:
            why = "its rows would come from different weights"
            if self._what == "fit":
                why = "the run's steps would no longer depend on its data alone"
            raise GroupError(
                f"{group}: {method} is refused while {self._what} runs: {why}. Call it after {self._what} has returned"
            )

    def interrupt(self) -> None:
        """Make the running `fit` or `predict`, if any, end before its next steps."""
        self._is_interrupted = True

    def check_interrupted(self, message: str) -> None:
        """Raise if the run is to end.

        Args:
            message: Text of the error.

        Raises:
            CallCancelledError: `interrupt` was called.
        """
        if self._is_interrupted:
            raise CallCancelledError(message)
