"""`GroupRecord`: what a driver that attaches to a named group needs to know. The group's first actor keeps it."""

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
    """A named group."""

    version: float
    """Wall clock when it was written; of two that cross on their way the later one stays."""
    members: tuple[Member, ...]
    """By rank, without the handles of their actors, which are another process's own."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The ranks' resources."""
    spec: Packed
    """The `GroupSpec`, pickled: it may hold functions that the next driver cannot import."""
    origin: str
    """The newest files that hold the model."""
    begun: tuple[BegunSave, ...]
    """Saves that the ranks were asked for since; the driver had not heard how they ended."""
    load_report: LoadReport | None
    """See `RunningGroup`."""
    bounds: InputBounds
    """See `RunningGroup`."""
    preflight_report: PreflightReport | None
    """See `RunningGroup`."""


_KEEP_S = 30.0


def keep_record(running: RunningGroup) -> None:
    """Leave the record of a group that has been made.

    Raises:
        GroupError: The actor that keeps it is gone, or does not answer.
    """
    try:
        ray.get(_send(running, running.spec), timeout=_KEEP_S)
    except ray.exceptions.RayError as error:
        what = f"group {running.spec.name!r}: the rank that is to keep its record does not: {error}"
        raise GroupError(what) from error


def update_record(running: RunningGroup, spec: GroupSpec) -> None:
    """Leave a newer record, and wait for nothing: if its actor is gone, the group is broken, too.

    Args:
        running: The group.
        spec: What it was asked to be, with the optimizer that it has.
    """
    _send(running, spec)


def _send(running: RunningGroup, spec: GroupSpec) -> Any:
    members = running.client.members
    record = GroupRecord(
        version=time.time(),
        members=tuple(replace(member, actor=None) for member in members),
        visible_gpus=running.visible_gpus,
        reservation=replace(running.reservation, reaper=None),  # it is this driver's own
        # A progress callback is the driver's own, and most do not pickle.
        spec=pack(replace(spec, progress=None), "the arguments of from_checkpoint").snapshot(),
        origin=running.files.origin,
        begun=running.files.begun,
        load_report=running.load_report,
        bounds=running.bounds,
        preflight_report=running.preflight_report,
    )
    keeper = next(one for one in members if one.name == actor_name(str(spec.name), 0))
    return keeper.actor.keep.remote(keeper.epoch, record)
