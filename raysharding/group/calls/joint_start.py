"""`JointStart`: two calls, one in each of two groups, whose ranks work together and so must begin together.

Note [Order]: a call waits at the head of its queue until the other is at the head of the other queue. If two threads
queued two pairs in opposite orders, each group would wait for the other; `IN_ORDER` is held while a pair is queued, so
that all queues have the pairs in one order.
"""

from __future__ import annotations

import threading
from typing import Protocol

from raysharding.errors import GroupError
from raysharding.group.calls.call import Call

IN_ORDER = threading.Lock()
"""Held while a pair of calls is queued, which waits for nothing; see the note."""


class Queue(Protocol):
    """The methods of a supervisor that a `JointStart` calls."""

    def advance_soon(self) -> None:
        """Look at the head of the queue again, on the supervision thread."""

    def withdraw_soon(self, call: Call, error: GroupError) -> None:
        """End a call with an error if it is still in the queue, on the supervision thread."""


class JointStart:
    """Makes a pair of calls begin together, or not at all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[Queue] = []
        self._is_cancelled = False

    def may_begin(self, queue: Queue) -> bool:
        """Return True if both calls are at the head of their queues; on the supervision thread of one of them."""
        with self._lock:
            if queue not in self._arrived:
                self._arrived.append(queue)
            others = [one for one in self._arrived if one is not queue]
            may_begin = bool(others) and not self._is_cancelled
        if may_begin:
            for other in others:
                other.advance_soon()
        return may_begin

    def cancel(self, queue: Queue, call: Call, error: GroupError) -> None:
        """End the call of a queue with an error unless it has begun: the other call of the pair will not begin.

        Args:
            queue: Supervisor of the call to end.
            call: The call to end.
            error: Its error.
        """
        with self._lock:
            self._is_cancelled = True
        queue.withdraw_soon(call, error)
