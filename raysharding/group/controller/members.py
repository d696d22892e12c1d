"""`Ranks`: the processes of one generation of a group's ranks, which the controller owns; it starts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raysharding.group.cluster import ProcessSnapshot, Reservation, dump_stacks
from raysharding.group.messages import ProbeReplies, Stacks
from raysharding.group.ranks import RankInfo

LEASE_S = 120.0
"""Lease of a rank: twice the time in which a GCS may come back. A rank that is cut off for good ends itself."""
_RENEW_S = 15.0
_KILL_S = 3.0
_RELEASE_S = 10.0
# The error of a late call is raised within 2 s of its deadline.
_SILENT_S = 0.4
_ANSWER_S = 1.0
_NEIGHBOUR_S = 0.8


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and its actor."""

    info: RankInfo
    """Where the rank runs."""
    actor: Any
    """Ray's handle of the rank's `RankActor`."""
    actor_info: Any
    """Its `ActorInfo`."""


class Ranks:
    """The ranks of one generation. All methods run on the controller's event loop."""

    def __init__(
        self,
        members: Sequence[Member],
        reservation: Reservation | None,
        on_death: Callable[[Ranks, int, BaseException], None],
    ) -> None:
        """Begin to watch the ranks and to renew their leases.

        Args:
            members: Members, by rank.
            reservation: Their resources; `None`: they need none.
            on_death: Called once for each rank whose process has ended, with Ray's error.
        """
        self.members = tuple(members)
        self.dead: dict[int, BaseException] = {}
        """Rank → Ray's error, of the ranks whose processes have ended."""
        self._reservation = reservation
        self._on_death = on_death
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._tasks = [start(self._watch(rank)) for rank in range(len(members))]
        self._renewing = start(self._renew())

    def __len__(self) -> int:
        return len(self.members)

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """Where each rank runs, by rank."""
        return tuple(member.info for member in self.members)

    @property
    def is_stopping(self) -> bool:
        """True once the ranks are being stopped, or are gone."""
        return self._stopping is not None

    def died(self, rank: int, error: BaseException) -> None:
        """Record the death of a rank; a second report is ignored."""
        if rank not in self.dead:
            self.dead[rank] = error
            self._changed.set()
            self._on_death(self, rank, error)

    def stop(self) -> asyncio.Task[None]:
        """End all processes, and then release their resources; returns the task that does it, the same each time."""
        if self._stopping is None:
            self._stopping = start(self._stop())
        return self._stopping

    async def ask(self, method: str, *args: Any, within_s: float, ranks: Iterable[int] | None = None) -> ProbeReplies:
        """Call a control method on ranks, also while they run a command.

        Args:
            method: Name of a control method of `RankActor`.
            args: Its arguments.
            within_s: Deadline for all replies together, in seconds.
            ranks: The ranks; default: all.
        """
        asked = range(len(self.members)) if ranks is None else list(ranks)
        refs = {rank: getattr(self.members[rank].actor, method).remote(*args) for rank in asked}
        tasks = {rank: start(reply(ref)) for rank, ref in refs.items()}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=within_s)
        replies: dict[int, Any] = {}
        silent: dict[int, str] = {}
        for rank, task in tasks.items():
            if not task.done():
                task.cancel()
                silent[rank] = f"does not answer within {within_s:g} s"
            elif isinstance(error := task.result()[1], ray.exceptions.RayActorError):
                silent[rank] = "its process is gone"
            elif error is not None:
                silent[rank] = f"cannot answer: {error}"
            else:
                replies[rank] = task.result()[0]
        return ProbeReplies(replies, silent)

    async def inspect(self, late: Sequence[int]) -> tuple[dict[int, Stacks], dict[int, ProcessSnapshot]]:
        """Return the stacks of those of these ranks that answer, and snapshots of the others; takes 1 s at most."""
        asking = start(self.ask("stacks", True, within_s=_ANSWER_S, ranks=late))
        await asyncio.wait([asking], timeout=_SILENT_S)
        if asking.done() and not asking.result().silent:
            return dict(asking.result().replies), {}
        # Beside the question, which a slow rank may still answer: a rank that answers needs no snapshot.
        seen = await asyncio.gather(*(self._snapshot(rank, late) for rank in late))
        stacks = dict((await asking).replies)
        found = zip(late, seen, strict=True)
        return stacks, {rank: one for rank, one in found if one is not None and rank not in stacks}

    async def stacks(self) -> dict[int, str]:
        """Return the Python stacks of every rank, or why there are none. Takes at most 2 s."""
        answers = await self.ask("stacks", within_s=_ANSWER_S)
        stacks = {rank: one.text or "idle\n" for rank, one in answers.replies.items()}
        for rank, reason in answers.silent.items():
            snapshot = await self._snapshot(rank, list(answers.silent))
            state = "" if snapshot is None else f": {snapshot.state}"
            stacks[rank] = f"rank {rank} {reason}{state}\n{snapshot.stacks if snapshot else ''}"
        return dict(sorted(stacks.items()))

    async def _snapshot(self, rank: int, late: Sequence[int]) -> ProcessSnapshot | None:
        """Return a snapshot of a rank, by this process or by another rank on its node."""
        one = self.members[rank]
        where = one.info.pid, one.actor_info.stacks_descriptor
        if one.info.node_id == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(dump_stacks, *where)
        others = [other.info for other in self.members if other.info.node_id == one.info.node_id and other is not one]
        if not others:
            return None
        # Ranks that are late may not answer; one that has finished does.
        other = min(others, key=lambda info: info.rank in late).rank
        answers = await self.ask("dump_stacks", *where, within_s=_NEIGHBOUR_S, ranks=[other])
        snapshot: ProcessSnapshot | None = answers.replies.get(other)
        return snapshot

    async def _watch(self, rank: int) -> None:
        """Wait for the end of a rank's process; an idle rank's death is noticed by nothing else."""
        while True:
            _, error = await reply(self.members[rank].actor.lifetime.remote())
            if isinstance(error, ray.exceptions.RayActorError):
                self.died(rank, error)
                return

    async def _renew(self) -> None:
        while True:
            for rank, member in enumerate(self.members):
                if rank not in self.dead:
                    member.actor.renew.remote()
            await asyncio.sleep(_RENEW_S)

    async def _stop(self) -> None:
        self._renewing.cancel()
        killing = start(asyncio.to_thread(kill_all, [member.actor for member in self.members]))
        for within_s in (_KILL_S, _RELEASE_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_dead(), within_s)
                break
            for rank, member in enumerate(self.members):
                if rank not in self.dead:
                    # From process to process: without its GCS Ray kills nothing. Not at once: Ray would tell the driver
                    # of a worker that ended unexpectedly.
                    member.actor.end.remote()
        await asyncio.wait([killing], timeout=_RELEASE_S)
        if self._reservation is not None:
            await asyncio.wait([start(asyncio.to_thread(self._reservation.release))], timeout=_RELEASE_S)
        for task in self._tasks:
            task.cancel()

    async def _wait_dead(self) -> None:
        while len(self.dead) < len(self.members):
            await self._changed.wait()
            self._changed.clear()


def kill_all(actors: Sequence[Any]) -> None:
    """End the processes of actors, also one that a signal has stopped; waits for the GCS."""
    for actor in actors:
        ray.kill(actor, no_restart=True)


async def reply(ref: ray.ObjectRef) -> tuple[Any, BaseException | None]:
    """Return a reply, or the error instead of it: of a task that nobody awaits asyncio would complain."""
    try:
        return await ref, None
    except ray.exceptions.RayError as error:
        return None, error


_running: set[asyncio.Task[Any]] = set()


def start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task and hold it until it has ended: the event loop itself holds tasks weakly."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task
