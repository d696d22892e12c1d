"""`GroupRecord`: the data that a driver needs to attach to a named group. The group's first actor keeps the record."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from raysharding.distributed import LoadReport
from raysharding.errors import GroupError
from raysharding.group.calls import BegunSave
from raysharding.group.cluster import Reservation, actor_name
from raysharding.group.launch.preflight import PreflightReport
from raysharding.group.launch.running_group import RunningGroup
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.ranks import Member
from raysharding.group.rpc import Packed, pack
from raysharding.models import InputBounds


@dataclass(frozen=True)
class GroupRecord:
    """Record of a named group."""

    version: float
    """Wall-clock time of writing; of two records that arrive out of order, the one with the later time is kept."""
    members: tuple[Member, ...]
    """Members by rank, without their actor handles, which are valid in one process only."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The ranks' resources."""
    spec: Packed
    """The `GroupSpec`, pickled, since it may hold functions that the next driver cannot import."""
    origin: str
    """The newest files that hold the model."""
    begun: tuple[BegunSave, ...]
    """Saves that were requested from the ranks since, and whose outcome the driver did not know."""
    load_report: LoadReport | None
    """See `RunningGroup`."""
    bounds: InputBounds
    """See `RunningGroup`."""
    preflight_report: PreflightReport | None
    """See `RunningGroup`."""


_KEEP_S = 30.0


def keep_record(running: RunningGroup) -> None:
    """Store the record of a group that has been made.

    Raises:
        GroupError: The actor that keeps the record is gone, or does not answer.
    """
    try:
        ray.get(_send(running, running.spec), timeout=_KEEP_S)
    except ray.exceptions.RayError as error:
        what = f"group {running.spec.name!r}: the rank that is to keep the group's record failed to store it: {error}"
        raise GroupError(what) from error


def update_record(running: RunningGroup, spec: GroupSpec) -> None:
    """Store a newer record without waiting: if the actor that keeps it is gone, the group is broken anyway.

    Args:
        running: The group.
        spec: The group's spec, with its current optimizer.
    """
    _send(running, spec)


def _send(running: RunningGroup, spec: GroupSpec) -> Any:
    members = running.client.members
    record = GroupRecord(
        version=time.time(),
        members=tuple(replace(member, actor=None) for member in members),
        visible_gpus=running.visible_gpus,
        reservation=replace(running.reservation, reaper=None),  # the reaper belongs to this driver
        # A progress callback belongs to the driver, and most callbacks do not pickle.
        spec=pack(replace(spec, progress=None), "the arguments of from_checkpoint").snapshot(),
        origin=running.files.origin,
        begun=running.files.begun,
        load_report=running.load_report,
        bounds=running.bounds,
        preflight_report=running.preflight_report,
    )
    keeper = next(one for one in members if one.name == actor_name(str(spec.name), 0))
    return keeper.actor.keep.remote(keeper.epoch, record)
