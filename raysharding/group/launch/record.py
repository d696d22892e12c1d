"""`Launched`: the running parts of a group, from which its object is made.

`GroupRecord`: what a driver that attaches to a named group needs to know; the group's first actor keeps it.

Leaving the record of a named group with its first actor, where a driver that attaches finds it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from raysharding.distributed import LoadReport
from raysharding.errors import GroupError
from raysharding.group.calls import BegunSave, ModelFiles
from raysharding.group.cluster import Reservation, actor_name
from raysharding.group.launch.preflight import PreflightReport
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_actors import Started
from raysharding.group.ranks import RankInfo
from raysharding.group.rpc import Packed, pack
from raysharding.group.supervision import Channel
from raysharding.models import InputBounds


@dataclass(frozen=True)
class GroupRecord:
    """A named group."""

    version: float
    """Wall clock when it was written; of two that cross on their way the later one stays."""
    ranks: tuple[RankInfo, ...]
    """By rank."""
    actor_names: tuple[str, ...]
    """Names of the ranks' actors, by rank."""
    stacks_descriptors: tuple[int, ...]
    """What `stack_dump.look` needs, by rank."""
    log_paths: tuple[tuple[str, ...], ...]
    """What a rank prints into, by rank."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The group's resources."""
    spec: Packed
    """The `GroupSpec`, pickled: it may hold functions that the next driver cannot import."""
    origin: str
    """The newest files that hold the model."""
    begun: tuple[BegunSave, ...]
    """Saves that the ranks were asked for since; the driver had not heard how they ended."""
    load_report: LoadReport
    """Rank 0's report of the load that made the group."""
    bounds: InputBounds
    """What the model takes."""
    preflight_report: PreflightReport | None
    """What was seen of nodes and links when the group was made."""


@dataclass(frozen=True)
class Launched:
    """A group's running parts."""

    model: Any
    """What the ranks built: see `Opened`."""
    channel: Channel
    """Sends calls to the ranks."""
    started: Started
    """The ranks' actors."""
    reservation: Reservation
    """Their resources."""
    load_report: LoadReport
    """Rank 0's report."""
    bounds: InputBounds
    """What the model takes."""
    preflight_report: PreflightReport | None
    """What was seen of nodes and links; `None` where nobody looked."""


_KEEP_S = 30.0


def keep_record(launched: Launched, spec: GroupSpec, origin: str) -> None:
    """Leave the record of a group that has been made.

    Args:
        launched: Its parts.
        spec: What it was asked to be.
        origin: The newest files that hold its model.

    Raises:
        GroupError: The actor that keeps it is gone, or does not answer.
    """
    try:
        ray.get(_send(launched, spec, origin), timeout=_KEEP_S)
    except ray.exceptions.RayError as error:
        raise GroupError(f"group {spec.name!r}: the rank that is to keep its record does not: {error}") from error


def update_record(launched: Launched, spec: GroupSpec, files: ModelFiles) -> None:
    """Leave a newer record, and wait for nothing: if its actor is gone, the group is broken, too."""
    _send(launched, spec, files.origin, files.begun)


def _send(launched: Launched, spec: GroupSpec, origin: str, begun: tuple[BegunSave, ...] = ()) -> Any:
    members = launched.channel.members
    record = GroupRecord(
        version=time.time(),
        ranks=launched.channel.ranks,
        actor_names=tuple(str(one.name) for one in members),
        stacks_descriptors=tuple(one.stacks_descriptor for one in members),
        log_paths=tuple(one.log_paths for one in members),
        visible_gpus=launched.started.visible_gpus,
        reservation=replace(launched.reservation, reaper=None),  # it is this driver's own
        # A progress callback is the driver's own, and most do not pickle.
        spec=pack(replace(spec, progress=None), "the arguments of from_checkpoint").snapshot(),
        origin=origin,
        begun=begun,
        load_report=launched.load_report,
        bounds=launched.bounds,
        preflight_report=launched.preflight_report,
    )
    keeper = next(one for one in members if one.name == actor_name(str(spec.name), 0))
    return keeper.actor.keep.remote(keeper.epoch, record)
