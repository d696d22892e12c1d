"""From a checkpoint's path to running, loaded ranks, or to nothing at all: every step's failure undoes the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from raysharding.checkpoint import Checkpoint
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.distributed import LoadReport
from raysharding.group.channel import Channel
from raysharding.group.commands import Assignment
from raysharding.group.locate import local_path, open_anywhere
from raysharding.group.placement import choose_device_type, choose_world_size, reserve
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
    if max_output_bytes < 1:
        raise ValueError(f"max_output_bytes={max_output_bytes}: give a positive number of bytes")
    if not ray.is_initialized():
        ray.init()
    device_type = choose_device_type(device)
    num_ranks = choose_world_size(world_size, device_type, placement)
    opened = open_anywhere(checkpoint, timeouts.start_s)
    channel = _place(opened, num_ranks, device_type, placement, timeouts, max_output_bytes)
    try:
        build_s = timeouts.start_s
        channel.submit_same("build", model, opened.to_json(), sharding, loading, deadline_s=build_s).result()
        load = channel.submit_same("load", deadline_s=timeouts.load_stall_s, watch=True)
        follow(load, f"loading {checkpoint}", opened.num_bytes, progress)
        report = load.result()
        if optimizer is not None:
            channel.submit_same("set_optimizer", optimizer, {}).result()
    except BaseException:
        channel.supervisor.shutdown()
        raise
    channel.supervisor.started()
    return Launched(channel, report)


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
            num_threads=max(1, int(placement.cpus_per_rank)),
            rendezvous_s=timeouts.rendezvous_s,
            collective_s=max(timeouts.call_s, timeouts.load_stall_s) + _COLLECTIVE_GRACE_S,
            stall_s=timeouts.load_stall_s + _GRACE_S,
        )
        for info, visible in zip(ranks, started.visible_gpus, strict=True)
    ]
    channel.submit_each("join", [(place, address) for place in places], deadline_s=deadline_s).result()
