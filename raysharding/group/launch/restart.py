"""`restart`: new processes for a group, and its newest state in them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ray.util.metrics import Counter

from raysharding.checkpoint.storage import normal_path
from raysharding.checkpoint.writing import newest_after, remove_unfinished
from raysharding.errors import GroupError
from raysharding.group.calls import Client, UndoOnInterrupt, is_committed
from raysharding.group.launch.launch import RunningGroup, make
from raysharding.group.launch.spec import check_fit, open_spec
from raysharding.group.launch.start_report import StartClock
from raysharding.group.messages import FilesRecord, GroupState
from raysharding.models import Adapted
from raysharding.report import Report, Table

_STOP_S = 60.0


@dataclass(frozen=True, repr=False)
class RestartReport(Report):
    """Report of a restart."""

    why: str
    """Reason for the restart."""
    checkpoint: str
    """Path or URI of the loaded checkpoint."""
    world_size: int
    """Number of ranks now."""
    seconds: float
    """Time that the restart took."""

    def _title(self) -> str:
        return "restarted"

    def _parts(self) -> list[Table]:
        rows = [("why", self.why), ("checkpoint", self.checkpoint), ("ranks", str(self.world_size))]
        return [Table((), [*rows, ("time", f"{self.seconds:.2f} s")])]


def restart(
    running: RunningGroup, *, checkpoint: str | None, world_size: int | None, lock: tuple[str, str] | None = None
) -> RestartReport:
    """Replace a group's ranks by new ones, with its newest files or those of a checkpoint.

    Args:
        running: The group, whose spec and facts become those of the new ranks.
        checkpoint: The user's argument.
        world_size: The user's argument.
        lock: Kind and key of the lock that the run holds which restarts the group.
    """
    begun, clock = time.monotonic(), StartClock()
    client = running.client
    if client.state is GroupState.CLOSED:
        client.connection.refuse_if_unusable()
    if client.state in (GroupState.READY, GroupState.BUSY) and checkpoint is None and world_size is None:
        raise ValueError(
            f"{client.name} is {client.state.value}: there is nothing to restart. Give checkpoint= to go back "
            "to saved weights, or world_size= for another number of ranks; both discard the ranks' current state"
        )
    Counter("raysharding_restarts", "Restarts of the group", tag_keys=("group",)).inc(tags={"group": client.name})
    why = _why(running, checkpoint, world_size)
    spec = replace(running.stored_spec(), timeouts=running.spec.timeouts, progress=running.spec.progress)
    spec = spec if world_size is None else replace(spec, world_size=world_size)
    spec.check()
    with UndoOnInterrupt():
        key = client.connection.key
        record: FilesRecord | None = None
        try:
            record = client.connection.ask("begin_restart", key, lock, within_s=_STOP_S)
            record = _end_saves(client, record)
            origin = record.origin
            if record.base is not None:
                # No file holds the adapters if the origin is the base that they began on.
                origin = record.base if origin == spec.model.base else origin
                spec = replace(spec, model=replace(spec.model, base=record.base))
            source = newest_after(origin) if checkpoint is None else checkpoint
            # Nothing was saved or loaded since the group was made: random weights are made again, equal ones.
            is_first = record.is_initial and record.base is None
            is_own = checkpoint is None and is_first and source == normal_path(spec.checkpoint)
            spec, opened, _ = open_spec(spec if is_own else spec.of_files(source))
            loaded = normal_path(spec.checkpoint)
            clock.end("ranks stopped, checkpoint")
            check = partial(check_fit, opened, spec.sharding, spec.loading)
            with client.making():
                fresh = make(client, spec, opened, clock, check, reloaded=None if is_own else loaded)
        except BaseException as error:
            if record is None and isinstance(error, Exception):
                raise  # it was refused
            if isinstance(error, Exception):
                error.add_note(f"raysharding: the group was being restarted: {why}")
            said = str(error) or type(error).__name__
            with suppress(GroupError):  # the controller is gone
                client.connection.ask("give_up", key, GroupError(f"{client.name}: its restart failed: {said}"))
                client.connection.refresh()
            raise
    running.spec, running.loaded = fresh.spec, fresh.loaded
    if isinstance(fresh.spec.model, Adapted) and fresh.spec.model.base == loaded:
        why += f"; the adapters are new ones: {loaded} holds none"
    return RestartReport(why, loaded, len(client.ranks), time.monotonic() - begun)


def _end_saves(client: Client, record: FilesRecord) -> FilesRecord:
    """Determine from the files how the saves with an unknown outcome ended, and remove their unfinished files.

    The writers of these saves are dead: a save that is not committed now never will be.
    """
    for save in record.begun:
        remove_unfinished(save.path, save.token)
    committed = [save.token for save in record.begun if is_committed(save)]
    ended: FilesRecord = client.connection.ask("saves_ended", [save.token for save in record.begun], committed)
    client.pending.restarted()
    return ended


def _why(running: RunningGroup, checkpoint: str | None, world_size: int | None) -> str:
    if checkpoint is not None:
        return "a checkpoint was given"
    if world_size not in (None, running.spec.world_size):
        return "another number of ranks was given"
    cause = running.client.cause
    if cause is None:
        return "it was asked for"
    return str(cause.primary) if cause.primary is not None else cause.message
