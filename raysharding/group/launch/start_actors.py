"""Turns a reservation into members: starts one actor per bundle, queries where each runs, and numbers the actors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysharding.checkpoint.storage import HubPath, split_path
from raysharding.errors import CallTimeoutError, CheckpointError, FailureKind, GroupError, RankFailure
from raysharding.group.actors import REMOTE_RANK_ACTOR, ActorInfo, Title
from raysharding.group.cluster import Lifetime, Reservation, accelerator_names, name_taken, own_node_id, replies
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.ranks import Member, RankInfo

_PID = re.compile(r"\bpid: (\d+)")


@dataclass(frozen=True, slots=True)
class Started:
    """The group's actors, numbered."""

    members: tuple[Member, ...]
    """Members by rank."""
    visible_gpus: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES by rank: all of the group's GPUs on the rank's node, each once; empty for CPU ranks."""


def start_actors(
    reservation: Reservation,
    spec: GroupSpec,
    world_size: int,
    device_type: str,
    paths: Sequence[str],
    meanwhile: Callable[[], None] | None,
) -> tuple[Started, str | None]:
    """Start one actor in each bundle and number them.

    Args:
        reservation: A ready placement group.
        spec: The group's spec.
        world_size: Number of ranks.
        device_type: Device type of the ranks.
        paths: Files of the checkpoint; rank 0 runs on a node that sees them.
        meanwhile: Called while the actors start; what it raises stops them.

    Returns:
        The actors, and the directory or URI where rank 0 sees the files, if not where `paths` say: a model of the hub
        is in the cache of rank 0's node, or in no cache of the ranks' nodes.

    Raises:
        ValueError: The group's name is taken.
        GroupError: An actor died while it started.
        CallTimeoutError: Actors did not answer in time.
        CheckpointError: No actor's node sees the files, which are not on the hub either.
    """
    actors: list[Any] = []
    try:
        # One by one: if an actor fails to start, the actors before it must be stopped.
        actors.extend(_start(reservation, bundle, device_type, spec) for bundle in range(world_size))
        if meanwhile is not None:
            meanwhile()
        infos = probe(actors, spec.timeouts.start_s, paths, reservation.node_ip, is_ours=reservation.is_ours)
        started = number_actors(actors, infos, device_type, spec.lifetime)
        first = infos[started.members[0].bundle]
        if first.snapshot is not None or first.sees_checkpoint:
            return started, first.snapshot
        hub = HubPath.of_pinned(split_path(paths[0])[0])
        if hub is None:
            nodes = ", ".join(sorted({info.node_ip for info in infos}))
            cure = (
                "copy it there, put it on storage that they share, or choose nodes that see it by Placement(labels=...)"
            )
            raise CheckpointError(f"not visible on the nodes of the ranks: {nodes}: {cure}", path=paths[0])
        return started, hub.uri
    except BaseException:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        raise


def _start(reservation: Reservation, bundle: int, device_type: str, spec: GroupSpec) -> Any:
    lifetime, environment = spec.lifetime, dict(spec.placement.runtime_env or {})
    if device_type != "cpu":
        # Every rank of a node sees all of the group's GPUs on the node: NCCL between processes that see one GPU each
        # is slow or hangs on NVSwitch machines. Ray must not mask GPUs; `RankCommands.join` sets the group's own mask.
        variables = {**environment.get("env_vars", {}), **dict.fromkeys(accelerator_names(device_type).noset, "1")}
        environment["env_vars"] = variables
    options: dict[str, Any] = {
        "num_cpus": reservation.need.get("CPU", 0),
        "num_gpus": reservation.need.get("GPU", 0),
        "resources": {name: one for name, one in reservation.need.items() if name not in ("CPU", "GPU")},
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            reservation.placement_group, placement_group_bundle_index=bundle
        ),
    }
    if environment:
        options["runtime_env"] = environment
    try:
        return REMOTE_RANK_ACTOR.options(**options, **lifetime.actor_options(bundle)).remote(
            Title(spec.short_name, spec.title, bundle), lifetime.first_lease_s, reservation.is_ours, spec.hub_access()
        )
    except ray.exceptions.ActorAlreadyExistsError as error:
        raise name_taken(str(lifetime.name)) from error


def probe(
    actors: Sequence[Any],
    start_s: float,
    paths: Sequence[str],
    node_ip: Callable[[int], str],
    is_ours: bool = True,
) -> list[ActorInfo]:
    """Query where every actor runs, once it has started; see `start_actors`.

    Args:
        actors: Actors by bundle.
        start_s: Deadline for all actors together.
        paths: See `start_actors`.
        node_ip: Returns the address of an actor's bundle, for actors that did not start and cannot report it.
        is_ours: Whether the group made the placement group itself; else others may use its bundles too.

    Raises:
        GroupError: An actor died while it started.
        CallTimeoutError: Actors did not answer in time.
    """
    infos: dict[int, ActorInfo] = {}
    late: dict[int, RankFailure] = {}
    refs = {actor.probe.remote(paths): index for index, actor in enumerate(actors)}
    # In the order of the answers: the report of a death must not wait for an earlier actor that hangs.
    for index, answer in replies(refs, start_s):
        if isinstance(answer, ray.exceptions.GetTimeoutError):
            late[index] = _failed(index, node_ip(index), "hung", "", "does not answer yet")
        elif isinstance(answer, ray.exceptions.RayError):
            failed = _failed(index, node_ip(index), "died", type(answer).__name__, str(answer))
            raise GroupError("an actor could not start", primary=failed, failures={index: failed}) from answer
        else:
            infos[index] = answer
    if late:
        message = f"{len(actors)} actors did not all start within {start_s:g} s; raise Timeouts.start_s"
        message += ", or let the nodes reach each other at the ports of Ray's workers (ray start --min-worker-port)"
        if not is_ours:
            message += ", or free the given placement group: another actor or task may use its bundles"
        raise CallTimeoutError(message, primary=next(iter(late.values())), failures=late)
    return [infos[index] for index in range(len(actors))]


def _failed(number: int, node_ip: str, kind: FailureKind, error_type: str, message: str) -> RankFailure:
    """Describe the failure of an actor that did not start; `number` is its bundle's if ranks are numbered later."""
    match = _PID.search(message)  # Ray's message has the process id if there was a process
    return RankFailure(number, node_ip, int(match[1]) if match else 0, kind, "start", error_type, message)


