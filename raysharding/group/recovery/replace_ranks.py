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
from raysharding.group.launch import GroupSpec, Launched, Preflight, Started, keep_record, rendezvous, start_in_place_of
from raysharding.group.ranks import Member
from raysharding.group.supervision import Channel, Replicas, Supervisor, ask_all

_ANSWER_S = 30.0
_GONE_S = 20.0


def replace_lost(spec: GroupSpec, launched: Launched, lost: Collection[int], origin: str) -> Launched:
    """Put new ranks into the places of lost ones, and give them what their replicas hold.

    Args:
        spec: What the group was asked to be; its optimizer is the one that it has, as far as the driver knows.
        launched: Its parts; its supervision has begun a restart.
        lost: Ranks that are dead, or were given up; the others hold every shard.
        origin: The newest files that hold the model.

    Returns:
        The group's parts, READY. The old supervision has let go of them.

    Raises:
        Exception: It could not be done (a `RayshardingError`, or Ray's own). The ranks are stopped, or the old
            supervision's to stop.
    """
    old = launched.channel
    if not old.supervisor.survivors.wait_gone(lost, _GONE_S):
        raise GroupError(f"{old.supervisor.name}: ranks that were stopped are still there after {_GONE_S:g} s")
    sources = Replicas.of(spec.sharding, len(old.members)).sources(lost)
    source = old.members[min(sources.values())]
    checkpoint: bytes = _ask(source, "checkpoint")
    wait_placed(launched.reservation, len(old.members), spec.placement, spec.timeouts.place_s)
    fresh = start_in_place_of(old.members, lost, launched.reservation, spec)
    try:
        supervisor = _take_over(spec, launched, fresh)
    except BaseException:
        for member in fresh.values():
            ray.kill(member.actor, no_restart=True)
        raise
    old.supervisor.let_go()
    try:
        again = _fill(spec, launched, supervisor, sources, checkpoint)
        if spec.name is not None:
            keep_record(again, spec, origin)
    except BaseException:
        supervisor.shutdown()
        raise
    supervisor.started()
    return again


def _take_over(spec: GroupSpec, launched: Launched, fresh: Mapping[int, Member]) -> Supervisor:
    """A supervision of all ranks, the only one that they will obey."""
    old = launched.channel
    left = [member for member in old.members if member.info.rank not in fresh]
    keeper = None if spec.name is None else actor_name(spec.name, 0)
    # Of a named group one actor gives out the epochs; a new one in its place begins with ours.
    giver = next((member for member in left if member.name == keeper), left[0])
    epoch: int = _ask(giver, "take_over")
    members = [replace(fresh.get(rank, member), epoch=epoch) for rank, member in enumerate(old.members)]
    replicas = Replicas.of(spec.sharding, len(members))
    release, name = launched.reservation.release, old.supervisor.name
    return Supervisor(name, tuple(members), spec.timeouts, release, spec.lifetime, replicas=replicas)


def _fill(
    spec: GroupSpec, launched: Launched, supervisor: Supervisor, sources: Mapping[int, int], checkpoint: bytes
) -> Launched:
    """Have the ranks meet, and the new ones copy the others."""
    members = supervisor.members
    silent = ask_all(members, "admit", members[0].epoch, within_s=_ANSWER_S).silent
    if silent:
        raise GroupError(f"{supervisor.name}: rank {min(silent)} {silent[min(silent)]}")
    supervisor.connect_ranks(spec.placement.port_range)
    channel = Channel(members, supervisor, spec.timeouts, spec.max_output_bytes)
    started = Started(members, launched.started.visible_gpus)
    if spec.preflight:
        Preflight(channel).nodes()  # a new rank may be on a node that the group was not on
    blueprint = Blueprint(spec.model, checkpoint, spec.sharding, spec.loading)
    rendezvous(channel, started, spec.placement, dict.fromkeys(sources, blueprint))
    # So that a driver which attaches later finds the copies alike; see `Survivors.compare`.
    counts = {rank: _ask(members[source], "num_changes") for rank, source in sources.items()}
    arguments = (dict(sources), counts, spec.optimizer)
    channel.submit_same("copy_replicas", *arguments, deadline_s=spec.timeouts.load_stall_s, watch=True).result()
    made = (launched.load_report, launched.bounds, launched.preflight_report)
    return Launched(spec.model, channel, started, launched.reservation, *made)


def _ask(member: Member, method: str) -> Any:
    try:
        return ray.get(getattr(member.actor, method).remote(), timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        raise GroupError(f"rank {member.info.rank} does not say {method}: {type(error).__name__}") from error
