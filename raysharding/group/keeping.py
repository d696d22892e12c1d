"""Leaving the record of a named group with its first actor, where a driver that attaches finds it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray

from raysharding.errors import GroupError
from raysharding.group.launched import Launched
from raysharding.group.model_files import BegunSave, ModelFiles
from raysharding.group.naming import actor_name
from raysharding.group.packing import pack
from raysharding.group.record import GroupRecord
from raysharding.group.spec import GroupSpec

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
