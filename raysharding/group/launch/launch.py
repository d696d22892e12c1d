"""`launch`: from a checkpoint's path to running, loaded ranks; the failure of a step undoes all steps before it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.storage import normal_path
from raysharding.distributed import LoadReport
from raysharding.group.actors import Assignment, Blueprint
from raysharding.group.calls import ProgressOption, follow
from raysharding.group.cluster import (
    check_free,
    choose_device_type,
    choose_num_threads,
    choose_world_size,
    connect,
    reserve,
)
from raysharding.group.launch.find_checkpoint import Opened, local_path, opened_here, opened_on_a_node
from raysharding.group.launch.preflight import Preflight
from raysharding.group.launch.record import keep_record
from raysharding.group.launch.running_group import RunningGroup
from raysharding.group.launch.spec import GroupSpec, check_fit
from raysharding.group.launch.start_actors import start_actors
from raysharding.group.supervision import Client
from raysharding.models import InputBounds

# Ranks time out a little later than the driver, so that the driver's error, which covers all ranks, is raised first.
_GRACE_S = 5.0
_COLLECTIVE_GRACE_S = 60.0


def launch(spec: GroupSpec) -> RunningGroup:
    """Make a group; see `ShardedModelGroup.from_checkpoint`."""
    spec.check()
    opened = opened_here(spec)
    if opened is not None:
        # Before Ray is started: the check does not need Ray.
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
    running = _place(spec, opened.base, world_size, device_type)
    supervisor = running.client.supervisor
    try:
        supervisor.connect_ranks(spec.placement.port_range)
        preflight = Preflight(running.client) if spec.preflight else None
        if preflight is not None:
            preflight.nodes()
        rendezvous(running)
        report, bounds = _fill(running, opened, preflight)
        seen = None if preflight is None else preflight.finish()
        running = replace(running, load_report=report, bounds=bounds, preflight_report=seen)
        if spec.name is not None:
            keep_record(running)
            running.reservation.outlive_owner()
    except BaseException:
        supervisor.shutdown()
        raise
    supervisor.started()
    return running


def _fill(running: RunningGroup, opened: Opened, preflight: Preflight | None) -> tuple[LoadReport, InputBounds]:
    """Build the module on every rank, load it, and set its optimizer."""
    spec, client = running.spec, running.client
    if preflight is not None:
        preflight.link()
    built = (spec.model, opened.base.to_json(), spec.sharding, spec.loading)
    bounds: InputBounds = client.submit_same("build", *built, deadline_s=spec.timeouts.start_s).result()
    if preflight is not None:
        preflight.memory(spec.optimizer)
    report = _load(client, opened.base, None, spec.progress)
    if opened.adapters is not None:
        _load(client, opened.adapters, normal_path(spec.checkpoint), spec.progress)
    if spec.optimizer is not None:
        stall_s = spec.timeouts.load_stall_s
        client.submit_same("set_optimizer", spec.optimizer, {}, True, deadline_s=stall_s, watch=True).result()
    return report, bounds


def _load(client: Client, opened: Checkpoint, path: str | None, progress: ProgressOption) -> LoadReport:
    """Stream a checkpoint into the ranks, with a progress bar, and return rank 0's report."""
    load = client.submit_same("load", path, deadline_s=client.timeouts.load_stall_s, watch=True)
    follow(load, f"loading {opened.path}", opened.num_bytes, progress)
    report: LoadReport = load.result()
    return report


def _place(spec: GroupSpec, opened: Checkpoint, world_size: int, device_type: str) -> RunningGroup:
    """Reserve resources and start the actors."""
    placement, timeouts = spec.placement, spec.timeouts
    reservation = reserve(world_size, device_type, placement, timeouts.place_s, spec.lifetime)
    try:
        path = local_path(opened.files[0].path)
        started = start_actors(reservation, world_size, device_type, placement, timeouts.start_s, path, spec.lifetime)
        name = f"group {secrets.token_hex(3)}" if spec.name is None else f"group {spec.name!r}"
        return RunningGroup.assemble(name, spec, started, reservation)
    except BaseException:
        reservation.release()
        raise


def rendezvous(running: RunningGroup, blueprints: Mapping[int, Blueprint] | None = None) -> None:
    """Make every rank join a new process group through rank 0's store; ranks keep their modules.

    Args:
        running: The ranks, connected to this process.
        blueprints: Rank → blueprint of its module, for new ranks among ranks that already have a module.
    """
    client = running.client
    timeouts, ranks = client.timeouts, client.ranks
    deadline_s = timeouts.rendezvous_s + _GRACE_S
    here = (ranks[0].node_ip, timeouts.rendezvous_s, running.spec.placement.port_range)
    hosts = [here, *[(None, 0.0, None)] * (len(ranks) - 1)]
    address = client.submit_each("serve_store", hosts, deadline_s=deadline_s).result()
    places = [
        Assignment(
            rank=info.rank,
            world_size=len(ranks),
            local_rank=info.local_rank,
            device=info.device,
            node_ip=info.node_ip,
            visible_gpus=visible,
            num_threads=choose_num_threads(running.spec.placement),
            rendezvous_s=timeouts.rendezvous_s,
            collective_s=max(timeouts.call_s, timeouts.load_stall_s) + _COLLECTIVE_GRACE_S,
            stall_s=timeouts.load_stall_s + _GRACE_S,
        )
        for info, visible in zip(ranks, running.visible_gpus, strict=True)
    ]
    of_new = blueprints or {}
    deadline_s += timeouts.start_s if of_new else 0.0  # time to build a module, after the rendezvous
    client.submit_each(
        "join", [(place, address, of_new.get(place.rank)) for place in places], deadline_s=deadline_s
    ).result()
