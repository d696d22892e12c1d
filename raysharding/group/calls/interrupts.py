"""Ctrl-C while a call is waited for: the group stops at the next call boundary and keeps its weights.

Note [Ctrl-C]: the program's own SIGINT handler stays in charge. While the main thread waits for a call, a handler of
ours stands before it and puts off what it raises (KeyboardInterrupt, unless the program installed another), because
raising at once would leave a call running that nobody waits for. A handler that raises nothing has dealt with the
signal itself: then nothing happens here. Where SIGINT is ignored, or not Python's, it stays so.

1. the first interrupt cancels the calls in the queue, waits for the running call, then raises: the group is READY;
2. the second, while that wait lasts, stops the ranks: the group is BROKEN, and the cause says so;
3. the third raises at once, whatever the supervision does.

A group that is still being made has no weights to keep, so there the first interrupt undoes everything.
"""

from __future__ import annotations

import abc
import concurrent.futures
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from raysharding.errors import CallCancelledError

Stopping = concurrent.futures.Future[int]
"""Ends when the call that ran at an interrupt has ended; its value is the number of cancelled calls."""


class Interruptible(Protocol):
    """What an interrupt stops: a group's supervision. Nothing here waits but `wait_stopped`."""

    def interrupt_soon(self, source: str) -> Stopping:
        """Cancel the calls in the queue. `source` (`Ctrl-C`) is told to the user; empty: say nothing."""

    def wait_stopped(self, stopping: Stopping, timeout_s: float | None = None) -> None:
        """Wait until the running call has ended, which its own deadline bounds."""

    def abandon_soon(self, reason: str) -> None:
        """Stop the ranks now."""


class _Handler(abc.ABC):
    """Stands before the program's SIGINT handler inside a `with`, in the main thread; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._installed: Any = None
        self._previous: Any = None

    def _install(self) -> None:
        # Signals are handled in the main thread only, and only it may set a handler.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # not SIG_IGN, not SIG_DFL, not a handler of C code
                self._previous, self._installed = previous, self._on_signal
                signal.signal(signal.SIGINT, self._installed)

    def _restore(self) -> None:
        # Another handler that was set meanwhile is for whoever set it to take back.
        if self._installed is not None and signal.getsignal(signal.SIGINT) is self._installed:
            signal.signal(signal.SIGINT, self._previous)

    @abc.abstractmethod
    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT in the place of `_previous`."""


class DeferredInterrupts(_Handler):
    """A context in which the main thread waits for a call of a group; see Note [Ctrl-C]."""

    def __init__(self, target: Interruptible | None) -> None:
        """Nothing is installed before `__enter__`.

        Args:
            target: The group's supervision; `None` where there is nothing to stop.
        """
        super().__init__()
        self._target = target
        self._raised: BaseException | None = None
        self._stopping: Stopping | None = None
        self._is_abandoned = False

    def __enter__(self) -> Self:
        if self._target is not None:
            self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._target is not None and self._stopping is not None and error is not self._raised:
                self._target.wait_stopped(self._stopping)
        finally:
            self._restore()
        if self._raised is not None and error is not self._raised:
            # That a call was cancelled says nothing that the interrupt does not say.
            raise self._raised from (None if isinstance(error, CallCancelledError) else error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        assert self._target is not None
        try:
            self._previous(number, frame)
        except BaseException as error:
            is_third, is_second = self._is_abandoned, self._raised is not None
            self._raised = error
            if is_third:
                raise
            if is_second:
                self._is_abandoned = True
                self._target.abandon_soon("a second Ctrl-C")
            else:
                self._stopping = self._target.interrupt_soon("Ctrl-C")


class MaskedInterrupts(_Handler):
    """A context too short to wait for, in which an exception could leave a lock held; what was put off is raised last.

    In the main thread Python may raise between taking a lock and entering its `with`: nobody would ever release it.
    """

    def __init__(self) -> None:
        """Nothing is installed before `__enter__`."""
        super().__init__()
        self._raised: BaseException | None = None

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self._raised is not None:
            raise self._raised

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous(number, frame)
        except BaseException as error:  # noqa: BLE001 - whatever the program raises at an interrupt is raised, later
            self._raised = error


class UndoOnInterrupt(_Handler):
    """A context that undoes what it began when Ctrl-C raises in it; a second Ctrl-C does not disturb that."""

    def __init__(self) -> None:
        """Nothing is installed before `__enter__`."""
        super().__init__()
        self._num_raised = 0

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous(number, frame)
        except BaseException:
            self._num_raised += 1
            if self._num_raised != 2:  # the third is for whoever cannot wait for the undoing
                raise
