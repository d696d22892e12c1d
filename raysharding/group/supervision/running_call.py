"""`QueuedCall`, one call; `WaitingCalls`, the queue of calls; `RunningCall`, the state of the call that ranks run."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from raysharding.distributed.comm import Connection
from raysharding.errors import GroupError
from raysharding.group.calls import Call, JointStart, Sent
from raysharding.group.cluster import ProcessSnapshot
from raysharding.group.ranks import Member
from raysharding.group.rpc import COMMAND_BYTES, Command, Packed, Stacks, StateChange, one_model
from raysharding.group.supervision.failures import Observed, saw_hang, saw_stop

Continue: TypeAlias = Callable[[Sent], None]
"""Stores rank 0's value of one step of a call that takes several steps. Runs on the supervision thread."""


@dataclass(frozen=True)
class QueuedCall:
    """One call with packed arguments."""

    call: Call
    """Handle of the caller."""
    command: Command
    """Command for every rank, without `args`."""
    args: Packed | Sequence[Packed]
    """Packed `(args, kwargs)`, one for all ranks or one per rank."""
    deadline_s: float
    """Longest time of the call, in seconds; with `watch_progress`, longest time without progress."""
    watch_progress: bool = False
    """True if progress in bytes, which the ranks report, extends the deadline."""
    keep_step: Continue | None = None
    """Receives the value of each step; `None` for a call of one step."""
    joint: JointStart | None = None
    """Lets the call begin together with one of another group; `None` for a call of this group alone."""

    @property
    def num_bytes(self) -> int:
        """Size of the packed arguments, in bytes."""
        args = [self.args] if isinstance(self.args, Packed) else self.args
        shared = self.command.shared
        return sum(packed.num_bytes for packed in args) + (shared.num_bytes if isinstance(shared, Packed) else 0)


