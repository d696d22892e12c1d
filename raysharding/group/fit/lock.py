"""`FitLock`: one `fit` runs on a group at a time, and nothing else changes the model meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raysharding.errors import CallCancelledError, GroupError
from raysharding.group.calls import MaskedInterrupts


class FitLock:
    """Held by the `fit` that runs on a group, through restarts of its ranks. Thread-safe."""

    def __init__(self) -> None:
        """Nobody holds it."""
        self._lock = threading.Lock()
        self._running: object | None = None
        self._is_interrupted = False

    @property
    def is_running(self) -> bool:
        """True while one runs."""
        return self._running is not None

    @contextmanager
    def running(self, group: str) -> Iterator[None]:
        """A context in which one runs.

        Args:
            group: The group's name in errors.

        Raises:
            GroupError: Another one runs.
        """
        run = object()
        try:
            with MaskedInterrupts(), self._lock:
                if self.is_running:
                    raise GroupError(
                        f"{group}: fit runs on it already, in another thread or around the callback that asks; a rank "
                        "has the data of one run at a time: wait for that fit to end, or end it by interrupt()"
                    )
                self._running, self._is_interrupted = run, False
            yield
        finally:
            if self._running is run:
                self._running = None

    def refuse(self, group: str, method: str) -> None:
        """Refuse what must not come between the steps of a run.

        Args:
            group: The group's name in errors.
            method: What is refused.

        Raises:
            GroupError: A `fit` runs.
        """
        if self.is_running:
            raise GroupError(
                f"{group}: {method} is refused while fit runs: the run's steps would no longer be those of its data. "
                "Call it when fit has returned"
            )

    def interrupt(self) -> None:
        """Have the `fit` that runs, if any, end before its next steps."""
        self._is_interrupted = True

    def check_interrupted(self, num_steps: int) -> None:
        """Raise where the `fit` that runs is to end.

        Args:
            num_steps: Steps of the run so far.

        Raises:
            CallCancelledError: `interrupt` was called.
        """
        if self._is_interrupted:
            raise CallCancelledError(f"interrupt() ended fit after step {num_steps}; resume=True goes on from there")
