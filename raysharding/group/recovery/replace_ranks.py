"""New ranks in the places of lost ones, around replicas that are whole (HSDP): no checkpoint is read.

Note [Replacing]: the actors of the lost ranks are gone, those of the others keep module and optimizer. New actors start
in the bundles of the lost ones, which Ray lays on another node where theirs is gone. Then a new supervision takes over
all of them, under an epoch of its own, as a driver that attaches does: nothing that the old one may still have sent
reaches the ranks. The ranks meet: those that were left `rejoin`, the new ones `build`, from the headers that the others
hold. At last the new ones copy what their replicas hold; see Note [Copying a replica]. If any of it fails, all ranks
are stopped, and the restart loads files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import ray

from raysharding.errors import GroupError
from raysharding.group.actors import Blueprint
from raysharding.group.cluster import actor_name, wait_placed
from raysharding.group.launch import Preflight, RunningGroup, Started, keep_record, rendezvous, start_in_place_of
from raysharding.group.ranks import Member
from raysharding.group.supervision import Replicas, probe_all

_ANSWER_S = 30.0
_GONE_S = 20.0


def replace_lost(running: RunningGroup, lost: Collection[int]) -> RunningGroup:
    """Put new ranks into the places of lost ones, and give them what their replicas hold.

    Args:
        running: The group, whose supervision has begun a restart; the optimizer of its spec is the one that it has, as
            far as the driver knows.
        lost: Ranks that are dead, or were given up; the others hold every shard.

    Returns:
        The group, READY. The old supervision has let go of its ranks.

    Raises:
        Exception: It could not be done (a `RayshardingError`, or Ray's own). The ranks are stopped, or the old
            supervision's to stop.
    """
    spec, members, supervisor = running.spec, running.client.members, running.client.supervisor
    if not supervisor.survivors.wait_gone(lost, _GONE_S):
        raise GroupError(f"{supervisor.name}: ranks that were stopped are still there after {_GONE_S:g} s")
    sources = Replicas.of(spec.sharding, len(members)).sources(lost)
    checkpoint: bytes = _ask(members[min(sources.values())], "checkpoint")
    wait_placed(running.reservation, len(members), spec.placement, spec.timeouts.place_s)
    fresh = start_in_place_of(members, lost, running.reservation, spec)
    try:
        again = _take_over(running, fresh)
    except BaseException:
        for member in fresh.values():
            ray.kill(member.actor, no_restart=True)
        raise
    supervisor.let_go()
    try:
        _fill(again, sources, checkpoint)
        if spec.name is not None:
            keep_record(again)
    except BaseException:
        again.client.supervisor.shutdown()
        raise
    again.client.supervisor.started()
    return again


def _take_over(running: RunningGroup, fresh: Mapping[int, Member]) -> RunningGroup:
    """Put all ranks under a new supervision, the only one that they will obey."""
    old, name = running.client.members, running.spec.name
    left = [member for member in old if member.info.rank not in fresh]
    keeper = None if name is None else actor_name(name, 0)
    # Of a named group one actor gives out the epochs; a new one in its place begins with ours.
    giver = next((member for member in left if member.name == keeper), left[0])
    epoch: int = _ask(giver, "take_over")
    members = tuple(replace(fresh.get(rank, member), epoch=epoch) for rank, member in enumerate(old))
    again = RunningGroup.assemble(
        running.client.supervisor.name,
        running.spec,
        Started(members, running.visible_gpus),
        running.reservation,
        files=running.files,
    )
    return replace(running, client=again.client, has_optimizer=again.has_optimizer)


def _fill(running: RunningGroup, sources: Mapping[int, int], checkpoint: bytes) -> None:
    """Have the ranks meet, and the new ones copy the others."""
    spec, client, members = running.spec, running.client, running.client.members
    silent = probe_all(members, "accept_epoch", members[0].epoch, within_s=_ANSWER_S).silent
    if silent:
        raise GroupError(f"{client.supervisor.name}: rank {min(silent)} {silent[min(silent)]}")
    client.supervisor.connect_ranks(spec.placement.port_range)
    if spec.preflight:
        Preflight(client).nodes()  # a new rank may be on a node that the group was not on
    blueprint = Blueprint(spec.model, checkpoint, spec.sharding, spec.loading)
    rendezvous(running, dict.fromkeys(sources, blueprint))
    # So that a driver which attaches later finds the copies alike; see `Survivors.compare`.
    counts = {rank: _ask(members[source], "num_changes") for rank, source in sources.items()}
    arguments = (dict(sources), counts, spec.optimizer)
    client.submit_same("copy_replicas", *arguments, deadline_s=spec.timeouts.load_stall_s, watch=True).result()


def _ask(member: Member, method: str) -> Any:
    try:
        return ray.get(getattr(member.actor, method).remote(), timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        raise GroupError(f"rank {member.info.rank} does not say {method}: {type(error).__name__}") from error
