"""`PendingSaves`: the driver's view of the saves that the ranks write in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import ray

from raysharding.errors import GroupError
from raysharding.group.calls.call import Call
from raysharding.group.calls.model_files import BegunSave

_POLL_S = 0.2
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Asking:
    """The callbacks with which the driver follows a save."""

    ask: Callable[[int], ray.ObjectRef]
    """Requests the `SaveStatus` of a save from rank 0, by the save's number."""
    why_lost: Callable[[], str]
    """Returns why the save's ranks are gone; an empty string while the ranks are alive."""
    on_saved: Callable[[], None]
    """Called on a thread when the save is committed."""


class PendingSaves:
    """Saves in progress and their failures.

    The next call raises a save's failure, once. If several saves failed, the call raises the first failure, with the
    others as notes.
    """

    def __init__(self) -> None:
        """Begin without saves."""
        self._changed = threading.Condition()
        self._num_pending = 0
        self._moved = time.monotonic()
        self._errors: list[tuple[BegunSave, Exception]] = []

    def begin(self, save: BegunSave, call: Call, asking: Asking) -> None:
        """Follow a save from the submission of its call.

        Args:
            save: The save.
            call: The call that returns the save's number; the call raises its own failure in the caller.
            asking: The callbacks that follow the save.
        """
        with self._changed:
            self._num_pending += 1
            self._moved = time.monotonic()
        threading.Thread(
            target=self._follow, args=(save, call, asking), name="raysharding-pending", daemon=True
        ).start()

    def raise_failed(self) -> None:
        """Raise the failure of a save, once.

        Raises:
            CheckpointError: The disk is full or failed. Other errors are raised too, for example if ranks are gone.
        """
        with self._changed:
            errors, self._errors = [error for _, error in self._errors], []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"raysharding: another save failed as well: {other}")
            raise errors[0]

    def take_failed(self, paths: Collection[str], stall_s: float) -> list[Exception]:
        """Wait for the saves in progress, and return the failures of saves to `paths`; no later call raises them.

        Args:
            paths: Destinations of the saves.
            stall_s: Longest time without a byte written; the next call raises failures that come later.
        """
        with suppress(TimeoutError):
            self._wait_ended(stall_s)
        with self._changed:
            taken = [error for save, error in self._errors if save.path in paths]
            self._errors = [(save, error) for save, error in self._errors if save.path not in paths]
        return taken

    def wait(self, stall_s: float) -> None:
        """Wait for the saves in progress, and raise the failure of a save.

        Args:
            stall_s: Longest time without a byte written.

        Raises:
            TimeoutError: Nothing was written for `stall_s`; the saves continue.
            Exception: As `raise_failed`.
        """
        self._wait_ended(stall_s)
        self.raise_failed()

    def _wait_ended(self, stall_s: float) -> None:
        with self._changed:
            while self._num_pending:
                left = self._moved + stall_s - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"a background save has written nothing for {stall_s:g} s; it continues")
                self._changed.wait(left)

    def _follow(self, save: BegunSave, call: Call, asking: Asking) -> None:
        error: Exception | None = None
        try:
            while not call.wait(_POLL_S):
                self._note_move()  # the call has a deadline of its own
            if call.succeeded():
                error = self._watch(call.value(0), save, asking)
                if error is None:
                    asking.on_saved()
        except Exception as raised:  # noqa: BLE001 - the next call raises it
            error = raised if isinstance(raised, GroupError) else GroupError(f"{type(raised).__name__}: {raised}")
        if error is not None and not getattr(error, "__notes__", ()):
            error.add_note(f"raysharding: raised by the background save to {save.path}")
        with self._changed:
            self._num_pending -= 1
            if error is not None:
                self._errors.append((save, error))
            self._changed.notify_all()

    def _watch(self, number: int, save: BegunSave, asking: Asking) -> Exception | None:
        """Poll until the save has ended; return its failure, or `None`."""
        done = -1
        while True:
            why = asking.why_lost()
            if why:
                # The ranks may have committed the save before they died, without the driver's knowledge.
                return None if save.is_committed() else GroupError(f"the save was lost with its ranks: {why}")
            try:
                status = ray.get(asking.ask(number), timeout=_ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                continue  # rank 0 is slow to answer; `why_lost` reports when it is gone
            except ray.exceptions.RayActorError:
                time.sleep(_POLL_S)  # the supervision notices the death as well, and knows its cause
                continue
            if status.is_done:
                failure: Exception | None = status.error
                return failure
            if status.bytes_done != done:
                done = status.bytes_done
                self._note_move()
            time.sleep(_POLL_S)

    def _note_move(self) -> None:
        with self._changed:
            self._moved = time.monotonic()
            self._changed.notify_all()
