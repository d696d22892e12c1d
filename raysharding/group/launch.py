"""From a checkpoint's path to running, loaded ranks, or to nothing at all: every step's failure undoes the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysharding.checkpoint import Checkpoint
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.distributed import LoadReport
from raysharding.group import fit
from raysharding.group.channel import Channel
from raysharding.group.commands import Assignment
from raysharding.group.connect import connect
from raysharding.group.locate import local_path, open_here, open_on_a_node
from raysharding.group.placement import (
    check_world_size,
    choose_device_type,
    choose_num_threads,
    choose_world_size,
    reserve,
)
from raysharding.group.progress import ProgressOption, follow
from raysharding.group.start import Started, start_actors
from raysharding.group.supervision import Supervisor

# Ranks time out a little after the driver does, so that the driver's error, which sees all ranks, is the one raised.
_GRACE_S = 5.0
_COLLECTIVE_GRACE_S = 60.0


@dataclass(frozen=True)
class Launched:
    """A group's running parts."""

    channel: Channel
    """Sends calls to the ranks."""
    load_report: LoadReport
    """Rank 0's report."""


def launch(
    checkpoint: str,
    *,
    model: Any,
    world_size: int | None,
    device: str | None,
    sharding: Sharding,
    loading: Loading,
    placement: Placement,
    timeouts: Timeouts,
    optimizer: Callable[..., Any] | None,
    max_output_bytes: int,
    progress: ProgressOption,
) -> Launched:
    """Do what `ShardedModelGroup.from_checkpoint` says."""
    fit.check_configs(sharding, loading, placement, timeouts, max_output_bytes)
    check_world_size(world_size)
    fit.check_factories(model, optimizer)
    opened = open_here(checkpoint)
    if opened is not None:
        fit.check_fit(model, opened, sharding, loading)  # before Ray is started: nothing of it is needed to know
    connect()
    device_type = choose_device_type(device)
    num_ranks = choose_world_size(world_size, device_type, placement)
    if opened is None:
        opened = open_on_a_node(checkpoint, timeouts.start_s)
        fit.check_fit(model, opened, sharding, loading)
    channel = _place(opened, num_ranks, device_type, placement, timeouts, max_output_bytes)
    try:
        channel.submit_same("build", model, opened.to_json(), sharding, loading, deadline_s=timeouts.start_s).result()
        report = _load(channel, opened, progress)
        if optimizer is not None:
            stall_s = timeouts.load_stall_s
            channel.submit_same("set_optimizer", optimizer, {}, True, deadline_s=stall_s, watch=True).result()
    except BaseException:
        channel.supervisor.shutdown()
        raise
    channel.supervisor.started()
    return Launched(channel, report)


def _load(channel: Channel, opened: Checkpoint, progress: ProgressOption) -> LoadReport:
    """Stream the checkpoint into the ranks, with a progress bar, and return rank 0's report."""
    load = channel.submit_same("load", None, deadline_s=channel.timeouts.load_stall_s, watch=True)
    follow(load, f"loading {opened.path}", opened.num_bytes, progress)
    report: LoadReport = load.result()
    return report


def _place(
    opened: Checkpoint,
    world_size: int,
    device_type: str,
    placement: Placement,
    timeouts: Timeouts,
    max_output_bytes: int,
) -> Channel:
    """Reserve room, start the actors, and let the ranks meet."""
    reservation = reserve(world_size, device_type, placement, timeouts.place_s)
    try:
        path = local_path(opened.files[0].path)
        started = start_actors(reservation, world_size, device_type, placement, timeouts.start_s, path)
        name = f"group {secrets.token_hex(3)}"
        supervisor = Supervisor(name, started.members, timeouts, reservation.release)
    except BaseException:
        reservation.release()
        raise
    channel = Channel(started.members, supervisor, timeouts, max_output_bytes)
    try:
        _rendezvous(channel, started, placement)
    except BaseException:
        supervisor.shutdown()
        raise
    return channel


def _rendezvous(channel: Channel, started: Started, placement: Placement) -> None:
    """Let every rank join the process group through rank 0's store."""
    timeouts, ranks = channel.timeouts, channel.ranks
    deadline_s = timeouts.rendezvous_s + _GRACE_S
    hosts = [(ranks[0].node_ip, timeouts.rendezvous_s), *[(None, 0.0)] * (len(ranks) - 1)]
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
    channel.submit_each("join", [(place, address) for place in places], deadline_s=deadline_s).result()
