"""Making a broken group whole: its ranks meet again around the shards they hold, or new ones load a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysharding.errors import RayshardingError
from raysharding.group.interrupts import UndoneByInterrupt
from raysharding.group.launch import launch, rendezvous
from raysharding.group.launched import Launched
from raysharding.group.spec import GroupSpec
from raysharding.group.state import GroupState


@dataclass(frozen=True)
class RestartReport:
    """What `restart` did."""

    how: Literal["in place", "reloaded"]
    """`in place`: the same processes met again, with weights and optimizer as they were before the failed call;
    `reloaded`: new processes loaded a checkpoint."""
    why: str
    """What decided that."""
    checkpoint: str | None
    """What was loaded; `None` in place."""
    world_size: int
    """Number of ranks now."""
    seconds: float
    """Time that it took."""


@dataclass(frozen=True)
class Restarted:
    """A group's running parts after a restart."""

    launched: Launched
    """The parts; where the ranks were kept, those of before."""
    report: RestartReport
    """What was done."""


def restart(
    spec: GroupSpec,
    launched: Launched,
    *,
    origin: str,
    checkpoint: str | None,
    world_size: int | None,
    optimizer: Callable[..., Any] | None,
) -> Restarted:
    """Do what `ShardedModelGroup.restart` says.

    Args:
        spec: What the group was asked to be.
        launched: Its parts.
        origin: The newest state of the model in files.
        checkpoint: As the user gave it.
        world_size: As the user gave it.
        optimizer: Factory of the optimizer that the group has, as far as the driver knows.
    """
    begun = time.monotonic()
    supervisor = launched.channel.supervisor
    if supervisor.state is GroupState.CLOSED:
        supervisor.refuse_if_unusable()
    if supervisor.state in (GroupState.READY, GroupState.BUSY) and checkpoint is None and world_size is None:
        raise ValueError(
            f"{supervisor.name} is {supervisor.state.value}: there is nothing to restart. Give checkpoint= to go back "
            "to saved weights, or world_size= for another number of ranks; both end what the ranks hold now"
        )
    num_ranks = len(launched.channel.members)
    why = _why_reload(launched, checkpoint, world_size)
    if why is None:
        why = _meet_again(spec, launched)
    if why is None:
        kept = "every rank is alive and holds its shards; only the process group was made anew"
        return Restarted(launched, RestartReport("in place", kept, None, num_ranks, time.monotonic() - begun))
    source = origin if checkpoint is None else checkpoint
    again = replace(
        spec, checkpoint=source, world_size=num_ranks if world_size is None else world_size, optimizer=optimizer
    )
    again.check()
    supervisor.give_up("is being restarted")
    with UndoneByInterrupt():
        fresh = launch(again)
    supervisor.shut_down_soon()  # its ranks are gone; what could fail here would leave the new ones to nobody
    now = len(fresh.channel.members)
    return Restarted(fresh, RestartReport("reloaded", why, source, now, time.monotonic() - begun))


def _why_reload(launched: Launched, checkpoint: str | None, world_size: int | None) -> str | None:
    """Say why the ranks cannot go on with what they hold; `None` where they can."""
    supervisor = launched.channel.supervisor
    if checkpoint is not None:
        return "a checkpoint was given"
    if world_size not in (None, len(launched.channel.members)):
        return "another number of ranks was given"
    if not supervisor.keeps_ranks:
        cause = supervisor.cause
        lost = [failure for failure in (cause.failures.values() if cause else ()) if failure.kind in ("died", "hung")]
        if lost:
            return f"{lost[0]}: its shards went with it"
        return "the failure left weights or optimizer changed in part, or ranks that had to be stopped"
    return None


def _meet_again(spec: GroupSpec, launched: Launched) -> str | None:
    """Make a new process group around the ranks' shards. Return why that failed, `None` where it did not."""
    channel = launched.channel
    if not channel.supervisor.revive():
        return "a rank died after the failure"
    try:
        rendezvous(channel, launched.started, spec.placement)
    except RayshardingError as error:
        return f"the ranks could not meet again: {error}"
    except BaseException:
        channel.supervisor.give_up("was interrupted while it restarted")
        raise
    channel.supervisor.started()
    return None
