"""Signals that end a run after the steps in progress.

`StopSignal`: SIGTERM (a spot machine, Slurm, Kubernetes, `ray job stop`); `NotedInterrupts`: Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

from raysharding.group.calls import Client, MaskedInterrupts


class StopSignal:
    """A context in which the first SIGTERM is recorded; the second stops the ranks and ends the program.

    The program's own handler is back after the context. Only the main thread may enter it, unless the signal is not
    wanted.
    """

    def __init__(self, client: Client, *, is_wanted: bool) -> None:
        """Install nothing; `__enter__` does.

        Args:
            client: The group.
            is_wanted: False to leave SIGTERM alone.
        """
        self.came = False
        """True once SIGTERM has come."""
        self._is_wanted = is_wanted
        self._client = client
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
        self._client.abandon_soon("a second SIGTERM")
        self._restore()
        os.kill(os.getpid(), signal.SIGTERM)


class NotedInterrupts(MaskedInterrupts):
    """A context whose code ends soon after Ctrl-C `came`, with complete results; its end raises.

    The second Ctrl-C raises at once; if a call runs, it stops the ranks.
    """

    def __init__(self, client: Client) -> None:
        """Install nothing; `__enter__` does.

        Args:
            client: The group.
        """
        super().__init__()
        self._client = client

    @property
    def came(self) -> bool:
        """True once Ctrl-C has come."""
        return self._raised is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second = self.came
        super()._on_signal(number, frame)
        if not self.came:
            return  # the program's own handler has handled it
        if is_second:
            if signal.getsignal(signal.SIGINT) is not self._installed:  # below the handler of a wait for a call
                self._client.abandon_soon("a second Ctrl-C")
            assert self._raised is not None
            raise self._raised
        what = "ends after the steps in progress; once more stops the ranks, and their weights are lost"
        self._client.tell_soon(f"Ctrl-C: fit {what}")
