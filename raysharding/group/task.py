"""`Task`: one call on its way to the ranks; `Run`: what has been seen of it while the ranks work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raysharding.group.actor import Request
from raysharding.group.call import Call
from raysharding.group.failure import Observed
from raysharding.group.outcome import Stacks
from raysharding.group.packing import Packed


class Continue(Protocol):
    """Takes rank 0's value of one step of a call that comes in steps."""

    def __call__(self, ref: Any) -> None:
        """Keep the value at `ref`. Runs on the supervision thread."""


@dataclass(frozen=True)
class Task:
    """One call, its arguments packed."""

    call: Call
    """What the caller holds."""
    requests: Sequence[Request]
    """What to run, by rank."""
    own: Packed | Sequence[Packed]
    """`(args, kwargs)`: one for all ranks, or one for each."""
    shared: Packed | None
    """Values that all ranks share."""
    deadline_s: float
    """Longest time from when the ranks begin; with `watch_progress`, longest time without progress."""
    watch_progress: bool = False
    """Whether bytes moved, as the ranks report them, put off the deadline."""
    next_requests: Sequence[Request] | None = None
    """Requests of every further step while rank 0 says that there is more; `None` for calls of one step."""
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
