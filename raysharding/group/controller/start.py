"""`reserve_for`, `start_ranks`: resources for the ranks, one actor per bundle, and the ranks' numbers."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysharding.errors import CallTimeoutError, FailureKind, GroupError, RankFailure
from raysharding.group.cluster import Reservation, accelerator_names, reserve, wait_placed
from raysharding.group.controller.members import LEASE_S, Member, kill_all, reply, start
from raysharding.group.messages import Started, StartPlan
from raysharding.group.ranks import RankInfo

_PID = re.compile(r"\bpid: (\d+)")
_LOOK_S = 1.0


def reserve_for(
    plan: StartPlan, name: str, tell: Callable[[str], None], is_wanted: Callable[[], bool] = lambda: True
) -> Reservation | None:
    """Reserve the resources of the ranks, and wait until they are placed, in a thread; `None` if they need none.

    Args:
        plan: The plan.
        name: Name of the placement group.
        tell: Takes a line for people.
        is_wanted: Returns False once the ranks are not to start any more.

    Raises:
        PlacementError: No node has the resources.
        GroupError: The ranks are not wanted any more.
    """
    if plan.node_ids:
        return None
    reservation = reserve(plan.world_size, plan.device_type, plan.placement, name, plan.place_s)
    try:
        wait_placed(reservation, plan.place_s, held=plan.held, tell=tell if plan.tells else None, is_wanted=is_wanted)
    except BaseException:
        reservation.release()
        raise
    return reservation


async def start_ranks(
    plan: StartPlan, reservation: Reservation | None, is_wanted: Callable[[], bool] = lambda: True
) -> tuple[list[Member], Started]:
    """Start one actor in each bundle, or on each node, and number them.

    Args:
        plan: The plan.
        reservation: A ready placement group; `None` if the ranks need none.
        is_wanted: Returns False once the ranks are not to start any more; asked every second.

    Raises:
        GroupError: An actor died while it started, or the ranks are not wanted any more.
        CallTimeoutError: Actors did not answer in time.
    """
    remote: Any = ray.remote(concurrency_groups=dict(plan.concurrency_groups))(plan.actor_class)
    actors: list[Any] = []
    try:
        # One by one: if an actor fails to start, the actors before it must be stopped.
        for bundle in range(plan.world_size):
            options = _options(plan, reservation, bundle)
            actors.append(remote.options(**options).remote(plan.titles[bundle], LEASE_S, plan.hub, plan.imports))
        return number_actors(actors, await probe(actors, plan, reservation, is_wanted), plan)
    except BaseException:
        await asyncio.to_thread(kill_all, actors)
        raise


def _options(plan: StartPlan, reservation: Reservation | None, bundle: int) -> dict[str, Any]:
    """Return the Ray options of the actor in a bundle."""
    environment = dict(plan.placement.runtime_env or {})
    if plan.device_type != "cpu":
        # Every rank of a node sees all of the group's GPUs on the node: NCCL between processes that see one GPU each
        # is slow or hangs on NVSwitch machines. Ray must not mask GPUs; `RankCommands.join` sets the group's own mask.
        variables = {**environment.get("env_vars", {}), **dict.fromkeys(accelerator_names(plan.device_type).noset, "1")}
        environment["env_vars"] = variables
    need = {} if reservation is None else reservation.need
    options: dict[str, Any] = {
        "num_cpus": need.get("CPU", 0),
        "num_gpus": need.get("GPU", 0),
        "resources": {name: one for name, one in need.items() if name not in ("CPU", "GPU")},
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    if reservation is None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(plan.node_ids[bundle], soft=False)
    else:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            reservation.placement_group, placement_group_bundle_index=bundle
        )
    if environment:
        options["runtime_env"] = environment
    return options


async def probe(
    actors: Sequence[Any],
    plan: StartPlan,
    reservation: Reservation | None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Any]:
    """Ask every actor where it runs, once it has started. Arguments and errors are those of `start_ranks`."""
    asking = {start(reply(actor.probe.remote(plan.paths))): bundle for bundle, actor in enumerate(actors)}
    infos: dict[int, Any] = {}
    begun = time.monotonic()
    until = begun + plan.start_s
    pending = set(asking)
    # In the order of the answers: the report of a death must not wait for an earlier actor that hangs.
    while pending and (left_s := until - time.monotonic()) > 0:
        look_s = min(left_s, _LOOK_S)
        done, pending = await asyncio.wait(pending, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        if not is_wanted():
            raise GroupError("the group was stopped while its ranks started")
        for task in done:
            bundle = asking[task]
            info, error = task.result()
            if error is None:
                # Ray gives no time of its own to a process that it starts: it is what the imports leave.
                process_s = time.monotonic() - begun - sum(info.start_s.values())
                infos[bundle] = replace(info, start_s={"process": process_s, **info.start_s})
            else:
                node_ip = await _node_ip(reservation, bundle)
                failed = _failed(bundle, node_ip, "died", type(error).__name__, str(error))
                raise GroupError("an actor could not start", primary=failed, failures={bundle: failed}) from error
    if pending:
        late = {asking[task] for task in pending}
        failures = {
            bundle: _failed(bundle, await _node_ip(reservation, bundle), "hung", "", "does not answer yet")
            for bundle in sorted(late)
        }
        message = f"{len(actors)} actors did not all start within {plan.start_s:g} s; raise Timeouts.start_s"
        message += ", or let the nodes reach each other at the ports of Ray's workers (ray start --min-worker-port)"
        if reservation is not None and not reservation.is_ours:
            message += ", or free the given placement group: another actor or task may use its bundles"
        raise CallTimeoutError(message, primary=next(iter(failures.values())), failures=failures)
    return [infos[bundle] for bundle in range(len(actors))]


async def _node_ip(reservation: Reservation | None, bundle: int) -> str:
    """Return the address of the node that Ray chose for an actor, which did not start and cannot report it."""
    return "unknown" if reservation is None else await asyncio.to_thread(reservation.node_ip, bundle)


def _failed(number: int, node_ip: str, kind: FailureKind, error_type: str, message: str) -> RankFailure:
    """Describe the failure of an actor that did not start; `number` is its bundle's if ranks are numbered later."""
    match = _PID.search(message)  # Ray's message has the process id if there was a process
    return RankFailure(number, node_ip, int(match[1]) if match else 0, kind, "start", error_type, message)


