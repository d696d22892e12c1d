"""`RunningCall`: sends one call to all ranks, waits for them under its deadline, and judges how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raysharding.errors import CallTimeoutError, GroupError, RankFailure
from raysharding.group.cluster import ProcessSnapshot
from raysharding.group.controller import failures
from raysharding.group.controller.look import look_at
from raysharding.group.controller.members import Ranks, start
from raysharding.group.messages import (
    NEXT_STEP,
    Command,
    Item,
    Outcome,
    Progress,
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a call ended, and what that means for the group."""

    outcome: Outcome
    """What the driver gets."""
    broken_by: GroupError | None = None
    """The error that broke the group; `None` if later calls can run."""
    resets_next: bool = False
    """True if the next call resets all modules first: some ranks have reset theirs, and others have not."""
    keeps_adapters: bool = False
    """True if a load kept the adapters that the ranks have on the base that it loaded."""


@dataclass
class RunningCall:
    """One call on its way through the ranks."""

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
    progress: tuple[int, int] = (0, 0)
    """Bytes done and in total, as rank 0 last said."""

    def __post_init__(self) -> None:
        self.number = self.first_number - 1
        self.deadline = time.monotonic() + self.submission.deadline_s
        self._drain_until: float | None = None
        self._seen: list[failures.Observed] = []
        self._changes: dict[int, StateChange] = {}
        self._sent: dict[int, Sent] = {}
        self._moved: dict[int, tuple[str, int]] = {}
        self._more = self._is_late = self._keeps_adapters = self._is_given_up = False
        self._arrived = ""
        self._items: list[Item] = []
        self._num_taken = 0
        self.is_over = False
        """True once the ranks have finished, or are waited for no longer."""
        self._changed = asyncio.Event()

    async def run(self) -> Verdict:
        """Run all steps of the call; never raises."""
        polling = start(self._poll()) if self.submission.watch_progress else None
        try:
            await self._step(self.submission.method)
            while self._more and not self._seen and await self._handed_on():
                await self._step(f"{self.submission.method}{NEXT_STEP}")
        finally:
            if polling is not None:
                polling.cancel()
            self.is_over = True
            self._changed.set()
        return self._judge()

    async def item(self, index: int) -> Item:
        """Wait for one part of the result; see `Item`. To ask for a part says that those before it have arrived."""
        self._num_taken = max(self._num_taken, index)
        self._changed.set()
        while len(self._items) <= index and not self.is_over:
            await self._wait_changed()
        return self._items[index] if index < len(self._items) else Item(is_last=True)

    def drop_items(self) -> None:
        """Wait no longer for the driver, which is gone, to take the parts of the result."""
        self.submission = replace(self.submission, hands_on_steps=False)
        self._changed.set()

    def phase(self, rank: int) -> str:
        """Return the last known phase of a rank."""
        return self._moved.get(rank, (self.submission.method, 0))[0]

    async def _wait_changed(self) -> None:
        # Replaced at each change: several may wait.
        changed = self._changed
        await changed.wait()
        if self._changed is changed and not self.is_over:
            self._changed = asyncio.Event()

    async def _handed_on(self) -> bool:
        """Wait until the driver holds rank 0's value, so that a slow driver does not fill the object store.

        Returns:
            True if the next step can begin; False if a rank died, or the driver does not take the value in time.
        """
        until = time.monotonic() + self.submission.deadline_s
        while self.submission.hands_on_steps and self._num_taken < len(self._items) and not self._seen:
            try:
                await asyncio.wait_for(self._wait_changed(), until - time.monotonic())
            except TimeoutError:
                self._is_given_up = True  # a frozen driver holds up the calls of the others no longer
                return False
        self.deadline = time.monotonic() + self.submission.deadline_s
        return not self._seen

    def _commands(self, method: str) -> list[tuple[Command, list[ray.ObjectRef]]]:
        """Return each rank's command, and the references of its large arguments."""
        self.number += 1
        whole = self.submission
        command = Command(
            method=method,
            number=self.number,
            args=None,
            output=whole.output,
            max_output_bytes=whole.max_output_bytes,
            resets=self.resets and self.number == self.first_number,
        )
        commands = []
        for rank in range(len(self.ranks)):
            fields: dict[str, Any] = {"args": whole.parts[rank if len(whole.parts) > 1 else 0], "shared": whole.shared}
            refs = {name: part for name, part in fields.items() if isinstance(part, ray.ObjectRef)}
            fields |= {**dict.fromkeys(refs), "fetched": tuple(refs)}
            commands.append((replace(command, **fields), list(refs.values())))
        return commands

    async def _step(self, method: str) -> None:
        """Send a command to all ranks, and wait until all have finished, or failed and had their time."""
        commands = self._commands(method)
        members = self.ranks.members
        if any(refs for _, refs in commands):
            # All ranks hold their arguments before one enters a collective.
            pairs = zip(members, commands, strict=True)
            fetching = [member.actor.fetch.remote(command.number, *refs) for member, (command, refs) in pairs]
            await self._gather([self._fetched(rank, ref) for rank, ref in enumerate(fetching)])
            if self._seen:
                return
        self.finished.clear()
        sent = [encoded(command, has_refs=False) for command, _ in commands]
        running = [member.actor.run.remote(one) for member, one in zip(members, sent, strict=True)]
        await self._gather([self._answered(rank, *refs) for rank, refs in enumerate(running)])

    async def _fetched(self, rank: int, ref: ray.ObjectRef) -> None:
        try:
            await ref
        except ray.exceptions.RayError as error:
            self._on_ray_error(rank, error)
        else:
            self.finished.add(rank)

    async def _gather(self, waiting: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Wait for the parts of all ranks, at most until the deadline, or until ranks have had their time."""
        pending = {start(one) for one in waiting}
        while pending:
            until = self.deadline if self._drain_until is None else self._drain_until
            left_s = until - time.monotonic()
            if left_s > 0:
                _, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            elif self._drain_until is None:
                _, pending = await asyncio.wait(pending, timeout=0)
                if pending:
                    pending = await self._look_at_late(pending)
                    break
            else:
                break
        for task in pending:
            task.cancel()
        if pending and not self._is_late:
            self._seen.extend(
                failures.saw_stop(self.ranks.members[rank].info, self.phase(rank)) for rank in self._unfinished()
            )

    async def _answered(self, rank: int, status: ray.ObjectRef, result: ray.ObjectRef) -> None:
        try:
            response: Response = decoded(await status)
        except ray.exceptions.RayError as error:
            self._on_ray_error(rank, error)
            return
        self.finished.add(rank)
        self._changes[rank] = response.change
        if response.error is not None:
            self._see(failures.saw_raise(self.ranks.members[rank].info, response.error), self.drain_s)
            return
        if rank == 0:
            self._more, self._keeps_adapters = response.more, response.keeps_adapters
        if rank == 0 or not self.submission.takes_steps:
            self._sent[rank] = result if response.is_stored else response.value
            self._items.append(Item(rank, self._sent[rank]))
            self._changed.set()

    def _on_ray_error(self, rank: int, error: ray.exceptions.RayError) -> None:
        """Handle that a rank is dead, or that Ray could not bring it its arguments."""
        self.finished.add(rank)
        if self.ranks.is_stopping:
            self._seen.append(failures.saw_stop(self.ranks.members[rank].info, self.phase(rank)))
            return
        if isinstance(error, ray.exceptions.RayActorError):
            self.ranks.died(rank, error)
            if all(one.failure.rank != rank for one in self._seen):  # it was known before the call
                self.died(rank, error, is_made=True)
            return
        info = self.ranks.members[rank].info
        message = f"Ray could not deliver the arguments to the rank: {error}"
        failure = RankFailure(
            info.rank, info.node_ip, info.pid, "raised", self.submission.method, type(error).__name__, message
        )
        self._see(failures.Observed(failure), self.drain_s)

    def died(self, rank: int, error: BaseException, *, is_made: bool) -> None:
        """Record that a rank's process has ended; `is_made` as in `saw_death`."""
        self.finished.add(rank)
        seen = failures.saw_death(self.ranks.members[rank].info, self.phase(rank), error, is_made=is_made)
        # Ray reports a lost connection a second or two after the death, and the peers have had that time.
        self._see(seen, 0.0 if isinstance(error, ray.exceptions.ActorUnavailableError) else _AFTER_DEATH_S)

    def _see(self, observed: failures.Observed, patience_s: float) -> None:
        self._seen.append(observed)
        self._changed.set()
        until = time.monotonic() + patience_s
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank not in self.finished]

    async def _look_at_late(self, pending: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Find out after the deadline why ranks are late, unless they finish meanwhile; return what is pending."""
        late = self._unfinished()
        looking = start(look_at(self.ranks, late))
        await asyncio.wait([looking, start(asyncio.wait(pending))], return_when=asyncio.FIRST_COMPLETED)
        _, pending = await asyncio.wait(pending, timeout=0)
        if not pending:
            looking.cancel()
            return pending
        stacks, snapshots = await looking
        late = self._unfinished()
        self._is_late, self._arrived = True, _arrivals(late, self.finished, stacks, len(self.ranks))
        for rank in late:
            self._seen.append(self._saw_late(rank, stacks.get(rank), snapshots.get(rank)))
        # Late ranks that did not answer come first, ranks that wait for others last.
        self._seen.sort(key=lambda one: (one.follows, one.failure.rank in stacks))
        return pending

    def _saw_late(self, rank: int, stacks: Stacks | None, snapshot: ProcessSnapshot | None) -> failures.Observed:
        info, deadline_s = self.ranks.members[rank].info, self.submission.deadline_s
        return failures.saw_hang(info, self.phase(rank), deadline_s, stacks, snapshot)

    async def _poll(self) -> None:
        """Ask the ranks for their progress, which extends the deadline."""
        asked: set[int] = set()
        while True:
            await asyncio.sleep(_POLL_S)
            for rank, member in enumerate(self.ranks.members):
                if rank not in asked and rank not in self.ranks.dead:
                    asked.add(rank)
                    start(self._note_progress(rank, member.actor.progress.remote(), asked))

    async def _note_progress(self, rank: int, ref: ray.ObjectRef, asked: set[int]) -> None:
        try:
            now: Progress = await ref
        except ray.exceptions.RayError:
            return  # a death is reported by the call itself
        asked.discard(rank)
        if self._moved.get(rank) != (now.phase, now.bytes_done):
            self._moved[rank] = (now.phase, now.bytes_done)
            self.deadline = time.monotonic() + self.submission.deadline_s
        if rank == 0:
            self.progress = (now.bytes_done, now.bytes_total)

    def _judge(self) -> Verdict:
        """Decide whether the group is READY after the call."""
        world_size = len(self.ranks)
        if self._is_given_up:
            what = (
                f"{self.submission.method} on {self.name}: its driver did not take the next part of the result within"
            )
            return Verdict(Outcome(error=CallTimeoutError(f"{what} {self.submission.deadline_s:g} s")))
        if not self._seen:
            sent = tuple(self._sent.get(rank) for rank in range(world_size))
            return Verdict(Outcome(sent), keeps_adapters=self._keeps_adapters)
        method = self.submission.method
        error = failures.judge(self._seen, f"{method} on {self.name}", self._is_late, self._arrived)
        outcome = failures.failed(self._seen, error, world_size)
        everyone = len(self.finished) == world_size and not self.ranks.dead
        if everyone and failures.leaves_intact(method, self._seen, self._changes.values(), world_size):
            # Gathered parameters or gradients on some ranks only would make the next call's collectives differ.
            return Verdict(outcome, resets_next=failures.resets_some(self._seen, world_size))
        return Verdict(outcome, broken_by=error)


def _arrivals(late: Sequence[int], finished: Collection[int], stacks: dict[int, Stacks], world_size: int) -> str:
    """Return which ranks wait for which, as the end of a sentence; empty if none waits."""
    waiting = [rank for rank in late if rank in stacks and stacks[rank].in_collective]
    if not waiting:
        return ""
    if len(waiting) == world_size:
        return "; all ranks wait in collectives, so not in the same one: see their stacks"
    absent = [rank for rank in late if rank not in waiting]
    said = [f"{_ranks(waiting)} in a collective that"]
    if absent:
        said.append(f"{_ranks(absent)} did not reach")
    if finished:
        said.append(f"{_ranks(sorted(finished))} had left behind")
    return f"; {said[0]} {' and '.join(said[1:])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
