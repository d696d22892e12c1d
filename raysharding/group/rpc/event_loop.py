"""`EventLoop`: the thread on which everything that happens to a group is handled.

Note [One thread]: whatever happens (a call is submitted, a rank responds, raises, dies, answers a question) becomes a
callback in one queue, and only the loop's thread runs callbacks. So events are in one order, the first failure is the
first event, and the state machine needs no lock. The thread waits for all connections and for the queue at once;
messages from ranks are queued by the thread itself, the rest by Ray's futures, which complete while ranks are idle,
too, because each actor's `lifetime` call is pending as long as the actor lives.

The loop has its own thread instead of running in one that waits for a call, though that would save each call two thread
switches: where the program has a signal handler that raises (an alarm, a third Ctrl-C), Python raises in the main
thread at any instruction, and might leave the state machine between two states.
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
"""Completes when a rank has answered or is gone: of a Ray object that a rank returns."""


class _SupervisionThread(threading.Thread):
    """The thread of some group's `EventLoop`."""


def is_supervision_thread() -> bool:
    """Return True on the thread of any group's `EventLoop`, where callbacks of calls run."""
    return isinstance(threading.current_thread(), _SupervisionThread)


def refuse_to_wait(what: str) -> None:
    """Refuse to wait on a supervision thread, where callbacks of calls run: the awaited event would be handled there.

    This includes other groups' threads: the calls of those groups would wait for this one's.

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


class EventLoop:
    """A queue of callbacks and the thread that runs them, until `stop`.

    Any thread may call any method but `register`, `unregister` and `run_once`, which are for callbacks.
    """

    def __init__(
        self,
        name: str,
        timeout: Callable[[], float],
        on_timeout: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Create the loop; nothing runs before `start`.

        Args:
            name: The thread's.
            timeout: Called before each wait: the longest time in seconds to wait for an event.
            on_timeout: Called when the wait timed out.
            on_error: Called if a callback raises, which ends the thread; without it every caller would hang.
        """
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(
            self._wakeup_receiver, selectors.EVENT_READ, lambda: self._wakeup_receiver.recv(1 << 10)
        )
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._on_error = on_error
        self._stopped = threading.Event()
        self._ended = threading.Event()
        # Not closed by the thread at its end: another thread may be about to send.
        weakref.finalize(self, self._wakeup_sender.close)
        self._thread = _SupervisionThread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback on the thread, after those queued before it; it must not block for long."""
        self._queue.append(callback)
        with contextlib.suppress(OSError):  # enough wake-ups are pending, or the thread has ended
            self._wakeup_sender.send(b"\0")

    def add_future(self, future: Future, callback: Callable[[Future], None]) -> None:
        """Run `callback(future)` on the thread when the future completes."""
        future.add_done_callback(lambda future: self.call_soon(partial(callback, future)))

    def register(self, sock: socket.socket, callback: Callable[[], None], *, wants_write: bool = False) -> None:
        """Run a callback whenever a socket is ready, which it must then read from. May be called again to change it.

        Args:
            sock: Does not block.
            callback: The callback.
            wants_write: Whether to run it when the socket is writable, too.
        """
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
        key = self._selector.get_map().get(sock)
        enqueue = partial(self._queue.append, callback)
        if key is None:
            self._selector.register(sock, mask, enqueue)
        elif key.events != mask:
            self._selector.modify(sock, mask, enqueue)

    def unregister(self, sock: socket.socket) -> None:
        """Stop watching a socket."""
        self._selector.unregister(sock)

    def run_once(self, timeout_s: float) -> bool:
        """Run the next callback; return False if none came in time. A callback that has to wait may call this, too.

        No reference to the callback is kept until the next one: Ray's objects in it would be freed only then, and
        where Ray is being shut down, that aborts the program (Ray 2.60).
        """
        deadline = time.monotonic() + timeout_s
        while not self._queue:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                key.data()
        self._queue.popleft()()
        return True

    def stop(self) -> None:
        """End the thread after the current callback; later ones do not run."""
        self._stopped.set()

    def is_stopped(self) -> bool:
        """Return True if no further callback runs."""
        return self._stopped.is_set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return True if it has."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self.run_once(self._timeout()):
                    self._on_timeout()
        except Exception as error:
            try:
                self._on_error(error)
            finally:
                self._stopped.set()
            raise
        finally:
            self._selector.close()
            self._wakeup_receiver.close()
            self._ended.set()
