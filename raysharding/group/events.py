"""`Events`: what has happened to a group, in one queue, and the one thread that acts on it.

Note [One queue]: everything that happens (a call is submitted, a rank finishes, raises, dies, answers a question)
becomes an event in one queue, and only the supervision thread acts on events. So there is one order of events, the
first failure is the first event, and no lock guards the state machine. Ray's futures put the events in; they fire
while ranks are idle too, because each actor's `lifetime` call is outstanding as long as the actor lives.

It is a thread of its own, not the one that waits for a call, though that would save each call two hand-overs: where the
program has a signal handler that raises (an alarm, a third Ctrl-C), Python raises in the main thread anywhere, and so
might leave the state machine between two states.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

Future = concurrent.futures.Future[Any]
"""What ends when a rank has answered, or is gone: made by Ray for an object of the ranks."""


class Events:
    """The queue and its thread, which ends with `close`. All methods but `act` are for any thread."""

    def __init__(
        self, name: str, patience: Callable[[], float], tick: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """Nothing runs before `start`.

        Args:
            name: The thread's.
            patience: Asked before each wait: seconds until something is due, whatever happens.
            tick: Run when they have passed.
            failed: Run before the thread ends by an exception of its own, which would hang every caller in silence.
        """
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._patience = patience
        self._tick = tick
        self._failed = failed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, event: Callable[[], None]) -> None:
        """Have `event` run on the thread, after all that was put before; it must not wait for long."""
        self._queue.put(event)

    def watch(self, future: Future, then: Callable[[Future], None]) -> None:
        """Turn the end of `future`, well or not, into an event."""
        future.add_done_callback(lambda future: self._queue.put(partial(then, future)))

    def is_own_thread(self) -> bool:
        """Whether the caller runs inside an event, and so must not wait for one."""
        return threading.current_thread() is self._thread

    def act(self, timeout_s: float) -> None:
        """Inside an event that has to wait: act on the next one, if one comes in time."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)()

    def close(self) -> None:
        """End the thread after the event that runs; later events are not acted on."""
        self._closed.set()

    def is_closed(self) -> bool:
        """Whether nobody acts on events any more."""
        return self._closed.is_set()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until nobody acts on events any more; return whether it came to that."""
        return self._closed.wait(timeout_s)

    def _loop(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    event = self._queue.get(timeout=self._patience())
                except queue.Empty:
                    event = self._tick
                event()
        except Exception as error:
            try:
                self._failed(error)
            finally:
                self._closed.set()
            raise
