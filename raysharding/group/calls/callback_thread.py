"""`CallbackThread`: the thread on which a group's calls end in the driver, and their callbacks run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from raysharding.errors import GroupError

_TICK_S = 1.0
_log = logging.getLogger("raysharding")


def is_callback_thread() -> bool:
    """Return True on the thread of any group on which callbacks of calls run."""
    return isinstance(threading.current_thread(), CallbackThread)


def refuse_to_wait(what: str) -> None:
    """Refuse to wait on a callback thread: the awaited call would end there.

    This includes other groups' threads: the calls of those groups would wait for this one's.

    Args:
        what: What would wait, for the error.

    Raises:
        GroupError: This is such a thread.
    """
    if is_callback_thread():
        raise GroupError(
            f"{what}: refused in a callback (Call.when_done): it would wait on the thread that ends all calls of a "
            "group, and none would end. Begin the call by .remote(...) and give its Call a when_done of its own, or "
            "start a thread that waits"
        )


def run_logged(callback: Callable[[], object]) -> None:
    """Run a callback, and log what it raises: where nobody catches it, it would end the thread that ends all calls.

    This includes the SystemExit of a `sys.exit()`, which ends a program in the main thread only.
    """
    try:
        callback()
    except BaseException:  # noqa: BLE001 - logged
        with suppress(ValueError):  # logging itself raises if stderr is closed
            _log.exception("an error in a callback; the calls of the group go on")


class CallbackThread(threading.Thread):
    """Runs callbacks one after the other, and a check each second.

    Ray completes futures on a thread of its own, which must not wait for Ray; so its callbacks only queue others here.
    """

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            name: The thread's.
            check: Called each second.
        """
        super().__init__(name=name, daemon=True)
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._check = check
        self.start()

    def call(self, callback: Callable[[], object]) -> None:
        """Run a callback on the thread, after those queued before it. Also in a signal handler."""
        self._queue.put(callback)

    def stop(self) -> None:
        """End the thread after the callbacks that are queued."""
        self._queue.put(None)

    def run(self) -> None:
        """Run what is queued until `stop`."""
        due = time.monotonic() + _TICK_S
        while True:
            with suppress(queue.Empty):
                callback = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if callback is None:
                    return
                run_logged(callback)
                # No reference is kept while the thread waits: Ray's objects in it would be freed only at the next one.
                del callback
            if time.monotonic() >= due:
                run_logged(self._check)
                due = time.monotonic() + _TICK_S
