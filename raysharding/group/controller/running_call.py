"""`RunningCall`: sends one call to all ranks, waits for them under its deadline, and judges how it ended.

Note: why the ranks' collectives match.
    All ranks run the same commands in one order. The queue runs one call at a time; a command goes to a rank only when
    every rank has finished the one before, and a rank that has not finished in time ends the group. The controller
    alone sends commands, and an actor runs them on one thread (the concurrency group `work`). A rank that fails inside
    a command may leave the others waiting in a collective. They get `drain_s` to fail by themselves, as by a lost
    connection; if one does not, the group is BROKEN, and ending the processes ends the wait.

Note: no change is missed.
    All methods run on the controller's event loop. A waiter takes the event that it waits for without an `await` since
    it has checked its condition: a later change sets that event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from raysharding.errors import CallCancelledError, CallTimeoutError, GroupError, RankFailure
from raysharding.group.controller import failures
from raysharding.group.controller.members import Ranks, reply, start
from raysharding.group.messages import (
    END_STEPS,
    NEXT_STEP,
    Command,
    Item,
    Outcome,
    Part,
    Response,
    Sent,
    Stacks,
    StateChange,
    Submission,
    decoded,
    encoded,
)

_POLL_S = 0.2
_AFTER_DEATH_S = 0.5
_FROZEN_S = 30.0
"""Longest time in which a driver does not take the tokens of a step: it is frozen, and others wait for the ranks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a call, and its consequence for the group."""

    outcome: Outcome
    """Outcome for the driver."""
    broken_by: GroupError | None = None
    """The error that broke the group; `None` if later calls can run."""
    resets_next: bool = False
    """True if the next call resets all modules first: some ranks have reset theirs, and others have not."""
    keeps_adapters: bool = False
    """True if a load kept the adapters that the ranks have on the base that it loaded."""


@dataclass
class RunningCall:
    """One call while the ranks run it."""

    submission: Submission
    """The call."""
    ranks: Ranks
    """The ranks."""
    name: str
    """Name of the group in errors."""
    drain_s: float
    """Seconds that the other ranks get to finish after a failure: their outcome tells a bad input from a lost rank."""
    resets: bool
    """True if the ranks reset their modules first."""

    first_number: int
    """Number of its first command."""
    finished: set[int] = field(default_factory=set)
    """Ranks that have finished the step, with or without an error."""

    def __post_init__(self) -> None:
        self.number = self.first_number - 1
        self.deadline = time.monotonic() + self.submission.deadline_s
        self._drain_until: float | None = None
        """Time until which the other ranks may finish after a failure; `None` before one."""
        self._observed: list[failures.Observed] = []
        """Failures, in the order in which they were observed."""
        self._changes: dict[int, StateChange] = {}
        self._sent: dict[int, Sent] = {}
        self._progress: dict[int, tuple[str, int, int]] = {}
        """Rank → its phase, bytes done and total bytes, as it last said."""
        self._more = self._is_late = self._is_cancelled = self._keeps_adapters = False
        self._ended_by: GroupError | None = None
        """The error of a call in steps of which the driver does not want the rest, or does not take it."""
        self._has_begun = False
        self._arrived = ""
        self._items: list[Item] = []
        """Parts of the result, in the order in which they arrived."""
        self._num_taken = 0
        """Number of parts that the driver has."""
        self.is_over = False
        """True once the ranks have finished, or are waited for no longer."""
        self._changed = asyncio.Event()
        """Set once when a part arrives or is taken, at each failure, and at the end; a new event replaces it."""
        self._step_changed = asyncio.Event()
        """Set when all ranks have finished the step, and at each failure."""

    @property
    def accumulates(self) -> bool | None:
        """True if ranks hold gradients for the next update after the call; `None` if no rank has run it."""
        return any(change.accumulates for change in self._changes.values()) if self._changes else None

    async def run(self) -> Verdict:
        """Run all steps of the call; never raises."""
        polling = [start(self._poll(rank)) for rank in range(len(self.ranks)) if self.submission.watch_progress]
        try:
            await self._step(self.submission.method)
            while self._more and await self._wait_taken(num_left=int(self.submission.is_stream)):
                await self._step(f"{self.submission.method}{NEXT_STEP}")
            if not self._more:
                await self._wait_taken(num_left=1)  # all but the result: with the outcome the parts are gone
            elif not self._observed:
                what = f"{self.submission.method} on {self.name} was cancelled between two of its steps"
                self._ended_by = self._ended_by or CallCancelledError(what)
                await self._step(END_STEPS)
        finally:
            for task in polling:
                task.cancel()
            self.is_over = True
            self._change()
        return self._judge()

    async def item(self, index: int) -> Item:
        """Wait for one part of the result; `None` if the call ends without it.

        To ask for a part says that those before it have arrived.
        """
        self._num_taken = max(self._num_taken, index)
        if self.submission.waits_for_driver:
            # The driver has them: each would hold a bucket of a `state_dict` in the object store.
            self._items[:index] = [None] * min(index, len(self._items))
        self._change()
        while len(self._items) <= index and not self.is_over:
            await self._changed.wait()
        return self._items[index] if index < len(self._items) else None

    def drop_items(self) -> None:
        """Wait no longer for the driver, which is gone, to take the parts of the result."""
        self.submission = replace(self.submission, waits_for_driver=False)
        self._change()

    def phase(self, rank: int) -> str:
        """Return the last known phase of a rank."""
        return self._progress[rank][0] if rank in self._progress else self.submission.method

    def cancel(self) -> None:
        """End a call in steps before its next one; others run to their end."""
        self._is_cancelled = True
        self._change()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes done and in total, as rank 0 last said."""
        _, done, total = self._progress.get(0, ("", 0, 0))
        return done, total

    def _change(self) -> None:
        """Wake all who wait for a part, or for its being taken."""
        self._changed.set()
        self._changed = asyncio.Event()  # those who wake check again, and wait for the next change

    async def _wait_taken(self, num_left: int) -> bool:
        """Wait until the driver holds rank 0's values but the last ones: a slow one does not fill the object store.

        Returns:
            True if the next step can begin; False if a rank died, the driver does not take the value in time, or it
            has cancelled the call.
        """
        limit_s = self.submission.deadline_s
        # The driver's own thread takes tokens, however slow the reader is.
        limit_s = min(limit_s, _FROZEN_S) if self.submission.is_stream else limit_s
        until = time.monotonic() + limit_s
        while self.submission.waits_for_driver and self._num_taken + num_left < len(self._items) and not self._ends():
            try:
                await asyncio.wait_for(self._changed.wait(), until - time.monotonic())
            except TimeoutError:
                # A frozen driver holds up the calls of the others no longer.
                what = f"{self.submission.method} on {self.name}: its driver did not take the next part of the result"
                self._ended_by = CallTimeoutError(f"{what} within {limit_s:g} s")
                return False
        self.deadline = time.monotonic() + self.submission.deadline_s
        return not self._ends()

    def _ends(self) -> bool:
        return self._is_cancelled or bool(self._observed)

    async def _step(self, method: str) -> None:
        """Send a command to all ranks, and wait until all have finished, or failed and had their time."""
        self.number += 1
        members, made = self.ranks.members, [self._command(method, part) for part in self.submission.parts]
        commands = made * len(members) if len(made) == 1 else made
        if any(refs for _, refs in commands):
            # All ranks hold their arguments before one enters a collective: a rank whose arguments are lost with their
            # owner would not come. (As arguments of `run`, Ray would bring them to each rank at its own time.)
            pairs = zip(members, commands, strict=True)
            await self._gather([member.actor.fetch.remote(self.number, **refs) for member, (_, refs) in pairs])
            if self._observed:
                return
        self._has_begun = True
        running = [member.actor.run.remote(sent) for member, (sent, _) in zip(members, commands, strict=True)]
        await self._gather([status for status, _ in running], [result for _, result in running])

    def _command(self, method: str, args: Part) -> tuple[Any, dict[str, ray.ObjectRef]]:
        """Return an encoded command, and the references of its fields that the ranks fetch before."""
        whole = self.submission
        # Later steps go on with what the first one got.
        fields: dict[str, Any] = {"args": args, "shared": whole.shared} if method == whole.method else {"args": None}
        refs = {name: part for name, part in fields.items() if isinstance(part, ray.ObjectRef)}
        command = Command(
            method=method,
            number=self.number,
            **{**fields, **dict.fromkeys(refs)},
            is_fetched=bool(refs),
            output=whole.output,
            max_output_bytes=whole.max_output_bytes,
            resets=self.resets and self.number == self.first_number,
        )
        return encoded(command, has_refs=False), refs

    async def _gather(self, replies: Sequence[ray.ObjectRef], results: Sequence[ray.ObjectRef] = ()) -> None:
        """Wait for the replies of all ranks, at most until the deadline, or until ranks have had their time.

        Args:
            replies: By rank: an encoded `Response`, if there are results.
            results: By rank, of a response that says so; none for replies without a value.
        """
        self.finished.clear()
        for rank, ref in enumerate(replies):
            # The callback holds the reference of the result, and then `_sent` and `_items`, until the driver has it:
            # without one Ray drops the object.
            result = results[rank] if results else None
            asyncio.wrap_future(ref.future()).add_done_callback(partial(self._on_reply, rank, result))
        while self._unfinished():
            until = self.deadline if self._drain_until is None else self._drain_until
            left_s = until - time.monotonic()
            if left_s > 0:
                self._step_changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._step_changed.wait(), left_s)
            elif self._drain_until is not None:
                break
            elif await self._inspect_late():
                return
        members = self.ranks.members
        self._observed += [failures.rank_stopped(members[rank].info, self.phase(rank)) for rank in self._unfinished()]

    def _on_reply(self, rank: int, result: ray.ObjectRef | None, future: asyncio.Future[Any]) -> None:
        error = future.exception()  # asked for in any case: asyncio complains of errors that nobody takes
        if self.is_over:
            return  # of a rank that was waited for no longer: the call is judged
        if error is not None:
            self._on_ray_error(rank, error)
        elif result is not None:
            self._on_response(rank, decoded(future.result()), result)
        self._finish(rank)

    def _on_response(self, rank: int, response: Response, result: ray.ObjectRef) -> None:
        self._changes[rank] = response.change
        if response.error is not None:
            self._observe(failures.rank_raised(self.ranks.members[rank].info, response.error), self.drain_s)
            return
        if rank == 0:
            self._more, self._keeps_adapters = response.more, response.keeps_adapters
        self._sent[rank] = result if response.is_stored else response.value
        if rank == 0 or not self.submission.takes_steps:
            self._items.append((rank, self._sent[rank]))
            self._change()

    def _finish(self, rank: int) -> None:
        self.finished.add(rank)
        if len(self.finished) == len(self.ranks):
            self._step_changed.set()

    def _on_ray_error(self, rank: int, error: BaseException) -> None:
        """Handle that a rank is dead, or that Ray could not bring it its arguments."""
        if self.ranks.is_stopping:
            self._observed.append(failures.rank_stopped(self.ranks.members[rank].info, self.phase(rank)))
            return
        if isinstance(error, ray.exceptions.RayActorError):
            # The first report of a death comes back here through the controller, as `self.died`; a death that was known
            # before the call does not.
            self.ranks.died(rank, error)
            if all(one.failure.rank != rank for one in self._observed):
                self.died(rank, error, is_made=True)
            return
        # The command did not run on this rank, while the others may wait for it in a collective.
        info = self.ranks.members[rank].info
        message = f"Ray could not deliver the arguments to the rank: {error}"
        failure = RankFailure(
            info.rank, info.node_ip, info.pid, "raised", self.submission.method, type(error).__name__, message
        )
        self._observe(failures.Observed(failure), self.drain_s)

    def died(self, rank: int, error: BaseException, *, is_made: bool) -> None:
        """Record that a rank's process has ended; `is_made` as in `rank_died`."""
        self._finish(rank)
        seen = failures.rank_died(self.ranks.members[rank].info, self.phase(rank), error, is_made=is_made)
        # Ray reports a lost connection a second or two after the death, and the peers have had that time.
        self._observe(seen, 0.0 if isinstance(error, ray.exceptions.ActorUnavailableError) else _AFTER_DEATH_S)

    def _observe(self, observed: failures.Observed, patience_s: float) -> None:
        self._observed.append(observed)
        self._change()
        self._step_changed.set()
        # The earliest end counts: a death after an error shortens the wait, an error after a death does not extend it.
        until = time.monotonic() + patience_s
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank not in self.finished]

    async def _inspect_late(self) -> bool:
        """Find out after the deadline why ranks are late; return False if they finish meanwhile."""
        stacks, snapshots = await self.ranks.inspect(self._unfinished())
        late = self._unfinished()
        if not late:
            return False
        # A model that reads a value on the host behind a collective waits in a frame of its own.
        waiting = {rank for rank, one in stacks.items() if one.in_collective or one.is_busy}
        is_missed = bool(self.finished) or not waiting.issuperset(late)
        self._is_late, self._arrived = True, _arrivals(late, self.finished, stacks, len(self.ranks))
        for rank in late:
            details = self.phase(rank), self.submission.deadline_s, stacks.get(rank), snapshots.get(rank)
            self._observed.append(failures.rank_hung(self.ranks.members[rank].info, *details, is_missed=is_missed))
        # Late ranks that did not answer come first, ranks that wait for others last.
        self._observed.sort(key=lambda one: (one.follows, one.failure.rank in stacks))
        return True

    async def _poll(self, rank: int) -> None:
        """Ask a rank for its progress, which extends the deadline."""
        while True:
            await asyncio.sleep(_POLL_S)
            answer, error = await reply(self.ranks.members[rank].actor.progress.remote())
            if error is not None:
                return  # a death is reported by the call itself
            if self._progress.get(rank) != answer:
                self._progress[rank] = answer
                self.deadline = time.monotonic() + self.submission.deadline_s

    def _judge(self) -> Verdict:
        """Decide whether the group is READY after the call."""
        world_size = len(self.ranks)
        if not self._observed and self._ended_by is not None:
            return Verdict(Outcome(error=self._ended_by))
        if not self._observed:
            sent = tuple(self._sent.get(rank) for rank in range(world_size))
            return Verdict(Outcome(sent, self._changes[0].weights_version), keeps_adapters=self._keeps_adapters)
        method = self.submission.method
        error = failures.judge(self._observed, f"{method} on {self.name}", self._is_late, self._arrived)
        outcome = failures.failed(self._observed, error, world_size)
        everyone = len(self.finished) == world_size and not self.ranks.dead
        # A rank that has not finished may be inside a collective: no later call can run beside it.
        if everyone and not self._has_begun:  # arguments were lost, say, with their driver: the ranks are as before
            return Verdict(outcome, resets_next=self.resets)
        if everyone and failures.leaves_intact(method, self._observed, self._changes.values(), world_size):
            # Gathered parameters or gradients on some ranks only would make the next call's collectives differ.
            return Verdict(outcome, resets_next=failures.resets_some(self._observed, world_size))
        return Verdict(outcome, broken_by=error)


def _arrivals(late: Sequence[int], finished: Collection[int], stacks: dict[int, Stacks], world_size: int) -> str:
    """Return which ranks wait for which, as the end of a sentence; empty if none waits."""
    waiting = [rank for rank in late if rank in stacks and stacks[rank].in_collective]
    absent = [rank for rank in late if rank not in waiting and not (rank in stacks and stacks[rank].is_busy)]
    if len(waiting) == world_size > 1:
        if any(stacks[rank].is_busy for rank in waiting):  # some may wait for a device that computes
            return "; all ranks wait, in collectives or for their devices: see their stacks"
        return "; all ranks wait in collectives, so not in the same one: see their stacks"
    if not waiting or not (absent or finished):
        return ""
    said = [f"{_ranks(waiting)} in a collective that"]
    if absent:
        said.append(f"{_ranks(absent)} did not reach")
    if finished:
        said.append(f"{_ranks(sorted(finished))} had left behind")
    return f"; {said[0]} {' and '.join(said[1:])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
