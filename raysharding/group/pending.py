"""`PendingSave`: the save that the ranks write in the background, as the driver knows of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import ray

from raysharding.errors import GroupError

_POLL_S = 0.2
_ANSWER_S = 10.0


@dataclass(frozen=True)
class SaveStatus:
    """What rank 0 says of its save."""

    is_saving: bool
    """Whether it is under way."""
    error: Exception | None
    """What it failed of."""


class PendingSave:
    """At most one save at a time. Its failure is raised once, by the next call."""

    def __init__(self) -> None:
        """There is none."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._done.set()
        self._path = ""
        self._error: Exception | None = None

    def begin(self, path: str, ask: Callable[[], ray.ObjectRef], on_saved: Callable[[str], None]) -> None:
        """Follow a save that the ranks have begun.

        Args:
            path: Where it goes.
            ask: Asks rank 0 for its `SaveStatus`.
            on_saved: Called with the path, on a thread, when the save is committed.
        """
        self._path = path
        self._done.clear()
        threading.Thread(target=self._follow, args=(ask, on_saved), name="raysharding-pending", daemon=True).start()

    def raise_failed(self) -> None:
        """Raise what a save failed of, once.

        Raises:
            CheckpointError: The disk is full or failed. Other errors as well, such as of a rank that is gone.
        """
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            error.add_note(f"raysharding: from the save to {self._path}, in the background")
            raise error

    def wait(self, timeout_s: float) -> None:
        """Wait for the save under way, if there is one, and raise what it failed of.

        Raises:
            TimeoutError: It was not done in time; it goes on.
            Exception: As `raise_failed`.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save to {self._path} in the background is not done after {timeout_s:g} s")
        self.raise_failed()

    def _follow(self, ask: Callable[[], ray.ObjectRef], on_saved: Callable[[str], None]) -> None:
        error: Exception | None = None
        try:
            status = SaveStatus(is_saving=True, error=None)
            while status.is_saving:
                self._done.wait(_POLL_S)
                status = ray.get(ask(), timeout=_ANSWER_S)
            error = status.error
            if error is None:
                on_saved(self._path)
        except (ray.exceptions.RayError, GroupError) as lost:
            error = GroupError(f"the save to {self._path} in the background was lost with rank 0: {lost}")
        finally:
            with self._lock:
                self._error = error
            self._done.set()
