"""`PendingSaves`: the driver's view of the saves that the ranks write in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from raysharding.checkpoint import read_save_record
from raysharding.checkpoint.writing import is_checkpoint
from raysharding.errors import CheckpointError, GroupError
from raysharding.group.calls.call import Call
from raysharding.group.cluster import tell
from raysharding.group.messages import BegunSave

_POLL_S = 0.2


def is_committed(save: BegunSave) -> bool:
    """Return True if this process sees this save at its path, and the save is complete."""
    try:
        return read_save_record(save.path).token == save.token and is_checkpoint(save.path)
    except CheckpointError:
        return False  # not visible here: the ranks' report counts


class PendingSaves:
    """Saves of this driver in progress and their failures.

    The next call raises a save's failure, once. If several saves failed, the call raises the first failure, with the
    others as notes.
    """

    def __init__(self, written: Callable[[], Mapping[str, int]]) -> None:
        """Begin without saves.

        Args:
            written: Returns token → bytes written of the saves in progress.
        """
        self._written = written
        self._changed = threading.Condition()
        self._pending: dict[str, tuple[BegunSave, Call]] = {}
        self._errors: list[tuple[BegunSave, Exception]] = []

    def begin(self, save: BegunSave, call: Call) -> None:
        """Add a save whose call is submitted; a call that fails raises that itself."""
        with self._changed:
            self._pending[save.token] = save, call
        call.when_done(lambda ended: None if ended.error() is None else self.note({save.token: None}))

    def note(self, ended: Mapping[str, Exception | None]) -> None:
        """Take the outcomes of saves, by token; those of other drivers are ignored."""
        with self._changed:
            for token in [token for token in self._pending if token in ended]:
                (save, _), error = self._pending.pop(token), ended[token]
                if error is not None:
                    error.add_note(f"raysharding: raised by the background save to {save.path}")
                    self._errors.append((save, error))
            self._changed.notify_all()

    def lose(self, cause: GroupError, what: str = "the save was lost with its ranks") -> None:
        """End all saves in progress.

        Args:
            cause: Why they count as ended.
            what: What has become of them, for the error.
        """
        message = f"{what}: {str(cause).splitlines()[0]}"
        self.note({token: GroupError(message) for token in list(self._pending)})

    def restarted(self) -> None:
        """End the saves in progress, whose ranks are gone, and tell the failures that no call has raised.

        Calls on the new ranks do not raise what failed on the old ones.
        """
        self.lose(GroupError("the group was restarted"))
        for save, error in self._take_errors():
            tell(f"the background save to {save.path} failed: {str(error).partition(chr(10))[0]}")

    def raise_failed(self) -> None:
        """Raise the failure of a save, once.

        Raises:
            CheckpointError: The disk is full or failed. Other errors are raised too, for example if ranks are gone.
        """
        errors = [error for _, error in self._take_errors()]
        for other in errors[1:]:
            errors[0].add_note(f"raysharding: another save failed as well: {other}")
        if errors:
            raise errors[0]

    def take_failed(self, paths: Collection[str], stall_s: float) -> list[Exception]:
        """Wait for the saves in progress, and return the failures of saves to `paths`; no later call raises them.

        Args:
            paths: Destinations of the saves.
            stall_s: Longest time without a byte written; the next call raises failures that come later.
        """
        with suppress(TimeoutError):
            self._wait_ended(stall_s)
        return [error for _, error in self._take_errors(paths)]

    def _take_errors(self, paths: Collection[str] | None = None) -> list[tuple[BegunSave, Exception]]:
        with self._changed:
            taken = [one for one in self._errors if paths is None or one[0].path in paths]
            self._errors = [one for one in self._errors if one not in taken]
        # The ranks may have committed a save before they died, without a report. It is read here, on the thread of the
        # caller: the storage may be slow, and the thread that calls `note` ends all calls.
        return [one for one in taken if not is_committed(one[0])]

    def wait(self, stall_s: float, *, of_all: bool = False) -> None:
        """Wait for the saves in progress, and raise the failure of a save of this driver.

        Args:
            stall_s: Longest time without a byte written.
            of_all: True to wait also for the saves of other drivers that the ranks have begun.

        Raises:
            TimeoutError: Nothing was written for `stall_s`; the saves continue.
            Exception: As `raise_failed`.
        """
        self._wait_ended(stall_s, of_all=of_all)
        self.raise_failed()

    def _wait_ended(self, stall_s: float, *, of_all: bool = False) -> None:
        moved, before = time.monotonic(), dict[str, int]()
        while self._pending or of_all:
            written = dict(self._written())
            with self._changed:
                if not (self._pending or (of_all and written)):
                    return
                self._changed.wait(_POLL_S)
                is_queued = not all(call.done() for _, call in self._pending.values())
            if is_queued or written != before:  # a call that is queued or runs has a deadline of its own
                moved, before = time.monotonic(), written
            elif time.monotonic() - moved > stall_s:
                raise TimeoutError(f"a background save has written nothing for {stall_s:g} s; it continues")
