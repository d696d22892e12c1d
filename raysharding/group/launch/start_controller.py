"""`start_controller`: starts the actor that will own a group, under the group's name; `find_controller` finds it.

`own_groups`: the groups of this process. Whoever makes another one may want their resources, or a name of theirs: in a
notebook a cell that makes a group is run again while its earlier group still exists.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysharding.checkpoint.storage import normal_path
from raysharding.errors import GroupError
from raysharding.group.calls import Client
from raysharding.group.cluster import (
    NAMESPACE,
    able_nodes,
    cluster_gpus,
    group_names,
    is_worker,
    name_taken,
    own_node_id,
    rank_need,
    show_resources,
    started_cluster,
    warn,
)
from raysharding.group.controller import REMOTE_CONTROLLER, Identity
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.messages import GroupState

_MAX_CALLS = 100_000
"""Calls of all drivers that the controller holds at once: each waits in it until it has ended."""
_END_S = 40.0
_GONE_S = 10.0
_LOOK_S = 0.05
_own: WeakKeyDictionary[Client, GroupSpec] = WeakKeyDictionary()


def note_own_group(client: Client, spec: GroupSpec) -> None:
    """Note a group of this process."""
    _own[client] = spec


def own_groups() -> tuple[str, ...]:
    """Return a line for each group of this process that holds resources; the last line says how to end them."""
    held = []
    for client, spec in list(_own.items()):
        if client.state in (GroupState.READY, GroupState.BUSY):
            need = rank_need(client.ranks[0].device.partition(":")[0], spec.placement)
            holds = f"{len(client.ranks)} x {show_resources(need)} ({spec.checkpoint}, {client.state.value})"
            held.append(f"this program's own {client.name} holds {holds}")
    cure = "end it by its shutdown(), or make the new one with name= and replace=True, which ends that of the same name"
    return (*held, cure) if held else ()


def start_controller(spec: GroupSpec, *, replace: bool = False) -> Any:
    """Start the controller of a new group, and return its handle; does not wait until its process runs.

    It takes no CPU, and runs on the driver's node, or on one that could hold ranks, or in the user's
    placement group. The owner's death ends it: Ray
    ends an actor with the driver that made it. One that was made by another actor, or by a task, is detached, because
    Ray would keep its placement group until the end of the job; it ends itself when its owner has died. That of a named
    group outlives all drivers.

    Args:
        spec: The group's spec.
        replace: True to shut down the group that has the name.

    Raises:
        ValueError: The name is taken.
    """
    if spec.name is not None:
        _claim_name(spec.name, replace=replace)
    timeouts = spec.timeouts
    identity = Identity(
        title=spec.title,
        key=spec.name or f"{ray.get_runtime_context().get_job_id()}/{spec.token}",
        is_named=spec.name is not None,
        origin=normal_path(spec.checkpoint),
        lease_s=timeouts.lease_s,
        drain_s=timeouts.drain_s,
    )
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": _MAX_CALLS}
    if spec.name is not None:
        options |= {"name": spec.name, "namespace": NAMESPACE}
    if spec.name is not None or is_worker():
        options["lifetime"] = "detached"
    if spec.placement.placement_group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(spec.placement.placement_group)
    elif node_id := _home(spec):
        # Ray 2.60 puts an actor that needs nothing at all on any node, whatever the soft affinity says.
        options |= {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}
    try:
        return REMOTE_CONTROLLER.options(**options).remote(identity)
    except ray.exceptions.ActorAlreadyExistsError as error:
        raise name_taken(str(spec.name)) from error


def _home(spec: GroupSpec) -> str:
    """Return Ray's id of the node for a controller: the driver's.

    A named group is to outlive its driver's node, such as the pod of a notebook, where that can hold no rank: it gets
    one that can. So does that of a driver behind `ray://`, which may be on no node.
    """
    own = own_node_id()
    if own and spec.name is None:
        return own
    able = able_nodes(
        rank_need(spec.device or ("cuda" if cluster_gpus() else "cpu"), spec.placement), spec.placement.labels
    )
    return own if own in able or not able else able[0]


def find_controller(name: str) -> Any:
    """Return the handle of a named group's controller.

    Raises:
        ValueError: There is no group of the name; the error lists the cluster's groups.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        names = ", ".join(map(repr, group_names())) or "none"
        raise ValueError(f"name={name!r}: no group of that name is on the cluster; its groups are: {names}") from None


def _claim_name(name: str, *, replace: bool) -> None:
    """Check that a new group can have a name; warn if a name is of no use on this cluster."""
    if started_cluster():
        what = "ray.init() of this process started the cluster, which ends with this process, and so does the group"
        cure = "to keep it, start a cluster by `ray start --head` and join it by ray.init('auto')"
        warn(f"name={name!r}: {what}: {cure}")
    if replace:
        for client in [client for client, spec in list(_own.items()) if spec.name == name]:
            client.shutdown()
        _end_other(name)
    if name in group_names():
        raise name_taken(name)


def _end_other(name: str) -> None:
    """Shut down the group of a name, whoever uses it."""
    try:
        controller = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return
    why = f"group {name!r} was shut down: another driver has replaced it"
    with suppress(ray.exceptions.RayError):  # it has ended, or does not answer: it is killed
        ray.get(controller.shutdown.remote(why), timeout=_END_S)
    ray.kill(controller, no_restart=True)
    until = time.monotonic() + _GONE_S
    while name in group_names():
        if time.monotonic() > until:
            raise GroupError(f"group {name!r} did not end within {_GONE_S:g} s; call again")
        time.sleep(_LOOK_S)
