"""`PendingSaves`: saves that the ranks write in the background, as the driver knows of them."""

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
    """What the driver follows saves by."""

    ask: Callable[[int], ray.ObjectRef]
    """Asks rank 0 for the `SaveStatus` of a save, by its number."""
    why_lost: Callable[[], str]
    """Says why its ranks are gone; empty while they are there."""
    on_saved: Callable[[], None]
    """Is called when it is committed, on a thread."""


class PendingSaves:
    """The failure of a save is raised once, by the next call; of several the first, with the others as notes."""

    def __init__(self) -> None:
        """There are none."""
        self._changed = threading.Condition()
        self._num_pending = 0
        self._moved = time.monotonic()
        self._errors: list[tuple[BegunSave, Exception]] = []

    def begin(self, save: BegunSave, call: Call, asking: Asking) -> None:
        """Follow a save, from the submission of its call on.

        Args:
            save: The save.
            call: Gives its number; what that fails of is the caller's to hear.
            asking: How it is followed.
        """
        with self._changed:
            self._num_pending += 1
            self._moved = time.monotonic()
        threading.Thread(
            target=self._follow, args=(save, call, asking), name="raysharding-pending", daemon=True
        ).start()

    def raise_failed(self) -> None:
        """Raise what a save failed of, once.

        Raises:
            CheckpointError: The disk is full or failed. Other errors as well, such as of ranks that are gone.
        """
        with self._changed:
            errors, self._errors = [error for _, error in self._errors], []
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"raysharding: and then, of another save: {other}")
            raise errors[0]

    def take_failed(self, paths: Collection[str], stall_s: float) -> list[Exception]:
        """Wait for the saves under way, and return what those to some paths failed of: no call raises that any more.

        Args:
            paths: Where they went.
            stall_s: Longest time without a byte written; what fails later is raised by the next call.
        """
        with suppress(TimeoutError):
            self._wait_ended(stall_s)
        with self._changed:
            taken = [error for save, error in self._errors if save.path in paths]
            self._errors = [(save, error) for save, error in self._errors if save.path not in paths]
        return taken

    def wait(self, stall_s: float) -> None:
        """Wait for the saves under way, and raise what one failed of.

        Args:
            stall_s: Longest time without a byte written.

        Raises:
            TimeoutError: Nothing was written for so long; they go on.
            Exception: As `raise_failed`.
        """
        self._wait_ended(stall_s)
        self.raise_failed()

    def _wait_ended(self, stall_s: float) -> None:
        with self._changed:
            while self._num_pending:
                left = self._moved + stall_s - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"a save in the background has written nothing for {stall_s:g} s; it goes on")
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
            error.add_note(f"raysharding: from the save to {save.path}, in the background")
        with self._changed:
            self._num_pending -= 1
            if error is not None:
                self._errors.append((save, error))
            self._changed.notify_all()

    def _watch(self, number: int, save: BegunSave, asking: Asking) -> Exception | None:
        """Ask until the save has ended; return what it failed of."""
        done = -1
        while True:
            why = asking.why_lost()
            if why:
                # Its ranks may have committed it before they went, and nobody has heard of it.
                return None if save.is_committed() else GroupError(f"the save was lost with its ranks: {why}")
            try:
                status = ray.get(asking.ask(number), timeout=_ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                continue  # slow to answer; `why_lost` tells when it is gone
            except ray.exceptions.RayActorError:
                time.sleep(_POLL_S)  # the supervision hears of it, too, and knows why
                continue
            if status.is_done:
                found: Exception | None = status.error
                return found
            if status.bytes_done != done:
                done = status.bytes_done
                self._note_move()
            time.sleep(_POLL_S)

    def _note_move(self) -> None:
        with self._changed:
            self._moved = time.monotonic()
            self._changed.notify_all()
