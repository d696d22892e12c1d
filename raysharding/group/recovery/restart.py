"""Restarts a broken group: its ranks form a new process group around their shards, or new ranks load a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray.util.metrics import Counter

from raysharding.checkpoint.storage import normal_path
from raysharding.checkpoint.writing import newest_after
from raysharding.errors import GroupTakenOverError, RayshardingError
from raysharding.group.calls import UndoOnInterrupt
from raysharding.group.launch import RunningGroup, launch, rendezvous
from raysharding.group.supervision import GroupState, probe_all
from raysharding.html import html_report, html_rows
from raysharding.models import Adapted

_ANSWER_S = 5.0


@dataclass(frozen=True)
class RestartReport:
    """Report of a restart."""

    how: Literal["in place", "reloaded"]
    """Kind of the restart. `in place`: the same processes formed a new process group, with their weights and optimizer;
    the state is that before the failed call, unless `why` says that all ranks had ended the call. `reloaded`: new
    processes loaded a checkpoint."""
    why: str
    """Reason for this kind of restart."""
    checkpoint: str | None
    """Path or URI of the loaded checkpoint; `None` if none was loaded."""
    world_size: int
    """Number of ranks now."""
    seconds: float
    """Time that the restart took."""

    def _repr_html_(self) -> str:
        rows = [("why", self.why), ("ranks", str(self.world_size)), ("time", f"{self.seconds:.2f} s")]
        if self.checkpoint is not None:
            rows.append(("checkpoint", self.checkpoint))
        return html_report(f"restarted {self.how}", html_rows((), rows))


def restart(
    running: RunningGroup,
    *,
    checkpoint: str | None,
    world_size: int | None,
    optimizer: Callable[..., Any] | None,
) -> tuple[RunningGroup, RestartReport]:
    """Restart a group; see `ShardedModelGroup.restart`.

    Args:
        running: The group.
        checkpoint: The user's argument.
        world_size: The user's argument.
        optimizer: Factory of the optimizer that the group has, as far as the driver knows.

    Returns:
        The group as it runs now (the same object if all ranks were kept), and the report of the restart.
    """
    begun = time.monotonic()
    supervisor, files = running.client.supervisor, running.files
    if supervisor.state is GroupState.CLOSED or isinstance(supervisor.status.cause, GroupTakenOverError):
        supervisor.status.refuse_if_unusable()
    if supervisor.state in (GroupState.READY, GroupState.BUSY) and checkpoint is None and world_size is None:
        raise ValueError(
            f"{supervisor.name} is {supervisor.state.value}: there is nothing to restart. Give checkpoint= to go back "
            "to saved weights, or world_size= for another number of ranks; both discard the ranks' current state"
        )
    Counter("raysharding_restarts", "Restarts of the group", tag_keys=("group",)).inc(tags={"group": supervisor.name})
    num_ranks = len(running.client.members) if world_size is None else world_size
    spec = replace(running.spec, optimizer=optimizer)
    why = _why_reload(running, checkpoint, world_size)
    if why is None:
        restarted = _go_on(running, begun)
        if not isinstance(restarted, str):
            return restarted
        why = restarted
    spec = replace(spec, world_size=num_ranks)
    spec.check()
    supervisor.give_up("is being restarted")
    files.settle()  # not earlier: a rank that was still alive might have committed a save after it
    number, origin = files.begin_load(), files.origin
    if files.base is not None:
        # No file holds the adapters if the origin is the base that they began on.
        origin = files.base if origin == spec.model.base else origin
        spec = replace(spec, model=replace(spec.model, base=files.base))
    source = newest_after(origin) if checkpoint is None else checkpoint
    # Nothing was saved or loaded since the group was made: random weights are made again, equal ones.
    is_own = checkpoint is None and files.is_first and not files.base and source == normal_path(spec.checkpoint)
    try:
        with UndoOnInterrupt():
            fresh = launch(spec if is_own else spec.of_files(source))
    except Exception as error:
        error.add_note(f"raysharding: the restart had to load files: {why}")
        raise
    supervisor.shut_down_soon()  # its ranks are gone; an error here would leave the new ranks without an owner
    if not is_own:
        source = normal_path(fresh.spec.checkpoint)
        files.loaded(source, number)
        files.base = None  # the new spec names it
    if isinstance(fresh.spec.model, Adapted) and fresh.spec.model.base == source:
        why += f"; the adapters are new ones: {source} holds none"
    report = RestartReport("reloaded", why, source, len(fresh.client.members), time.monotonic() - begun)
    return replace(fresh, files=files), report


def _why_reload(running: RunningGroup, checkpoint: str | None, world_size: int | None) -> str | None:
    """Return why the ranks cannot continue with their current state, or `None` if they can."""
    supervisor = running.client.supervisor
    if checkpoint is not None:
        return "a checkpoint was given"
    if world_size not in (None, len(running.client.members)):
        return "another number of ranks was given"
    survivors = supervisor.survivors
    survivors.keep_for(2 * _ANSWER_S)
    if not survivors.is_kept:
        cause = supervisor.status.cause
        seen = (cause.primary, *cause.failures.values()) if cause else ()
        lost = [failure for failure in seen if failure is not None and failure.kind in ("died", "hung")]
        return f"{lost[0]}: {survivors.recoverable.why_not}" if lost else survivors.recoverable.why_not
    return None


def _go_on(running: RunningGroup, begun: float) -> tuple[RunningGroup, RestartReport] | str:
    """Restart with the state of the ranks; if that fails, return the reason."""
    supervisor, members = running.client.supervisor, running.client.members
    # The driver may not know yet of a rank that died a moment ago.
    silent = probe_all(members, "progress", within_s=_ANSWER_S).silent
    recoverable = None if silent else supervisor.revive()
    if recoverable is None:
        return supervisor.survivors.recoverable.why_not or "a rank died, or does not answer, after the failure"
    try:
        with UndoOnInterrupt():
            rendezvous(running)  # a new process group around the ranks' shards
            supervisor.started()
    except Exception as error:  # noqa: BLE001 - after any error, also one of Ray, the files can still be loaded
        text = str(error) if isinstance(error, RayshardingError) else f"{type(error).__name__}: {error}"
        return f"the ranks could not rejoin: {text}"
    except BaseException:
        supervisor.give_up("was interrupted while it restarted")
        raise
    done = f"; all of them had ended {recoverable.done}, and its changes are kept" if recoverable.done else ""
    why = f"every rank is alive and holds its shards{done}; only the process group is new"
    return running, RestartReport("in place", why, None, len(members), time.monotonic() - begun)
