"""Attaching to a named group: its ranks, with their weights, get another driver; nothing is loaded again.

Note [Taking over]: calls of two drivers must not interleave. The actor that keeps the record gives out epochs; the
new driver tells its epoch to every rank, and from then on a rank refuses commands of earlier epochs
(`GroupTakenOverError`). The earlier driver, if it lives, hears of it by the end of its `lifetime` calls, and lets go. A
command that runs already runs to its end: the new driver's first command, `attach`, queues behind it on every rank,
under `Timeouts.call_s`, and what it returns is dropped with its driver. If it does not end, because it hangs or
because its driver died before all ranks had been sent it, the group is broken like one whose own call hangs. If it
failed in a way after which the earlier driver would have stopped the ranks, the new one does so.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raysharding.config import Timeouts
from raysharding.errors import CallTimeoutError, GroupBrokenError, GroupError, RendezvousError
from raysharding.group.calls import Collect, ModelFiles
from raysharding.group.cluster import (
    NAMESPACE,
    actor_name,
    actor_names,
    check_name,
    connect,
    group_names,
    has_started,
    placement_groups,
    remove_orphans,
)
from raysharding.group.launch import GroupRecord, GroupSpec, RunningGroup, Started
from raysharding.group.ranks import Member
from raysharding.group.rpc import StateChange
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
    """Do what `ShardedModelGroup.attach` says."""
    if name is None:
        raise ValueError("name=None: give the name of a group")
    check_name(name)
    connect()
    remove_orphans()
    answer_s = _ANSWER_S if timeouts is None else min(_ANSWER_S, timeouts.call_s)
    keeper = _find(name)
    if not has_started(keeper):
        raise _unfinished(name)
    record: GroupRecord | None = _ask(name, keeper, "record", answer_s)
    if record is None:
        raise _unfinished(name)
    spec: GroupSpec = record.spec.unpack()
    spec = spec if timeouts is None else replace(spec, timeouts=timeouts)
    started = Started(_take_over(name, keeper, record, answer_s), record.visible_gpus)
    files = ModelFiles(record.origin, record.begun)
    running = RunningGroup.assemble(f"group {name!r}", spec, started, record.reservation, files=files, is_loaded=True)
    supervisor = running.client.supervisor
    supervisor.started()
    try:
        supervisor.connect_ranks(spec.placement.port_range)
        has_optimizer = _settle(running.client)
    except (KeyboardInterrupt, RendezvousError):  # this driver's own trouble; another may have the group
        supervisor.detach()
        raise
    except BaseException:
        supervisor.shutdown()
        raise
    return replace(
        running,
        has_optimizer=has_optimizer,
        load_report=record.load_report,
        bounds=record.bounds,
        preflight_report=record.preflight_report,
    )


def _take_over(name: str, keeper: Any, record: GroupRecord, answer_s: float) -> tuple[Member, ...]:
    """Make every rank obey this driver, and no earlier one."""
    # Found before the epoch is asked for, and told to all at once: between the first rank that obeys and the last, a
    # call of the earlier driver would begin on some ranks only.
    actors = [_actor(name, str(member.name)) for member in record.members]
    epoch: int = _ask(name, keeper, "take_over", answer_s)
    handles = zip(record.members, actors, strict=True)
    members = tuple(replace(member, actor=actor, epoch=epoch) for member, actor in handles)
    answers = probe_all(members, "accept_epoch", epoch, within_s=answer_s)
    for rank, reason in sorted(answers.silent.items()):
        raise _remove(name, f"rank {rank} {reason}")
    return members


def _settle(client: Client) -> bool:
    """Wait for the earlier driver's last command, and judge it; return whether the ranks have an optimizer."""
    values = Collect(lambda call: call.values())
    epoch = client.members[0].epoch
    held: list[tuple[bool, StateChange]] = client.submit_same("attach", collect=values).result()
    # What the drivers before this one saw of it went with them.
    client.supervisor.survivors.compare(dict(enumerate(change for _, change in held)))
    said = probe_all(client.members, "last_response", epoch, within_s=_ANSWER_S).replies
    infos = client.ranks
    seen = [saw_raise(infos[rank], one.error) for rank, one in said.items() if one.error is not None]
    name = client.supervisor.name
    changes = [one.change for one in said.values()]
    if seen and not leaves_intact(seen[0].failure.phase, seen, changes, len(infos)):
        raise broken(name, judge(seen, f"the last call of the driver before this one, on {name}", False))
    if seen and resets_some(seen, len(infos)):
        client.submit_same("reset", collect=values).result()
    return held[0][0]


def _find(name: str) -> Any:
    """The actor that keeps a group's record."""
    until = time.monotonic() + _RESTART_S
    while left := actor_names(name):
        # Where it is missing, a driver may be restarting the group: its actors go, and come again.
        if actor_name(name, 0) in left or time.monotonic() > until:
            return _actor(name, actor_name(name, 0))
        time.sleep(_LOOK_S)
    names = ", ".join(map(repr, group_names())) or "none"
    raise ValueError(f"name={name!r}: no group of that name is on the cluster; groups there are: {names}")


def _unfinished(name: str) -> ValueError:
    return ValueError(f"name={name!r}: the group is still being made by its driver; attach when it is READY")


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
    """Remove what is left of a group that no driver can use any more, and build the error that says so."""
    for one in actor_names(name):
        ray.kill(ray.get_actor(one, namespace=NAMESPACE), no_restart=True)
    for one in placement_groups(name):
        remove_placement_group(one)
    is_late = "does not answer" in reason
    cls = CallTimeoutError if is_late else GroupBrokenError
    return cls(f"group {name!r} is broken: {reason}; it was stopped and its resources were given back: make a new one")
