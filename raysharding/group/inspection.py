"""What people look at when a rank behaves strangely: its Python stacks, and the end of what it has printed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.errors import GroupError
from raysharding.group.answers import ask_all
from raysharding.group.ranks import Member
from raysharding.group.witness import Sighting, look

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
