"""Probes of ranks beside their calls, on their control threads: progress, stacks, connections, logs.

`probe_all` sends one probe to all ranks under one deadline. `Probes` sends the supervisor's probes of a running call.
`read_stacks` and `read_log` return the Python stacks and the printed output of ranks.
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
from raysharding.group.cluster import ProcessSnapshot, dump_stacks, own_node_id
from raysharding.group.ranks import Member
from raysharding.group.rpc import Future, Progress, Stacks
from raysharding.group.supervision.running_call import RunningCall


@dataclass(frozen=True)
class ProbeReplies:
    """Replies to one probe of all ranks."""

    replies: Mapping[int, Any]
    """Rank → its reply."""
    silent: Mapping[int, str]
    """Rank → why it did not reply."""


def probe_all(members: Sequence[Member], method: str, *args: Any, within_s: float) -> ProbeReplies:
    """Call a control method on every rank.

    Args:
        members: Members, by rank.
        method: Name of a control method of `RankActor`.
        args: Its arguments.
        within_s: Deadline for all replies together, in seconds.
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
    return ProbeReplies(said, silent)


STATUS_S = 2.0
"""Deadline of the ranks' replies to `rank_statuses`, in seconds."""


def rank_statuses(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Return by rank the items of `Worker.status`, where the rank runs, and `answers`: True if it answered in time.

    Args:
        members: Members, by rank.
    """
    statuses = probe_all(members, "status", within_s=STATUS_S).replies
    return [
        # The supervision reports a rank that is dead or stopped.
        {**statuses.get(info.rank, {}), "rank": info.rank, "node_ip": info.node_ip, "pid": info.pid}
        | {"answers": info.rank in statuses}
        for info in (member.info for member in members)
    ]


POLL_S = 0.2
"""Seconds between two probes for progress."""
# The error of a late call is raised within 2 s of its deadline: ranks have 0.4 s to reply, other ranks of the node
# 0.6 s, and ranks whose collectives were ended 0.8 s.
_SILENT_S = 0.4
_STACKS_ANSWER_S = 1.0
_FREED_S = 0.8


class Probes:
    """Probes of a running call. Replies arrive on the supervision thread, and are dropped when the call has ended."""

    def __init__(
        self,
        members: Sequence[Member],
        watch: Callable[[Future, Callable[[Future], None]], None],
        current: Callable[[], RunningCall | None],
        advance: Callable[[], None],
    ) -> None:
        """Start without probes.

        Args:
            members: Members, by rank.
            watch: Calls a function on the supervision thread when a future completes.
            current: Returns the call that replies can belong to.
            advance: Does all that is due; see `Supervisor.advance`.
        """
        self._members = members
        self._watch = watch
        self._current = current
        self._advance = advance
        self._here = own_node_id()

    def progress(self, run: RunningCall, dead: Collection[int]) -> None:
        """Request the progress of all ranks without a pending request."""
        run.next_poll = time.monotonic() + POLL_S
        ranks = [rank for rank in range(len(self._members)) if rank not in run.asked and rank not in dead]
        run.asked.update(ranks)
        self._ask(run, ranks, "progress", self._on_progress)

    def _on_progress(self, run: RunningCall, rank: int, progress: Progress) -> None:
        run.asked.discard(rank)
        if run.moved.get(rank) != (progress.phase, progress.bytes_done):
            run.moved[rank] = (progress.phase, progress.bytes_done)
            run.deadline = time.monotonic() + run.task.deadline_s
        if rank == 0:
            run.task.call.progress = (progress.bytes_done, progress.bytes_total)

    def stacks(self, run: RunningCall) -> None:
        """Request the stacks of late ranks, after the deadline, and wait for them for a second at most."""
        now = time.monotonic()
        run.stacks = {}
        run.drain_until, run.neighbours_at = now + _STACKS_ANSWER_S, now + _SILENT_S
        self._ask(run, run.unfinished(self._members), "stacks", self._on_stacks)

    def _on_stacks(self, run: RunningCall, rank: int, stacks: Stacks) -> None:
        assert run.stacks is not None, "asked by stacks()"
        if not run.is_freed:
            run.stacks[rank] = stacks
            self._end_wait(run)

    def neighbours(self, run: RunningCall) -> None:
        """Get snapshots of late ranks that did not reply, from this process or another rank on their node."""
        assert run.stacks is not None, "asked after stacks()"
        run.neighbours_at = None
        able = [*run.stacks, *run.finished]
        for rank in run.unfinished(self._members):
            if rank in run.stacks:
                continue
            one = self._members[rank]
            neighbours = [self._members[other] for other in able]
            neighbour = next((other for other in neighbours if other.info.node_id == one.info.node_id), None)
            where = one.info.pid, one.stacks_descriptor
            if one.info.node_id == self._here:
                self._watch(_in_thread(dump_stacks, *where), partial(self._on_answer, run, rank, self._on_snapshot))
            elif neighbour is not None:
                snapshot = neighbour.actor.dump_stacks.remote(*where).future()
                self._watch(snapshot, partial(self._on_answer, run, rank, self._on_snapshot))

    def _on_snapshot(self, run: RunningCall, rank: int, snapshot: ProcessSnapshot | None) -> None:
        if snapshot is not None and not run.is_freed:
            run.snapshots[rank] = snapshot
            self._end_wait(run)

    def _end_wait(self, run: RunningCall) -> None:
        """Stop waiting if every late rank has replied or has a snapshot."""
        known = {*(run.stacks or {}), *run.snapshots}
        if all(late in known for late in run.unfinished(self._members)):
            run.drain_until = time.monotonic()
        self._advance()

    def free(self, run: RunningCall) -> None:
        """End the collectives of a failed call, so that the ranks keep their state; see `distributed.comm.abort`.

        All ranks shut their connections down: ranks may wait for each other in a chain.

        Args:
            run: The call, during which no rank died and none hangs.
        """
        run.connections = {}
        run.drain_until, run.neighbours_at = time.monotonic() + _FREED_S, None
        self._ask(run, range(len(self._members)), "connections", self._on_connections)

    def _on_connections(self, run: RunningCall, rank: int, found: list[Connection]) -> None:
        assert run.connections is not None, "asked by free()"
        run.connections[rank] = found
        if len(run.connections) == len(self._members):
            for each, chosen in between(run.connections).items():
                self._members[each].actor.cut.remote(chosen)

    def _ask(
        self, run: RunningCall, ranks: Iterable[int], question: str, then: Callable[[RunningCall, int, Any], None]
    ) -> None:
        for rank in ranks:
            answer = getattr(self._members[rank].actor, question).remote().future()
            self._watch(answer, partial(self._on_answer, run, rank, then))

    def _on_answer(
        self, run: RunningCall, rank: int, then: Callable[[RunningCall, int, Any], None], future: Future
    ) -> None:
        # The death of a rank is reported by its `lifetime` call.
        if run is self._current() and future.exception() is None:
            then(run, rank, future.result())


def _in_thread(fn: Callable[..., Any], *args: Any) -> Future:
    """Run a blocking function on a thread of its own."""
    future: Future = concurrent.futures.Future()
    threading.Thread(target=lambda: future.set_result(fn(*args)), name=fn.__name__, daemon=True).start()
    return future


_ANSWER_S = 1.0
_NEIGHBOUR_S = 0.8
_READ_S = 30.0
_MAX_TAIL_BYTES = 1 << 20


def read_stacks(members: Sequence[Member]) -> dict[int, str]:
    """Return the Python stacks of every rank, or why there are none. Takes at most 2 s.

    Args:
        members: Members, by rank.
    """
    answers = probe_all(members, "stacks", within_s=_ANSWER_S)
    stacks = {rank: stacks.text or "idle\n" for rank, stacks in answers.replies.items()}
    for rank, reason in answers.silent.items():
        snapshot = _snapshot(members, rank, [members[other] for other in answers.replies])
        state = "" if snapshot is None else f": {snapshot.state}"
        stacks[rank] = f"rank {rank} {reason}{state}\n{snapshot.stacks if snapshot else ''}"
    return dict(sorted(stacks.items()))


def _snapshot(members: Sequence[Member], rank: int, able: Sequence[Member]) -> ProcessSnapshot | None:
    """Return a snapshot of a silent rank, by this process or by another rank on its node."""
    one = members[rank]
    where = one.info.pid, one.stacks_descriptor
    if one.info.node_id == own_node_id():
        return dump_stacks(*where)
    neighbours = [other for other in able if other.info.node_id == one.info.node_id]
    answers = probe_all(neighbours[:1], "dump_stacks", *where, within_s=_NEIGHBOUR_S)
    snapshot: ProcessSnapshot | None = answers.replies.get(0)
    return snapshot


def read_log(member: Member, num_lines: int) -> str:
    """Return the last lines of a rank's stdout and stderr, from Ray's log files on its node. The rank may be dead.

    Args:
        member: The rank.
        num_lines: Number of lines of each.

    Raises:
        GroupError: The node is gone, does not answer within 30 s, or Ray was shut down.
    """
    if not ray.is_initialized():
        raise GroupError("Ray was shut down, which knows where the logs are")
    if not member.log_paths:
        return "Ray keeps no log files of this rank\n"
    node_id = member.info.node_id
    if node_id == own_node_id():
        return _tails(member.log_paths, num_lines)
    # A task on the node, because the rank may be dead or stopped.
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
