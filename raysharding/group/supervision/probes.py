"""What the supervision asks ranks while they work, on their control threads, and what it does with the answers.

Questions that every rank is asked at once, beside the calls: under one deadline, and some may stay silent.

What people look at when a rank behaves strangely: its Python stacks, and the end of what it has printed.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.distributed.comm import Connection, between
from raysharding.errors import GroupError
from raysharding.group.cluster import Sighting, look
from raysharding.group.ranks import Member
from raysharding.group.rpc import Future, Progress, Stacks
from raysharding.group.supervision.running_call import Run


@dataclass(frozen=True)
class Answers:
    """What the ranks said."""

    said: Mapping[int, Any]
    """Rank → its answer."""
    silent: Mapping[int, str]
    """Rank → why there is no answer of it."""


def ask_all(members: Sequence[Member], method: str, *args: Any, within_s: float) -> Answers:
    """Ask every rank.

    Args:
        members: By rank.
        method: A control method of `RankActor`.
        args: Its arguments.
        within_s: Deadline for all answers together.
    """
    until = time.monotonic() + within_s
    refs = [getattr(member.actor, method).remote(*args) for member in members]
    said: dict[int, Any] = {}
    silent: dict[int, str] = {}
    for rank, ref in enumerate(refs):
        try:
            said[rank] = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            silent[rank] = f"does not answer within {within_s:g} s"
        except ray.exceptions.RayActorError:
            silent[rank] = "its process is gone"
        except ray.exceptions.RayError as error:
            silent[rank] = f"cannot answer: {error}"
    return Answers(said, silent)


POLL_S = 0.2
"""Between two questions about progress."""
# A late call's error comes within 2 s of its deadline: silent ranks have 0.4 s, witnesses 0.6 s, freed ranks 0.8 s.
_SILENT_S = 0.4
_STACKS_ANSWER_S = 1.0
_FREED_S = 0.8


class Questions:
    """Runs on the supervision thread; answers come back to it as events, and are dropped when the run has ended."""

    def __init__(
        self,
        members: Sequence[Member],
        watch: Callable[[Future, Callable[[Future], None]], None],
        current: Callable[[], Run | None],
        advance: Callable[[], None],
    ) -> None:
        """Ask nothing yet.

        Args:
            members: By rank.
            watch: Makes the end of a future an event.
            current: Returns the run that answers may still belong to.
            advance: Does what has become due.
        """
        self._members = members
        self._watch = watch
        self._current = current
        self._advance = advance
        self._noted: dict[int, list[Connection]] = {}
        self._here = ray.get_runtime_context().get_node_id()

    def progress(self, run: Run, dead: Collection[int]) -> None:
        """Ask how far ranks are that owe no answer."""
        run.next_poll = time.monotonic() + POLL_S
        ranks = [rank for rank in range(len(self._members)) if rank not in run.asked and rank not in dead]
        run.asked.update(ranks)
        self._ask(run, ranks, "progress", self._on_progress)

    def _on_progress(self, run: Run, rank: int, progress: Progress) -> None:
        run.asked.discard(rank)
        if run.moved.get(rank) != (progress.phase, progress.bytes_done):
            run.moved[rank] = (progress.phase, progress.bytes_done)
            run.deadline = time.monotonic() + run.task.deadline_s
        if rank == 0:
            run.task.call.progress = (progress.bytes_done, progress.bytes_total)

    def stacks(self, run: Run) -> None:
        """The deadline has passed: ask the late ranks what they do, and wait a moment for the answers."""
        now = time.monotonic()
        run.stacks = {}
        run.drain_until, run.witnesses_at = now + _STACKS_ANSWER_S, now + _SILENT_S
        self._ask(run, run.unfinished(self._members), "stacks", self._on_stacks)

    def _on_stacks(self, run: Run, rank: int, stacks: Stacks) -> None:
        assert run.stacks is not None, "asked by stacks()"
        if not run.is_freed:
            run.stacks[rank] = stacks
            self._end_wait(run)

    def witnesses(self, run: Run) -> None:
        """Ask about late ranks that have not answered: this process where it is on their machine, else a neighbour."""
        assert run.stacks is not None, "asked after stacks()"
        run.witnesses_at = None
        able = [*run.stacks, *run.finished]
        for rank in run.unfinished(self._members):
            if rank in run.stacks:
                continue
            one = self._members[rank]
            neighbours = [self._members[other] for other in able]
            neighbour = next((other for other in neighbours if other.info.node_id == one.info.node_id), None)
            where = one.info.pid, one.stacks_descriptor
            if one.info.node_id == self._here:
                self._watch(_in_thread(_look, *where), partial(self._on_answer, run, rank, self._on_sighting))
            elif neighbour is not None:
                sighting = neighbour.actor.witness.remote(*where).future()
                self._watch(sighting, partial(self._on_answer, run, rank, self._on_sighting))

    def _on_sighting(self, run: Run, rank: int, sighting: Sighting | None) -> None:
        if sighting is not None and not run.is_freed:
            run.sightings[rank] = sighting
            self._end_wait(run)

    def _end_wait(self, run: Run) -> None:
        """Stop waiting for answers when something is known of every late rank."""
        known = {*(run.stacks or {}), *run.sightings}
        if all(late in known for late in run.unfinished(self._members)):
            run.drain_until = time.monotonic()
        self._advance()

    def free(self, run: Run, lost: Collection[int]) -> None:
        """End the collectives of a failed call, so that the ranks keep what they hold; see `distributed.comm.abort`.

        All ranks cut their connections: of the peers of one, some wait for ranks that wait for it.

        Args:
            run: The call.
            lost: Ranks that are dead or hang. Which connections to them there are, `note_connections` has found out.
        """
        run.connections = {}
        run.drain_until, run.witnesses_at = time.monotonic() + _FREED_S, None
        living = [rank for rank in range(len(self._members)) if rank not in lost]
        self._ask(run, living, "connections", partial(self._on_connections, len(living)))

    def _on_connections(self, num_living: int, run: Run, rank: int, found: list[Connection]) -> None:
        assert run.connections is not None, "asked by free()"
        run.connections[rank] = found
        if len(run.connections) == num_living:
            for each, chosen in between({**self._noted, **run.connections}).items():
                if each in run.connections:
                    self._members[each].actor.cut.remote(chosen)

    def note_connections(self) -> None:
        """While all ranks are well: ask for their connections, for when one of them cannot say any more."""
        for rank, member in enumerate(self._members):
            self._watch(member.actor.connections.remote().future(), partial(self._on_noted, rank))

    def _on_noted(self, rank: int, future: Future) -> None:
        if future.exception() is None:
            self._noted[rank] = future.result()

    def _ask(self, run: Run, ranks: Iterable[int], question: str, then: Callable[[Run, int, Any], None]) -> None:
        for rank in ranks:
            answer = getattr(self._members[rank].actor, question).remote().future()
            self._watch(answer, partial(self._on_answer, run, rank, then))

    def _on_answer(self, run: Run, rank: int, then: Callable[[Run, int, Any], None], future: Future) -> None:
        # Of a rank that died, its lifetime tells.
        if run is self._current() and future.exception() is None:
            then(run, rank, future.result())


def _look(pid: int, descriptor: int) -> Sighting | None:
    try:
        return look(pid, descriptor)
    except OSError:
        return None  # gone, or in another container


def _in_thread(fn: Callable[..., Any], *args: Any) -> Future:
    """Run something that waits beside the supervision thread; a thread each, for there may be a rank for each."""
    future: Future = concurrent.futures.Future()
    threading.Thread(target=lambda: future.set_result(fn(*args)), name=fn.__name__, daemon=True).start()
    return future


_ANSWER_S = 1.0
_WITNESS_S = 0.8
_READ_S = 30.0
_MAX_TAIL_BYTES = 1 << 20


def read_stacks(members: Sequence[Member]) -> dict[int, str]:
    """Return the Python stacks of every rank, within 2 s: by itself, or as a witness sees it; else why there are none.

    Args:
        members: By rank.
    """
    answers = ask_all(members, "stacks", within_s=_ANSWER_S)
    stacks = {rank: stacks.text or "idle\n" for rank, stacks in answers.said.items()}
    for rank, reason in answers.silent.items():
        sighting = _sight(members, rank, [members[other] for other in answers.said])
        state = "" if sighting is None else f": {sighting.state}"
        stacks[rank] = f"rank {rank} {reason}{state}\n{sighting.stacks if sighting else ''}"
    return dict(sorted(stacks.items()))


def _sight(members: Sequence[Member], rank: int, able: Sequence[Member]) -> Sighting | None:
    """What this process can say of a silent rank of its machine, or else a rank that answers."""
    one = members[rank]
    where = one.info.pid, one.stacks_descriptor
    if one.info.node_id == ray.get_runtime_context().get_node_id():
        try:
            return look(*where)
        except OSError:
            return None
    neighbours = [other for other in able if other.info.node_id == one.info.node_id]
    answers = ask_all(neighbours[:1], "witness", *where, within_s=_WITNESS_S)
    sighting: Sighting | None = answers.said.get(0)
    return sighting


def read_log(member: Member, num_lines: int) -> str:
    """Return the last lines of a rank's stdout and stderr, from Ray's log files on its node. The rank may be dead.

    Args:
        member: The rank.
        num_lines: Of each of the two.

    Raises:
        GroupError: Its node is gone, or does not answer within 30 s, or Ray was shut down.
    """
    if not ray.is_initialized():
        raise GroupError("Ray was shut down, which knows where the logs are")
    if not member.log_paths:
        return "Ray keeps no log files of this rank\n"
    node_id = member.info.node_id
    if node_id == ray.get_runtime_context().get_node_id():
        return _tails(member.log_paths, num_lines)
    # Not the rank itself: it may be dead, or stopped.
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    reading = ray.remote(_tails).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        text: str = ray.get(reading.remote(member.log_paths, num_lines), timeout=_READ_S)
    except ray.exceptions.RayError as error:
        message = f"cannot read the log of rank {member.info.rank} on node {member.info.node_ip}: {error}"
        raise GroupError(message) from error
    return text


def _tails(paths: Sequence[str], num_lines: int) -> str:
    return "".join(f"== {path}\n{_tail(path, num_lines)}" for path in paths)


def _tail(path: str, num_lines: int) -> str:
    try:
        with open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - _MAX_TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"
    lines = text.splitlines()[-num_lines:]
    return "".join(f"{line}\n" for line in lines)
