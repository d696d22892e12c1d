"""`look_at`, `all_stacks`: what ranks that are late do, by themselves or as another process of their node sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray

from raysharding.group.cluster import ProcessSnapshot, dump_stacks
from raysharding.group.controller.members import Ranks, start
from raysharding.group.messages import Stacks

# The error of a late call is raised within 2 s of its deadline.
_SILENT_S = 0.4
_ANSWER_S = 1.0
_NEIGHBOUR_S = 0.8


async def look_at(ranks: Ranks, late: Sequence[int]) -> tuple[dict[int, Stacks], dict[int, ProcessSnapshot]]:
    """Return the stacks of ranks that answer, and snapshots of the others; takes 1 s at most.

    Args:
        ranks: The ranks.
        late: Those to look at.
    """
    asking = start(ranks.ask("stacks", within_s=_ANSWER_S, ranks=late))
    await asyncio.wait([asking], timeout=_SILENT_S)
    if asking.done() and not asking.result().silent:
        return dict(asking.result().replies), {}
    # Beside the question, which a slow rank may still answer: a rank that answers needs no snapshot.
    seen = await asyncio.gather(*(_snapshot(ranks, rank, late) for rank in late))
    snapshots = {rank: one for rank, one in zip(late, seen, strict=True) if one is not None}
    stacks = dict((await asking).replies)
    return stacks, {rank: one for rank, one in snapshots.items() if rank not in stacks}


async def all_stacks(ranks: Ranks) -> dict[int, str]:
    """Return the Python stacks of every rank, or why there are none. Takes at most 2 s."""
    answers = await ranks.ask("stacks", within_s=_ANSWER_S)
    stacks = {rank: one.text or "idle\n" for rank, one in answers.replies.items()}
    for rank, reason in answers.silent.items():
        snapshot = await _snapshot(ranks, rank, list(answers.silent))
        state = "" if snapshot is None else f": {snapshot.state}"
        stacks[rank] = f"rank {rank} {reason}{state}\n{snapshot.stacks if snapshot else ''}"
    return dict(sorted(stacks.items()))


async def _snapshot(ranks: Ranks, rank: int, late: Sequence[int]) -> ProcessSnapshot | None:
    """Return a snapshot of a rank, by this process or by another rank on its node."""
    one = ranks.members[rank]
    where = one.info.pid, one.stacks_descriptor
    if one.info.node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(dump_stacks, *where)
    others = [other for other in ranks.members if other.info.node_id == one.info.node_id and other is not one]
    # Ranks that are late may not answer; one that has finished does.
    others.sort(key=lambda other: other.info.rank in late)
    for other in others[:1]:
        answers = await ranks.ask("dump_stacks", *where, within_s=_NEIGHBOUR_S, ranks=[other.info.rank])
        snapshot: ProcessSnapshot | None = answers.replies.get(other.info.rank)
        return snapshot
    return None
