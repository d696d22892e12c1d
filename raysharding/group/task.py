"""`Task`: one call on its way to the ranks; `Run`: what has been seen of it while the ranks work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raysharding.group.actor import Request
from raysharding.group.call import Call
from raysharding.group.failure import Observed, saw_hang, saw_stop
from raysharding.group.outcome import Stacks
from raysharding.group.packing import Packed
from raysharding.group.ranks import Member


class Continue(Protocol):
    """Takes rank 0's value of one step of a call that comes in steps."""

    def __call__(self, ref: Any) -> None:
        """Keep the value at `ref`. Runs on the supervision thread."""


@dataclass(frozen=True)
class Task:
    """One call, its arguments packed."""

    call: Call
    """What the caller holds."""
    request: Request
    """What every rank runs."""
    own: Packed | Sequence[Packed]
    """`(args, kwargs)`: one for all ranks, or one for each."""
    shared: Packed | None
    """Values that all ranks share."""
    deadline_s: float
    """Longest time from when the ranks begin; with `watch_progress`, longest time without progress."""
    watch_progress: bool = False
    """Whether bytes moved, as the ranks report them, put off the deadline."""
    next_request: Request | None = None
    """What every rank runs for each further step, while rank 0 says that there is more; `None`: one step only."""
    keep_step: Continue | None = None
    """Where the value of each step goes."""

    @property
    def num_bytes(self) -> int:
        """Size of the packed arguments."""
        own = [self.own] if isinstance(self.own, Packed) else self.own
        return sum(packed.num_bytes for packed in own) + (self.shared.num_bytes if self.shared else 0)


@dataclass
class Run:
    """The task that the ranks work on."""

    task: Task
    """The task."""
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
    stacks: dict[int, Stacks] | None = None
    """Answers of late ranks; `None` until the deadline has passed."""
    moved: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Phase and bytes of each rank, as last reported."""
    asked: set[int] = field(default_factory=set)
    """Ranks that owe an answer about their progress."""
    next_poll: float = 0.0
    """Clock of the next question about progress."""

    def phase(self, rank: int) -> str:
        """Return what a rank was doing, as far as the driver knows."""
        return self.moved.get(rank, (self.task.call.name, 0))[0]

    def unfinished(self, members: Sequence[Member]) -> list[int]:
        """Return the ranks whose part has not ended."""
        return [rank for rank in range(len(members)) if rank not in self.finished]

    def stopped(self, members: Sequence[Member]) -> list[Observed]:
        """Describe the ranks that are stopped because another has failed."""
        return [saw_stop(members[rank].info, self.phase(rank)) for rank in self.unfinished(members)]

    def hung(self, members: Sequence[Member]) -> list[Observed]:
        """Describe the late ranks; those that do not even answer first, those that wait for others last."""
        answers, deadline_s = self.stacks or {}, self.task.deadline_s
        seen = [
            saw_hang(members[rank].info, self.phase(rank), deadline_s, answers.get(rank))
            for rank in self.unfinished(members)
        ]
        return sorted(seen, key=lambda one: (one.follows, one.failure.traceback != ""))
