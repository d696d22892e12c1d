"""`Runner`: takes one call through the ranks, and decides how it ended. All on the supervision thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from raysharding.config import Timeouts
from raysharding.errors import GroupError, RankFailure
from raysharding.group import failure
from raysharding.group.actor import Request
from raysharding.group.outcome import Outcome
from raysharding.group.packing import Packed
from raysharding.group.questions import POLL_S, Future, Questions
from raysharding.group.ranks import Member
from raysharding.group.task import Run, Task

_INLINE_BYTES = 64 << 10


@dataclass(frozen=True)
class Hooks:
    """What the supervision does for its runner."""

    watch: Callable[[Future, Callable[[Future], None]], None]
    """Make the end of a future an event."""
    advance: Callable[[], None]
    """Do what has become due, of the call and of those behind it."""
    died: Callable[[int, BaseException], None]
    """Hear that a rank is gone, and why Ray says so."""
    broke: Callable[[Sequence[failure.Observed], GroupError, bool], None]
    """Break the group: failures, error, whether the ranks hold one model and are kept."""
    can_rejoin: Callable[[], bool]
    """Say whether ranks that hold one model could meet again."""
    remark: Callable[[], str]
    """Say what else is wrong, for an error's first line; empty where nothing is."""


class Runner:
    """The call that the ranks work on."""

    def __init__(self, name: str, members: Sequence[Member], timeouts: Timeouts, hooks: Hooks) -> None:
        """Run nothing yet.

        Args:
            name: The group's name in errors.
            members: By rank.
            timeouts: Deadlines.
            hooks: The supervision's part.
        """
        self.run: Run | None = None
        self._name = name
        self._members = members
        self._timeouts = timeouts
        self._hooks = hooks
        self._questions = Questions(members, hooks.watch, lambda: self.run, hooks.advance)
        self._numbers = 0

    def check(self, dead: Collection[int]) -> None:
        """Do what is due: end the step, ask late ranks, stop waiting."""
        run = self.run
        if run is None:
            return
        now = time.monotonic()
        everyone = len(run.finished) == len(self._members)
        if run.drain_until is not None:
            if everyone or now >= run.drain_until:
                self._conclude(run)
            elif run.witnesses_at is not None and now >= run.witnesses_at:
                self._questions.witnesses(run)
        elif everyone:
            self._step_done(run)
        elif now >= run.deadline:
            self._questions.stacks(run)
        elif run.task.watch_progress and now >= run.next_poll:
            self._questions.progress(run, dead)

    def begin(self, task: Task, request: Request) -> None:
        """Send one step to all ranks."""
        now = time.monotonic()
        self._numbers += 1
        self.run = run = Run(task, self._numbers, begun=now, deadline=now + task.deadline_s, next_poll=now + POLL_S)
        try:
            # Large arguments are stored before any rank is asked: a full store must not leave some ranks at work.
            parts = self._parts(task.own)
            common = None if task.shared is None else _stored(task.shared)
        except ray.exceptions.RayError as error:
            self.run = None
            task.call.end(GroupError(f"cannot store the arguments of {task.call.name}: {error}"))
            return
        for rank, member in enumerate(self._members):
            outcome, value = member.start(request, parts[rank], common)
            self._hooks.watch(outcome.future(), partial(self._on_outcome, run.number, rank, value))

    def _parts(self, own: Packed | Sequence[Packed]) -> list[Any]:
        return [_stored(own)] * len(self._members) if isinstance(own, Packed) else [_stored(one) for one in own]

    def _on_outcome(self, number: int, rank: int, value: Any, future: Future) -> None:
        run = self.run
        if run is None or run.number != number:
            return
        error = future.exception()
        if error is not None:
            self._on_task_error(run, rank, error)
            return
        outcome: Outcome = future.result()
        run.finished.add(rank)
        run.stamps[rank] = outcome.stamp
        if run.is_freed:
            pass  # what it raises is our own doing
        elif outcome.raised is not None:
            self.see(run, failure.saw_raise(self._members[rank].info, outcome.raised), self._timeouts.drain_s)
        else:
            run.more = outcome.more if rank == 0 else run.more
            if run.task.keep_step is None:
                run.task.call.rank_finished(rank, value)
            elif rank == 0:
                run.task.keep_step(value)
        self._hooks.advance()

    def _on_task_error(self, run: Run, rank: int, error: BaseException) -> None:
        """Handle Ray's own word on a call: the actor is gone, or the call never reached our code."""
        if isinstance(error, ray.exceptions.RayActorError):
            self._hooks.died(rank, error)
            return
        run.finished.add(rank)
        info = self._members[rank].info
        message = f"Ray could not run the call: {error}"
        one = RankFailure(
            info.rank, info.node_ip, info.pid, "raised", run.task.call.name, type(error).__name__, message
        )
        self.see(run, failure.Observed(one), self._timeouts.drain_s)
        self._hooks.advance()

    def see(self, run: Run, observed: failure.Observed, patience_s: float) -> None:
        """Note a failure. Its peers get a while to finish: what they say tells a bad input from a broken rank."""
        run.seen.append(observed)
        until = time.monotonic() + patience_s
        run.drain_until = until if run.drain_until is None else min(run.drain_until, until)

    def _step_done(self, run: Run) -> None:
        task = run.task
        if run.more and task.next_request is not None:
            self.begin(task, task.next_request)
            return
        if task.keep_step is not None:
            for rank in range(len(self._members)):
                task.call.rank_finished(rank, None)
        self.run = None
        task.call.end(None)

    def _conclude(self, run: Run) -> None:
        """End a call that failed or is late: leave the group READY where that is safe, else break it."""
        everyone = len(run.finished) == len(self._members)
        if everyone and not run.seen:
            self._step_done(run)  # late, but done before it was stopped
            return
        if not run.is_freed and not everyone:
            run.describe_late(self._members)
            if self._can_free(run):
                self._questions.free(run)
                return
        what = f"{run.task.call.name} on {self._name}{self._hooks.remark()}"
        error = failure.judge(run.seen, what, run.is_late, run.arrived)
        is_intact = failure.leaves_intact(
            run.task.call.name, run.seen, len(self._members), one_model=run.holds_one_model
        )
        if everyone and is_intact and not run.is_freed:
            self.run = None
            run.task.call.end(failure.typed_error(run.seen, error))
        else:
            self._hooks.broke(run.seen, error, everyone and run.holds_one_model and self._hooks.can_rejoin())

    def _can_free(self, run: Run) -> bool:
        """Whether the ranks that have not finished would, if nobody waited for anybody any more."""
        late = run.unfinished(self._members)
        return self._hooks.can_rejoin() and (run.stacks is None or all(run.waits(rank) for rank in late))


def _stored(packed: Packed) -> Any:
    """Put a large argument into the object store once; a small one travels inside the call."""
    return packed if packed.num_bytes <= _INLINE_BYTES else ray.put(packed)
