"""`StopSignal`: SIGTERM (a spot machine, Slurm, Kubernetes, `ray job stop`) ends a run after the steps in progress."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopSignal:
    """A context in which the first SIGTERM is recorded; the second stops the ranks and ends the program.

    The program's own handler is back after the context. Only the main thread may enter it, unless the signal is not
    wanted.
    """

    def __init__(self, *, is_wanted: bool, abandon: Callable[[str], None]) -> None:
        """Install nothing; `__enter__` does.

        Args:
            is_wanted: False to leave SIGTERM alone.
            abandon: Stops the ranks, without waiting; its argument is the reason.
        """
        self.came = False
        """True once SIGTERM has come."""
        self._is_wanted = is_wanted
        self._abandon = abandon
        self._previous: Any = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        # A handler that was set in the meantime is restored by the code that set it.
        if self._is_wanted and signal.getsignal(signal.SIGTERM) == self._on_signal:
            self._restore()

    def _restore(self) -> None:
        # `None`: a handler of C code, which Python cannot set again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            self.came = True
            return
        self._abandon("a second SIGTERM")
        self._restore()
        os.kill(os.getpid(), signal.SIGTERM)
