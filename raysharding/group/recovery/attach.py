"""Attaching to a named group: another driver takes over its ranks with their weights; nothing is loaded again.

Note [Taking over]: calls of two drivers must not interleave. The actor that keeps the record issues epochs; the new
driver sends its epoch to every rank, and from then on a rank refuses Commands of earlier epochs
(`GroupTakenOverError`). The earlier driver, if it is alive, notices the takeover when its `lifetime` calls end, and
releases the ranks. A Command that is already running runs to its end: the new driver's first Command, `attach`, queues
behind it on every rank, under `Timeouts.call_s`, and the result of the running Command is dropped with its driver. If
the running Command does not end, because it hangs or because its driver died before it had sent the Command to all
ranks, the group is broken, like a group whose own call hangs. If the running Command failed in a way after which the
earlier driver would have stopped the ranks, the new driver stops them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raysharding.config import Timeouts
from raysharding.errors import CallTimeoutError, GroupBrokenError, GroupError, RendezvousError
from raysharding.group.calls import ModelFiles, collect_all
from raysharding.group.cluster import (
    NAMESPACE,
    actor_name,
    actor_names,
    check_name,
    group_names,
    is_starting,
    join_existing,
    placement_groups,
    remove_orphans,
)
from raysharding.group.launch import GroupRecord, GroupSpec, RunningGroup, Started
from raysharding.group.ranks import Member
from raysharding.group.supervision import (
    Client,
    broken,
    judge,
    leaves_intact,
    probe_all,
    resets_some,
    saw_raise,
)

_ANSWER_S = 30.0
_RESTART_S = 10.0
_LOOK_S = 0.2


def attach(name: str, timeouts: Timeouts | None) -> RunningGroup:
    """Take over a named group; see `ShardedModelGroup.attach`."""
    if name is None:
        raise ValueError("name=None: give the name of a group")
    check_name(name)
    join_existing()
    remove_orphans()
    answer_s = _ANSWER_S if timeouts is None else min(_ANSWER_S, timeouts.call_s)
    keeper = _find(name)
    if is_starting(keeper):
        raise _unfinished(name)
    record: GroupRecord | None = _ask(name, keeper, "record", answer_s)
    if record is None:
        raise _unfinished(name)
    spec: GroupSpec = record.spec.unpack()
    spec = spec if timeouts is None else replace(spec, timeouts=timeouts)
    started = Started(_take_over(name, keeper, record, spec, answer_s), record.started.visible_gpus)
    files = ModelFiles(record.origin, record.begun, record.base)
    running = RunningGroup.assemble(f"group {name!r}", spec, started, record.reservation, files=files, is_loaded=True)
    supervisor = running.client.supervisor
    supervisor.started()
    try:
        supervisor.connect_ranks(spec.placement.port_range)
        has_optimizer = _settle(running.client)
    except (KeyboardInterrupt, RendezvousError):  # the failure is this driver's; another driver may use the group
        supervisor.detach()
        raise
    except BaseException:
        supervisor.shutdown()
        raise
    return replace(running, has_optimizer=has_optimizer, loaded=record.loaded)


def _take_over(name: str, keeper: Any, record: GroupRecord, spec: GroupSpec, answer_s: float) -> tuple[Member, ...]:
    """Make every rank accept the Commands and the lease of this driver, and refuse those of earlier drivers."""
    # The actors are looked up before the epoch is requested, and all ranks are sent the epoch at once: between the
    # first rank that accepts it and the last, a call of the earlier driver would begin on some ranks only.
    actors = [_actor(name, str(member.name)) for member in record.started.members]
    epoch: int = _ask(name, keeper, "take_over", answer_s)
    handles = zip(record.started.members, actors, strict=True)
    members = tuple(replace(member, actor=actor, epoch=epoch) for member, actor in handles)
    replies = probe_all(members, "accept_epoch", epoch, spec.timeouts.lease_s, within_s=answer_s)
    for rank, reason in sorted(replies.silent.items()):
        raise _remove(name, f"rank {rank} {reason}")
    return members


def _settle(client: Client) -> bool:
    """Wait for the earlier driver's last Command, and judge its errors; return True if the ranks have an optimizer."""
    epoch = client.members[0].epoch
    has_optimizer: list[bool] = client.submit_same("attach", collect=collect_all).result()
    responses = probe_all(client.members, "last_response", epoch, within_s=_ANSWER_S).replies
    infos = client.ranks
    seen = [saw_raise(infos[rank], last.error) for rank, last in responses.items() if last.error is not None]
    name = client.supervisor.name
    changes = [last.change for last in responses.values()]
    if seen and not leaves_intact(seen[0].failure.phase, seen, changes, len(infos)):
        raise broken(name, judge(seen, f"the last call of the earlier driver, on {name}", False))
    if seen and resets_some(seen, len(infos)):
        client.submit_same("reset", collect=collect_all).result()
    return has_optimizer[0]


def _find(name: str) -> Any:
    """Return the actor that keeps a group's record."""
    until = time.monotonic() + _RESTART_S
    while left := actor_names(name):
        # If actor 0 is missing, a driver may be restarting the group, which replaces the group's actors.
        if actor_name(name, 0) in left or time.monotonic() > until:
            return _actor(name, actor_name(name, 0))
        time.sleep(_LOOK_S)
    names = ", ".join(map(repr, group_names())) or "none"
    raise ValueError(f"name={name!r}: no group of that name is on the cluster; its groups are: {names}")


def _unfinished(name: str) -> ValueError:
    return ValueError(f"name={name!r}: the group's driver is still making it; attach when the group is READY")


def _actor(group: str, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise _remove(group, f"its actor {name!r} is gone") from None


def _ask(name: str, keeper: Any, method: str, within_s: float) -> Any:
    try:
        return ray.get(getattr(keeper, method).remote(), timeout=within_s)
    except ray.exceptions.GetTimeoutError:
        raise _remove(name, f"its actor {actor_name(name, 0)!r} does not answer within {within_s:g} s") from None
    except ray.exceptions.RayActorError:
        raise _remove(name, f"its actor {actor_name(name, 0)!r} is gone") from None


def _remove(name: str, reason: str) -> GroupError:
    """Remove the actors and placement groups of a group that no driver can use, and return the error to raise."""
    for one in actor_names(name):
        with suppress(ValueError):  # it has ended since
            ray.kill(ray.get_actor(one, namespace=NAMESPACE), no_restart=True)
    for one in placement_groups(name):
        remove_placement_group(one)
    is_late = "does not answer" in reason
    cls = CallTimeoutError if is_late else GroupBrokenError
    return cls(f"group {name!r} is broken: {reason}; it was stopped and its resources were released: make a new group")
