"""`PendingSaves`: the driver's view of the saves that the ranks write in the background.

`ModelFiles`: which files hold a group's model, as far as the driver knows, and by the files once ranks are gone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import ray

from raysharding.checkpoint import is_checkpoint, new_token, read_save_record, remove_unfinished
from raysharding.errors import CheckpointError, GroupError
from raysharding.group.calls.call import Call

_NUM_BEGUN = 64


@dataclass(frozen=True, eq=False)
class BegunSave:
    """A save that was requested from the ranks."""

    number: int
    """Position among all saves and loads."""
    path: str
    """Destination: a path or a normalized URI."""
    is_origin: bool
    """True if a restart may load the save."""
    token: str = field(default_factory=new_token)
    """Identifier of the save in its files, different from that of any other save."""

    def is_committed(self) -> bool:
        """Return True if this process sees this save at its path, and the save is complete."""
        try:
            return read_save_record(self.path).token == self.token and is_checkpoint(self.path)
        except CheckpointError:
            return False  # not visible here: the ranks' report counts


class ModelFiles:
    """Saves and loads of one group, by all ranks that it has had. Thread-safe."""

    def __init__(self, origin: str, begun: tuple[BegunSave, ...] = ()) -> None:
        """Begin with the checkpoint that the group was made from, or with the record of an earlier driver.

        Args:
            origin: A path or URI that does not depend on the working directory.
            begun: Saves begun since then whose outcome the earlier driver did not know.
        """
        self.origin = origin
        """The newest files that hold the model, which a restart would load."""
        self.saves: list[str] = []
        """Paths of the committed saves."""
        self._numbers = itertools.count(1 + max((save.number for save in begun), default=0))
        self._newest = 0
        self._begun = list(begun)
        self._lock = threading.Lock()

    @property
    def begun(self) -> tuple[BegunSave, ...]:
        """Saves whose outcome is not known."""
        with self._lock:
            return tuple(self._begun)

    def begin_save(self, path: str, *, is_origin: bool) -> BegunSave:
        """Record a save before it is requested from the ranks."""
        with self._lock:
            save = BegunSave(next(self._numbers), path, is_origin)
            self._begun = [*self._begun[1 - _NUM_BEGUN :], save]
        return save

    def begin_load(self) -> int:
        """Return the number of a new load, for `loaded`."""
        return next(self._numbers)

    def committed(self, save: BegunSave) -> None:
        """Record that a save is committed; a second call does nothing."""
        with self._lock:
            if save not in self._begun:
                return
            self._begun.remove(save)
            self.saves.append(save.path)
            if save.is_origin:
                self._set_origin(save.path, save.number)

    def loaded(self, path: str, number: int) -> None:
        """Record that the ranks hold the contents of these files."""
        with self._lock:
            self._set_origin(path, number)

    def settle(self) -> None:
        """Determine from the files how the saves with an unknown outcome ended, and remove their unfinished files.

        The writers of these saves are dead: a save that is not committed now never will be.
        """
        begun = self.begun
        for save in begun:
            remove_unfinished(save.path, save.token)
            if save.is_committed():
                self.committed(save)
        with self._lock:
            self._begun = [save for save in self._begun if save not in begun]

    def _set_origin(self, path: str, number: int) -> None:
        # A background save may be reported after a load that began later.
        if number > self._newest:
            self.origin, self._newest = path, number


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
