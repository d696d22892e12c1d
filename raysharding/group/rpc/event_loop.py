"""`Events`: what has happened to a group, in one queue, and the one thread that acts on it.

Note [One queue]: everything that happens (a call is submitted, a rank finishes, raises, dies, answers a question)
becomes an event in one queue, and only the supervision thread acts on events. So there is one order of events, the
first failure is the first event, and no lock guards the state machine. What comes over a rank's line is put in by the
thread itself, which waits at all lines and at the queue at once; the rest by Ray's futures, which fire while ranks are
idle too, because each actor's `lifetime` call is outstanding as long as the actor lives.

It is a thread of its own, not the one that waits for a call, though that would save each call two hand-overs: where the
program has a signal handler that raises (an alarm, a third Ctrl-C), Python raises in the main thread anywhere, and so
might leave the state machine between two states.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from raysharding.errors import GroupError

Future = concurrent.futures.Future[Any]
"""What ends when a rank has answered, or is gone: made by Ray for an object of the ranks."""


class _SupervisionThread(threading.Thread):
    """The thread of some group's `Events`."""


def is_supervision_thread() -> bool:
    """Whether this is the thread of some group's `Events`, on which callbacks of calls run."""
    return isinstance(threading.current_thread(), _SupervisionThread)


def refuse_to_wait(what: str) -> None:
    """Refuse a wait on a supervision thread, where callbacks of calls run: what ends the wait would be an event.

    Of any group: the others' calls would wait for this one's.

    Args:
        what: What would wait, for the error.

    Raises:
        GroupError: This is such a thread.
    """
    if is_supervision_thread():
        raise GroupError(
            f"{what}: refused in a callback (Call.when_done): it would wait on the thread that ends all calls of a "
            "group, and none would end. Begin the call by .remote(...) and give its Call a when_done of its own, or "
            "start a thread that waits"
        )


class Events:
    """The queue and its thread, which ends with `close`.

    All methods but `act`, `attend` and `leave` are for any thread; those are for events.
    """

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
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._patience = patience
        self._tick = tick
        self._failed = failed
        self._closed = threading.Event()
        self._ended = threading.Event()
        # Not by the thread at its end: another may be about to ring.
        weakref.finalize(self, self._button.close)
        self._thread = _SupervisionThread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, event: Callable[[], None]) -> None:
        """Have `event` run on the thread, after all that was put before; it must not wait for long."""
        self._queue.append(event)
        with contextlib.suppress(OSError):  # it has been rung often enough, or nobody is there any more
            self._button.send(b"\0")

    def watch(self, future: Future, then: Callable[[Future], None]) -> None:
        """Turn the end of `future`, well or not, into an event."""
        future.add_done_callback(lambda future: self.put(partial(then, future)))

    def attend(self, connection: socket.socket, then: Callable[[], None], *, wants_room: bool = False) -> None:
        """Turn what arrives at a connection into events, which have to take it in.

        Args:
            connection: A socket that does not block.
            then: The event.
            wants_room: Whether room to send is one, too; may be asked for later, and no more.
        """
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_room else 0)
        key = self._selector.get_map().get(connection)
        event = partial(self._queue.append, then)
        if key is None:
            self._selector.register(connection, mask, event)
        elif key.events != mask:
            self._selector.modify(connection, mask, event)

    def leave(self, connection: socket.socket) -> None:
        """Attend to a connection no more."""
        self._selector.unregister(connection)

    def act(self, timeout_s: float) -> bool:
        """Act on the next event, if one comes in time, and return whether one did. For an event that has to wait, too.

        No event outlives it here: what it holds of Ray's objects would be freed when the next one comes, and where
        that is one of Ray's shutdown, Ray ends the program (Ray 2.60).
        """
        event = self._next(timeout_s)
        if event is None:
            return False
        event()
        return True

    def close(self) -> None:
        """End the thread after the event that runs; later events are not acted on."""
        self._closed.set()

    def is_closed(self) -> bool:
        """Whether nobody acts on events any more."""
        return self._closed.is_set()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return whether it has."""
        return self._ended.wait(timeout_s)

    def _on_bell(self) -> None:
        self._bell.recv(1 << 10)

    def _next(self, timeout_s: float) -> Callable[[], None] | None:
        """Take the next event out of the queue; `None` where there was none in time."""
        until = time.monotonic() + timeout_s
        while not self._queue:
            ready = self._selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                key.data()
        return self._queue.popleft()

    def _loop(self) -> None:
        try:
            while not self._closed.is_set():
                if not self.act(self._patience()):
                    self._tick()
        except Exception as error:
            try:
                self._failed(error)
            finally:
                self._closed.set()
            raise
        finally:
            self._selector.close()
            self._bell.close()
            self._ended.set()
