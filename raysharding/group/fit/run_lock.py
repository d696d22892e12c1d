"""`RunLock`: one `fit` or `predict` runs on a group at a time, and nothing else changes the model during it.

It stands for the controller's `ModelLock`, which binds all drivers: this driver's own calls are refused without asking
there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raysharding.errors import CallCancelledError, GroupError
from raysharding.group.calls import Client, MaskedInterrupts
from raysharding.group.fit.report import FitReport, FitStep

REFUSED_BESIDE = {
    "fit": "the run's steps would no longer depend on its data alone",
    "predict": "its rows would come from different weights",
    "forward_backward": "the gradients of one step would be of two drivers",
}
"""Kind of a lock → why calls that change the model are refused beside it."""


class RunLock:
    """Held by the `fit` or `predict` that runs on a group, also through restarts of its ranks. Thread-safe."""

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.Lock()
        self._running: str | None = None
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

    @property
    def held(self) -> tuple[str, str] | None:
        """Kind and key of the controller's lock; a restart takes it again, because a new controller has none."""
        return None if self._running is None else (self._what, self._running)

    @contextmanager
    def running(self, client: Client, what: str = "fit") -> Iterator[None]:
        """Return a context in which a `fit` or `predict` holds this lock, and the controller's.

        Args:
            client: The group.
            what: Name of the method that runs.

        Raises:
            GroupError: Another one runs, here or in another driver.
        """
        run = secrets.token_hex(8)
        try:
            with MaskedInterrupts(), self._lock:
                if self.is_running:
                    raise GroupError(
                        f"{client.name}: {self._what} already runs on it, in another thread or around the callback "
                        "that made this call; a rank has the data of one run at a time: wait for that "
                        f"{self._what} to end, or call interrupt()"
                    )
                self._running, self._is_interrupted, self._what = run, False, what
                if what == "fit":
                    self._last_step = None
            client.take_lock(what, run)
            yield
        finally:
            if self._running is run:
                try:
                    client.release_lock(run)
                finally:
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
            raise GroupError(
                f"{group}: {method} is refused while {self._what} runs: {REFUSED_BESIDE[self._what]}. Call it after "
                f"{self._what} has returned"
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
