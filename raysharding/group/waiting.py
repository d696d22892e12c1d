"""`WaitingCalls`: the calls that have been submitted and that no rank has begun."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TypeAlias

from raysharding.errors import GroupError
from raysharding.group.order import ORDER_BYTES
from raysharding.group.task import Task

_MAX_BYTES = 256 << 20

Check: TypeAlias = Callable[[], None]
"""Raises where a call must not be queued."""


class WaitingCalls:
    """A queue, first in, first out, whose arguments weigh 256 MiB at most but for the last call's. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: collections.deque[Task] = collections.deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def is_full(self) -> bool:
        """Whether a caller has to wait before it adds another call."""
        return self.num_bytes >= _MAX_BYTES

    def next_is_large(self) -> bool:
        """Whether Ray is to carry part of the first call; there is one."""
        return self._tasks[0].num_bytes > ORDER_BYTES

    def wait_for_room(self, is_open: Callable[[], bool]) -> None:
        """Wait until the queue is not full, or `is_open` says that nobody will empty it.

        Bounded: every queued call ends by its own deadline, and a group that breaks empties the queue.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full() or not is_open())

    def add(self, task: Task, *checks: Check) -> None:
        """Queue a call, unless one of `checks`, which no other thread's `add` or `fail` can overtake, raises."""
        with self._changed:
            for check in checks:
                check()
            self._tasks.append(task)
            self.num_bytes += task.num_bytes

    def take(self) -> Task:
        """Take the first call out."""
        with self._changed:
            task = self._tasks.popleft()
            self.num_bytes -= task.num_bytes
            self._changed.notify_all()
        return task

    def fail(self, error: GroupError) -> int:
        """End all calls with an error; return how many there were."""
        with self._changed:
            tasks, self.num_bytes = list(self._tasks), 0
            self._tasks.clear()
            self._changed.notify_all()
        for task in tasks:
            task.call.end(error)
        return len(tasks)