def rank_order(infos: Sequence[Any], driver_node: str) -> list[int]:
    """Return actor indexes in rank order: by node, then GPU; the bundles themselves are in no order.

    Args:
        infos: Infos by actor.
        driver_node: Ray's id of the driver's node, which comes first among the nodes that see the checkpoint.
    """
    cached = {info.node_id for info in infos if info.snapshot is not None}
    seeing = cached or {info.node_id for info in infos if info.sees_checkpoint}

    def place(index: int) -> tuple[Any, ...]:
        info = infos[index]
        gpus = _gpu_order(info.gpu_ids)
        return info.node_id not in seeing, info.node_id != driver_node, info.node_ip, info.node_id, gpus, index

    return sorted(range(len(infos)), key=place)


def number_actors(actors: Sequence[Any], infos: Sequence[Any], plan: StartPlan) -> tuple[list[Member], Started]:
    """Number the actors by `rank_order`; the device is the one that Ray gave, by its place among the node's."""
    members: list[Member] = []
    order = rank_order(infos, plan.driver_node)
    gpus: dict[str, list[str]] = {}
    taken: Counter[str] = Counter()
    for rank, index in enumerate(order):
        info, local_rank = infos[index], taken[infos[index].node_id]
        taken[info.node_id] += 1
        seen = gpus.setdefault(info.node_id, [])
        # Ranks that share a GPU are neighbours in this order.
        seen.extend(gpu for gpu in info.gpu_ids if gpu not in seen)
        device = "cpu" if plan.device_type == "cpu" else f"{plan.device_type}:{len(seen) - 1}"
        described = RankInfo(rank, info.node_id, info.node_ip, info.pid, local_rank, device)
        members.append(Member(described, actors[index], info))
    on_cpu = plan.device_type == "cpu"
    visible = tuple("" if on_cpu else ",".join(gpus[member.info.node_id]) for member in members)
    first = infos[order[0]]
    ranks, seconds = tuple(one.info for one in members), tuple(infos[index].start_s for index in order)
    return members, Started(ranks, visible, first.snapshot, first.sees_checkpoint, seconds)


def _gpu_order(gpu_ids: Sequence[str]) -> tuple[Any, ...]:
    """Return a sort key: GPUs by number, then GPUs that have a UUID instead, by name."""
    return tuple((not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu) for gpu in gpu_ids)
