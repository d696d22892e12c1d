"""`QueuedCall`: one call on its way to the ranks; `RunningCall`: what has been seen of it while the ranks work on it.

`WaitingCalls`: the calls that have been submitted and that no rank has begun.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from raysharding.distributed.comm import Connection
from raysharding.errors import GroupError
from raysharding.group.calls import Call, Sent
from raysharding.group.cluster import ProcessSnapshot
from raysharding.group.ranks import Member
from raysharding.group.rpc import COMMAND_BYTES, Command, Packed, Stacks, StateChange, one_model
from raysharding.group.supervision.failures import Observed, saw_hang, saw_stop


class Continue(Protocol):
    """Takes rank 0's value of one step of a call that comes in steps."""

    def __call__(self, sent: Sent) -> None:
        """Keep what was sent. Runs on the supervision thread."""


@dataclass(frozen=True)
class QueuedCall:
    """One call, its arguments packed."""

    call: Call
    """What the caller holds."""
    command: Command
    """What every rank runs, but for `args`."""
    args: Packed | Sequence[Packed]
    """Packed `(args, kwargs)`: one for all ranks, or one for each."""
    deadline_s: float
    """Longest time from when the ranks begin; with `watch_progress`, longest time without progress."""
    watch_progress: bool = False
    """Whether bytes moved, as the ranks report them, put off the deadline."""
    keep_step: Continue | None = None
    """Where the value of each step goes, for a call that comes in steps; `None`: in one."""

    @property
    def num_bytes(self) -> int:
        """Size of the packed arguments."""
        args = [self.args] if isinstance(self.args, Packed) else self.args
        shared = self.command.shared
        return sum(packed.num_bytes for packed in args) + (shared.num_bytes if isinstance(shared, Packed) else 0)


@dataclass
class RunningCall:
    """The task that the ranks work on."""

    task: QueuedCall
    """The call as it was queued."""
    number: int
    """Tells a late answer to an earlier step from an answer to this one."""
    begun: float
    """Clock when the ranks began this step."""
    deadline: float
    """Clock when they are late."""
    finished: set[int] = field(default_factory=set)
    """Ranks whose part has ended, well or not."""
    seen: list[Observed] = field(default_factory=list)
    """Failures in the order in which they reached the driver."""
    drain_until: float | None = None
    """Clock when ranks that have not followed a failure are stopped; `None` while nothing has failed."""
    more: bool = False
    """Whether rank 0 has another step to give."""
    changes: dict[int, StateChange] = field(default_factory=dict)
    """What the call did to what the finished ranks hold."""
    stacks: dict[int, Stacks] | None = None
    """What late ranks answered; `None` until the deadline has passed."""
    snapshots: dict[int, ProcessSnapshot] = field(default_factory=dict)
    """What others say of late ranks that did not answer."""
    neighbours_at: float | None = None
    """Clock when others are asked about ranks that have not answered; `None` where nobody needs to."""
    connections: dict[int, Sequence[Connection]] | None = None
    """TCP connections of the ranks; `None` until ranks that wait for others in vain are to be freed."""
    is_late: bool = False
    """Whether ranks were late when the call was given up."""
    arrived: str = ""
    """Which ranks waited for which then, as the end of a sentence."""
    moved: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Phase and bytes of each rank, as last reported."""
    given_up: set[int] = field(default_factory=set)
    """Late ranks that wait for nobody, so hang."""
    settled_by: float = math.inf
    """Clock until which ranks may end their part after the call has failed."""
    asked: set[int] = field(default_factory=set)
    """Ranks that owe an answer about their progress."""
    next_poll: float = 0.0
    """Clock of the next question about progress."""

    @property
    def due(self) -> float:
        """Clock when something has to be done, whatever the ranks do."""
        if self.drain_until is not None:
            return self.drain_until if self.neighbours_at is None else min(self.drain_until, self.neighbours_at)
        return min(self.deadline, self.next_poll) if self.task.watch_progress else self.deadline

    @property
    def is_freed(self) -> bool:
        """Whether the ranks' connections are being cut, so that what they raise from now on means nothing."""
        return self.connections is not None

    def holds_one_model(self, lost: Collection[int] = ()) -> bool:
        """Whether what the finished ranks hold, lost ones left out, is one model, none of it changed in part."""
        left = self.finished - set(lost)
        # Of one that Ray could not bring its arguments there is no change: it holds what it held before.
        return left <= self.changes.keys() and one_model(self.changes[rank] for rank in left)

    def phase(self, rank: int) -> str:
        """Return what a rank was doing, as far as the driver knows."""
        return self.moved.get(rank, (self.task.call.name, 0))[0]

    def unfinished(self, members: Sequence[Member]) -> list[int]:
        """Return the ranks whose part has not ended."""
        return [rank for rank in range(len(members)) if rank not in self.finished]

    def awaited(self, members: Sequence[Member]) -> list[int]:
        """Return the ranks whose part has not ended, but for those that were given up."""
        return [rank for rank in self.unfinished(members) if rank not in self.given_up]

    def waits(self, rank: int) -> bool:
        """Whether a rank has said that it waits for others."""
        said = (self.stacks or {}).get(rank)
        return said is not None and said.in_collective

    def describe_late(self, members: Sequence[Member]) -> None:
        """Note the unfinished ranks as failures: hung where the deadline has passed, else stopped for another's sake.

        Late ranks that do not even answer come first, those that wait for others last.
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
        """Say which ranks wait for which; empty where none waits."""
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
"""Raises where a call must not be queued."""


class WaitingCalls:
    """A queue, first in, first out, whose arguments weigh 256 MiB at most but for the last call's. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: collections.deque[QueuedCall] = collections.deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def is_full(self) -> bool:
        """Whether a caller has to wait before it adds another call."""
        return self.num_bytes >= _MAX_BYTES

    def next_is_large(self) -> bool:
        """Whether Ray is to carry part of the first call; there is one."""
        return self._tasks[0].num_bytes > COMMAND_BYTES

    def wait_for_room(self, is_open: Callable[[], bool]) -> None:
        """Wait until the queue is not full, or `is_open` says that nobody will empty it.

        Bounded: every queued call ends by its own deadline, and a group that breaks empties the queue.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.is_full() or not is_open())

    def add(self, task: QueuedCall, *checks: Check) -> None:
        """Queue a call, unless one of `checks`, which no other thread's `add` or `fail` can overtake, raises."""
        with self._changed:
            for check in checks:
                check()
            self._tasks.append(task)
            self.num_bytes += task.num_bytes

    def take(self) -> QueuedCall:
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
