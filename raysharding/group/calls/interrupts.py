"""Ctrl-C while the main thread waits for a call: the group stops at the next call boundary and keeps its weights.

Note [Ctrl-C]: the program's own SIGINT handler still runs. While the main thread waits for a call, a handler of this
module calls it and defers what it raises (KeyboardInterrupt, unless the program installed another handler), because
raising at once would leave a call running without a waiter. A handler that raises nothing has handled the signal
itself; in that case nothing else happens. If SIGINT is ignored, or its handler is not a Python function, this module
installs no handler.

1. the first interrupt cancels the calls in the queue, waits for the running call, then raises: the group is READY;
2. the second, during that wait, stops the ranks: the group is BROKEN, and the cause says so;
3. the third raises at once, whatever the controller does.

The steps of a `fit` are many calls: its first interrupt lets the steps in progress end, and everything that belongs to
them (`group/fit/stop_signal.py`).

A group that is still being made has no weights to keep, so the first interrupt undoes everything.
"""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from types import FrameType
from typing import Any, Protocol, Self

from raysharding.errors import CallCancelledError

Stopping = concurrent.futures.Future[int]
"""Ends when the call that was running at the interrupt has ended; its value is the number of cancelled calls."""


class Interruptible(Protocol):
    """The target of an interrupt: a group's client. Neither method waits."""

    def interrupt_soon(self, source: str) -> Stopping:
        """Cancel the calls in the queue. The user is shown `source` (`Ctrl-C`), or nothing if `source` is empty."""

    def abandon_soon(self, reason: str) -> None:
        """Stop the ranks now."""


class MaskedInterrupts:
    """A short context in which an exception could leave a lock held; it raises a deferred interrupt at its end.

    In the main thread Python may raise between acquiring a lock and entering its `with`: the lock would never be
    released. The context replaces the program's SIGINT handler in the main thread; it does nothing in other threads.
    """

    _installed: Any = None
    _previous: Any = None
    _raised: BaseException | None = None

    def __enter__(self) -> Self:
        # Only the main thread handles signals and may set a handler.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # not SIG_IGN, not SIG_DFL, not a handler of C code
                self._previous, self._installed = previous, self._on_signal
                signal.signal(signal.SIGINT, self._installed)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A handler that was set in the meantime is restored by the code that set it.
        if self._installed is not None and signal.getsignal(signal.SIGINT) is self._installed:
            signal.signal(signal.SIGINT, self._previous)
        if self._raised is not None and error is not self._raised:
            # A CallCancelledError adds nothing to the interrupt.
            raise self._raised from (None if isinstance(error, CallCancelledError) else error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous(number, frame)
        except BaseException as error:  # noqa: BLE001 - `_on_raised` or `__exit__` raises it
            self._on_raised(error)

    def _on_raised(self, error: BaseException) -> None:
        """Handle what the program's handler has raised."""
        self._raised = error


class DeferredInterrupts(MaskedInterrupts):
    """A context in which the main thread waits for a call of a group, and Ctrl-C cancels the calls behind it."""

    def __init__(self, target: Interruptible) -> None:
        """Install nothing; `__enter__` does.

        Args:
            target: The group's client.
        """
        self._target = target
        self._stopping: Stopping | None = None
        self._is_abandoned = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._stopping is not None and error is not self._raised:
                concurrent.futures.wait([self._stopping])
        finally:
            super().__exit__(kind, error, trace)

    def _on_raised(self, error: BaseException) -> None:
        is_second, self._raised = self._raised is not None, error
        if self._is_abandoned:
            raise error
        if is_second:
            self._is_abandoned = True
            self._target.abandon_soon("a second Ctrl-C")
        else:
            self._stopping = self._target.interrupt_soon("Ctrl-C")


class UndoOnInterrupt(MaskedInterrupts):
    """A context whose code cleans up when Ctrl-C raises in it; a second Ctrl-C does not interrupt the cleanup."""

    _num_raised = 0

    def _on_raised(self, error: BaseException) -> None:
        self._num_raised += 1
        if self._num_raised != 2:  # the third one interrupts the cleanup
            raise error
