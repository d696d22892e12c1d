"""Replaces lost ranks with new ones when other replicas hold their shards (HSDP); reads no checkpoint.

Note [Replacing]: the actors of the lost ranks are gone; the survivors keep their modules and optimizers. New actors
start in the bundles of the lost ranks; Ray moves a bundle to another node if its node is gone. Then a new supervision
takes over all ranks under a new epoch, as a driver that attaches does, so that no message that the old supervision may
still have sent reaches the ranks. The ranks rendezvous: the survivors `rejoin`, and the new ranks `build` from the
headers that the survivors hold. Finally the new ranks copy the state of their replicas; see Note [Copying a replica].
If any step fails, all ranks are stopped, and the restart loads files.
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
    """Replace lost ranks with new ones, and copy the state of their replicas into the new ranks.

    Args:
        running: The group, whose supervision has begun a restart; the optimizer of its spec is the one that the group
            has, as far as the driver knows.
        lost: Ranks that are dead or were given up; the others hold every shard.

    Returns:
        The group, READY. The old supervision has released its ranks.

    Raises:
        Exception: The ranks could not be replaced (a `RayshardingError`, or an exception of Ray). The ranks are
            stopped, or the old supervision must stop them.
    """
    spec, members, supervisor = running.spec, running.client.members, running.client.supervisor
    if not supervisor.survivors.wait_gone(lost, _GONE_S):
        raise GroupError(f"{supervisor.name}: ranks that were stopped are still alive after {_GONE_S:g} s")
    sources = Replicas.of(spec.sharding, len(members)).sources(lost)
    checkpoint: bytes = _ask(members[min(sources.values())], "checkpoint")
    tells, place_s = spec.progress is not False, spec.timeouts.place_s
    wait_placed(running.reservation, len(members), spec.placement, place_s, tells=tells)
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
    """Put all ranks under a new supervision, whose Commands alone they accept."""
    old, name = running.client.members, running.spec.name
    survivors = [member for member in old if member.info.rank not in fresh]
    keeper = None if name is None else actor_name(name, 0)
    # In a named group one actor issues the epochs; a new actor in its place begins with this epoch.
    issuer = next((member for member in survivors if member.name == keeper), survivors[0])
    epoch: int = _ask(issuer, "take_over")
    members = tuple(replace(fresh.get(rank, member), epoch=epoch) for rank, member in enumerate(old))
    started, title = Started(members, running.visible_gpus), running.client.supervisor.name
    again = RunningGroup.assemble(title, running.spec, started, running.reservation, files=running.files)
    return replace(running, client=again.client, has_optimizer=again.has_optimizer)


def _fill(running: RunningGroup, sources: Mapping[int, int], checkpoint: bytes) -> None:
    """Make the ranks rendezvous, and make the new ranks copy their replicas."""
    spec, client, members = running.spec, running.client, running.client.members
    lease_s = spec.lifetime.starting_lease_s
    silent = probe_all(members, "accept_epoch", members[0].epoch, lease_s, within_s=_ANSWER_S).silent
    if silent:
        raise GroupError(f"{client.supervisor.name}: rank {min(silent)} {silent[min(silent)]}")
    client.supervisor.connect_ranks(spec.placement.port_range)
    if spec.preflight:
        Preflight(client).nodes()  # a new rank may be on a node that the group was not on
    blueprint = Blueprint(spec.model, checkpoint, spec.sharding, spec.loading)
    rendezvous(running, dict.fromkeys(sources, blueprint))
    # The copies take over the change counts, so that a driver that attaches later sees equal ranks; see
    # `Survivors.compare`.
    counts = {rank: _ask(members[source], "num_changes") for rank, source in sources.items()}
    arguments = (dict(sources), counts, spec.optimizer)
    client.submit_same("copy_replicas", *arguments, deadline_s=spec.timeouts.load_stall_s, watch=True).result()


def _ask(member: Member, method: str) -> Any:
    try:
        return ray.get(getattr(member.actor, method).remote(), timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        raise GroupError(f"rank {member.info.rank} does not answer {method}: {type(error).__name__}") from error