def rank_order(infos: Sequence[ActorInfo], driver_node: str) -> list[int]:
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


def number_actors(actors: Sequence[Any], infos: Sequence[ActorInfo], device_type: str, lifetime: Lifetime) -> Started:
    """Number the actors by `rank_order`; the device is the one that Ray gave, by its place among the node's."""
    members: list[Member] = []
    gpus: dict[str, list[str]] = {}
    taken: Counter[str] = Counter()
    for rank, index in enumerate(rank_order(infos, own_node_id())):
        info, local_rank = infos[index], taken[infos[index].node_id]
        taken[info.node_id] += 1
        seen = gpus.setdefault(info.node_id, [])
        # Ranks that share a GPU are neighbours in this order.
        seen.extend(gpu for gpu in info.gpu_ids if gpu not in seen)
        device = "cpu" if device_type == "cpu" else f"{device_type}:{len(seen) - 1}"
        described = RankInfo(rank, info.node_id, info.node_ip, info.pid, local_rank, device)
        where = info.stacks_descriptor, info.log_paths, lifetime.actor_name(index), index
        members.append(Member(described, actors[index], *where))
    on_cpu = device_type == "cpu"
    visible = tuple("" if on_cpu else ",".join(gpus[member.info.node_id]) for member in members)
    return Started(tuple(members), visible)


def _gpu_order(gpu_ids: Sequence[str]) -> tuple[Any, ...]:
    """Return a sort key: GPUs by number, then GPUs that have a UUID instead, by name."""
    return tuple((not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu) for gpu in gpu_ids)