@dataclass
class RunningCall:
    """State of the call that the ranks run."""

    task: QueuedCall
    """The call as it was queued."""
    number: int
    """Number of the step; identifies late responses to earlier steps."""
    deadline: float
    """Time (`time.monotonic`) at which the ranks are late."""
    finished: set[int] = field(default_factory=set)
    """Ranks that have finished, with or without an error."""
    seen: list[Observed] = field(default_factory=list)
    """Failures in the order of arrival at the driver."""
    drain_until: float | None = None
    """Time at which ranks that still run after a failure are stopped; `None` without a failure."""
    more: bool = False
    """True if the call has another step."""
    changes: dict[int, StateChange] = field(default_factory=dict)
    """Changes of the call to the model, for each finished rank."""
    stacks: dict[int, Stacks] | None = None
    """Stacks of late ranks that answered; `None` until the deadline has passed."""
    snapshots: dict[int, ProcessSnapshot] = field(default_factory=dict)
    """Snapshots that other ranks made of late ranks that did not answer."""
    neighbours_at: float | None = None
    """Time at which other ranks are asked for such snapshots; `None` if none is needed."""
    connections: dict[int, Sequence[Connection]] | None = None
    """TCP connections of the ranks; `None` until they are needed to end collectives."""
    is_late: bool = False
    """True if ranks were late when the call failed."""
    arrived: str = ""
    """Which ranks waited for which, as the end of a sentence."""
    moved: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Last reported phase and bytes of each rank."""
    asked: set[int] = field(default_factory=set)
    """Ranks whose progress report is pending."""
    next_poll: float = 0.0
    """Time of the next request for progress."""

    @property
    def due(self) -> float:
        """Time of the next action that is independent of the ranks."""
        if self.drain_until is not None:
            return self.drain_until if self.neighbours_at is None else min(self.drain_until, self.neighbours_at)
        return min(self.deadline, self.next_poll) if self.task.watch_progress else self.deadline

    @property
    def is_freed(self) -> bool:
        """True if connections of the ranks are being shut down; later errors of the ranks are consequences."""
        return self.connections is not None

    def holds_one_model(self) -> bool:
        """Return True if the finished ranks hold one consistent model."""
        # A rank without a change did not get its arguments from Ray, and so did not run the call.
        return self.finished <= self.changes.keys() and one_model(self.changes[rank] for rank in self.finished)

    def phase(self, rank: int) -> str:
        """Return the last known phase of a rank."""
        return self.moved.get(rank, (self.task.call.name, 0))[0]

    def unfinished(self, members: Sequence[Member]) -> list[int]:
        """Return the ranks that have not finished."""
        return [rank for rank in range(len(members)) if rank not in self.finished]

    def waits(self, rank: int) -> bool:
        """Return True if a rank has reported that it waits for other ranks."""
        said = (self.stacks or {}).get(rank)
        return said is not None and said.in_collective

    def describe_late(self, members: Sequence[Member]) -> None:
        """Record the unfinished ranks as failures: hung after the deadline, else stopped because of another failure.

        Late ranks that did not answer come first, ranks that wait for others last.
        """
        late = self.unfinished(members)
        if self.stacks is None:
            self.seen.extend(saw_stop(members[rank].info, self.phase(rank)) for rank in late)
            return
        self.is_late, self.arrived = True, self._arrivals(late, len(members))
        for rank in late:
            info, said, snapshot = members[rank].info, self.stacks.get(rank), self.snapshots.get(rank)
            self.seen.append(saw_hang(info, self.phase(rank), self.task.deadline_s, said, snapshot))
        answered = set(self.stacks)
        self.seen.sort(key=lambda one: (one.follows, one.failure.rank in answered))

    def _arrivals(self, late: Sequence[int], world_size: int) -> str:
        """Return which ranks wait for which, as text; empty if none waits."""
        waiting = [rank for rank in late if self.waits(rank)]
        if not waiting:
            return ""
        if len(waiting) == world_size:
            return "; all ranks wait in collectives, so not in the same one: see their stacks"
        absent = [rank for rank in late if rank not in waiting]
        said = [f"{_ranks(waiting)} in a collective that"]
        if absent:
            said.append(f"{_ranks(absent)} did not reach")
        if self.finished:
            said.append(f"{_ranks(sorted(self.finished))} had left behind")
        return f"; {said[0]} {' and '.join(said[1:])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_MAX_BYTES = 256 << 20

Check: TypeAlias = Callable[[], None]
"""Raises if a call must not be queued."""


class WaitingCalls:
    """A FIFO queue whose arguments take at most 256 MiB, plus those of the last call. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: collections.deque[QueuedCall] = collections.deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def is_full(self) -> bool:
        """Return True if a caller must wait before it adds a call."""
        return self.num_bytes >= _MAX_BYTES

    def next_is_large(self) -> bool:
        """Return True if the first call has arguments that go through Ray. The queue must not be empty."""
        return self._tasks[0].num_bytes > COMMAND_BYTES

    def wait_for_room(self, is_open: Callable[[], bool]) -> None:
        """Wait until the queue is not full, or `is_open` returns False.

        The wait is bounded: every queued call has a deadline, and a group that breaks empties the queue.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full() or not is_open())

    def add(self, task: QueuedCall, *checks: Check) -> None:
        """Queue a call unless one of `checks` raises. No `add` or `fail` comes between."""
        with self._changed:
            for check in checks:
                check()
            self._tasks.append(task)
            self.num_bytes += task.num_bytes

    @property
    def first(self) -> QueuedCall:
        """The first call. The queue must not be empty."""
        return self._tasks[0]

    def withdraw(self, call: Call) -> bool:
        """Remove a call, wherever it stands; return True if it was there."""
        with self._changed:
            found = [task for task in self._tasks if task.call is call]
            for task in found:
                self._tasks.remove(task)
                self.num_bytes -= task.num_bytes
            self._changed.notify_all()
        return bool(found)

    def take(self) -> QueuedCall:
        """Remove and return the first call."""
        with self._changed:
            task = self._tasks.popleft()
            self.num_bytes -= task.num_bytes
            self._changed.notify_all()
        return task

    def fail(self, error: GroupError) -> int:
        """End all calls with an error; return their number."""
        with self._changed:
            tasks, self.num_bytes = list(self._tasks), 0
            self._tasks.clear()
            self._changed.notify_all()
        for task in tasks:
            task.call.end(error)
        return len(tasks)
