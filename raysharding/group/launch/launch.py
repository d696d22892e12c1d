"""From a checkpoint's path to running, loaded ranks, or to nothing at all: every step's failure undoes the others."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from raysharding.checkpoint import Checkpoint
from raysharding.config import Placement
from raysharding.distributed import LoadReport
from raysharding.group.actors import Assignment, Blueprint
from raysharding.group.calls import ProgressOption, follow
from raysharding.group.cluster import (
    Reservation,
    check_free,
    choose_device_type,
    choose_num_threads,
    choose_world_size,
    connect,
    reserve,
)
from raysharding.group.launch.find_checkpoint import Opened, anchored, local_path, opened_here, opened_on_a_node
from raysharding.group.launch.preflight import Preflight
from raysharding.group.launch.record import Launched, keep_record
from raysharding.group.launch.spec import GroupSpec, check_fit
from raysharding.group.launch.start_actors import Started, start_actors
from raysharding.group.supervision import Channel, Replicas, Supervisor
from raysharding.models import InputBounds

# Ranks time out a little after the driver does, so that the driver's error, which sees all ranks, is the one raised.
_GRACE_S = 5.0
_COLLECTIVE_GRACE_S = 60.0


def launch(spec: GroupSpec) -> Launched:
    """Do what `ShardedModelGroup.from_checkpoint` says."""
    spec.check()
    opened = opened_here(spec)
    if opened is not None:
        # Before Ray is started: nothing of it is needed to know.
        check_fit(opened.model, opened.base, spec.sharding, spec.loading, opened.adapters)
    connect()
    device_type = choose_device_type(spec.device)
    if spec.name is not None:
        check_free(spec.name)
    world_size = choose_world_size(spec.world_size, device_type, spec.placement)
    if opened is None:
        opened = opened_on_a_node(spec, spec.timeouts.start_s)
        check_fit(opened.model, opened.base, spec.sharding, spec.loading, opened.adapters)
    spec = replace(spec, model=opened.model)
    channel, started, reservation = _place(spec, opened.base, world_size, device_type)
    try:
        channel.supervisor.connect_ranks(spec.placement.port_range)
        preflight = Preflight(channel) if spec.preflight else None
        if preflight is not None:
            preflight.nodes()
        rendezvous(channel, started, spec.placement)
        report, bounds = _fill(spec, channel, opened, preflight)
        seen = None if preflight is None else preflight.finish()
        launched = Launched(spec.model, channel, started, reservation, report, bounds, seen)
        if spec.name is not None:
            keep_record(launched, spec, anchored(spec.checkpoint))
            reservation.outlive_owner()
    except BaseException:
        channel.supervisor.shutdown()
        raise
    channel.supervisor.started()
    return launched


def _fill(
    spec: GroupSpec, channel: Channel, opened: Opened, preflight: Preflight | None
) -> tuple[LoadReport, InputBounds]:
    """Make the module on every rank, load it, and give it its optimizer."""
    if preflight is not None:
        preflight.link()
    built = (spec.model, opened.base.to_json(), spec.sharding, spec.loading)
    bounds: InputBounds = channel.submit_same("build", *built, deadline_s=spec.timeouts.start_s).result()
    if preflight is not None:
        preflight.memory(spec.optimizer)
    report = _load(channel, opened.base, None, spec.progress)
    if opened.adapters is not None:
        _load(channel, opened.adapters, anchored(spec.checkpoint), spec.progress)
    if spec.optimizer is not None:
        stall_s = spec.timeouts.load_stall_s
        channel.submit_same("set_optimizer", spec.optimizer, {}, True, deadline_s=stall_s, watch=True).result()
    return report, bounds


def _load(channel: Channel, opened: Checkpoint, path: str | None, progress: ProgressOption) -> LoadReport:
    """Stream a checkpoint into the ranks, with a progress bar, and return rank 0's report."""
    load = channel.submit_same("load", path, deadline_s=channel.timeouts.load_stall_s, watch=True)
    follow(load, f"loading {opened.path}", opened.num_bytes, progress)
    report: LoadReport = load.result()
    return report


def _place(
    spec: GroupSpec, opened: Checkpoint, world_size: int, device_type: str
) -> tuple[Channel, Started, Reservation]:
    """Reserve room and start the actors."""
    placement, timeouts = spec.placement, spec.timeouts
    reservation = reserve(world_size, device_type, placement, timeouts.place_s, spec.lifetime)
    try:
        path = local_path(opened.files[0].path)
        started = start_actors(reservation, world_size, device_type, placement, timeouts.start_s, path, spec.lifetime)
        name = f"group {secrets.token_hex(3)}" if spec.name is None else f"group {spec.name!r}"
        replicas = Replicas.of(spec.sharding, world_size)
        supervisor = Supervisor(name, started.members, timeouts, reservation.release, spec.lifetime, replicas=replicas)
    except BaseException:
        reservation.release()
        raise
    return Channel(started.members, supervisor, timeouts, spec.max_output_bytes), started, reservation


def rendezvous(
    channel: Channel, started: Started, placement: Placement, blueprints: Mapping[int, Blueprint] | None = None
) -> None:
    """Let every rank join a new process group through rank 0's store, with its module where it has one.

    Args:
        channel: The way to the ranks.
        started: Their actors.
        placement: CPUs of a rank, and the ports of the store.
        blueprints: Rank → what it builds its module from, where it is new among ranks that have theirs.
    """
    timeouts, ranks = channel.timeouts, channel.ranks
    deadline_s = timeouts.rendezvous_s + _GRACE_S
    here = (ranks[0].node_ip, timeouts.rendezvous_s, placement.port_range)
    hosts = [here, *[(None, 0.0, None)] * (len(ranks) - 1)]
    address = channel.submit_each("serve_store", hosts, deadline_s=deadline_s).result()
    places = [
        Assignment(
            rank=info.rank,
            world_size=len(ranks),
            local_rank=info.local_rank,
            device=info.device,
            node_ip=info.node_ip,
            visible_gpus=visible,
            num_threads=choose_num_threads(placement),
            rendezvous_s=timeouts.rendezvous_s,
            collective_s=max(timeouts.call_s, timeouts.load_stall_s) + _COLLECTIVE_GRACE_S,
            stall_s=timeouts.load_stall_s + _GRACE_S,
        )
        for info, visible in zip(ranks, started.visible_gpus, strict=True)
    ]
    found = blueprints or {}
    deadline_s += timeouts.start_s if found else 0.0  # to build a module, after they have met
    channel.submit_each(
        "join", [(place, address, found.get(place.rank)) for place in places], deadline_s=deadline_s
    ).result()
