"""`Prefetch`: makes the next batches on a thread while the ranks compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.2


class _End:
    """End of the iterator, with or without an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Runs an iterator ahead, on a thread. One other thread takes its items."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        """Start the thread.

        Args:
            items: Iterated on the thread, to its end or until `close`.
            depth: Number of items to hold, 1 or more.
        """
        self._items = items
        self._ready: queue.Queue[T | _End] = queue.Queue(depth)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raysharding-prefetch", daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        """Return True if `take` would return or raise at once."""
        return not self._ready.empty()

    def take(self, timeout_s: float) -> T:
        """Return the next item.

        Raises:
            StopIteration: The iterator has ended.
            TimeoutError: The item was not ready in time; the thread continues.
            Exception: The error of the iterator, in every call after it.
        """
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no batch came within {timeout_s:g} s: reading or collating the data hangs") from None
        if not isinstance(item, _End):
            return item
        self._ready.put(item)
        if item.error is None:
            raise StopIteration
        raise item.error

    def close(self) -> None:
        """End the thread; a thread that hangs ends with the process."""
        self._is_closed.set()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            end = _End(None)
        except Exception as error:  # noqa: BLE001 - it is the taker's
            end = _End(error)
        except BaseException as error:  # noqa: BLE001 - a SystemExit here would end this thread alone, in silence
            end = _End(RuntimeError(f"the data raised {type(error).__name__}: {error}"))
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        """Wait for space and add an item; return False after `close`."""
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
