"""Reserves resources for the ranks: one Ray placement-group bundle per rank, or an error that lists what is short.

Note [Names]: the group `llama` is the actor `llama`, its controller, in the Ray namespace `raysharding`. Its placement
group is called `raysharding/llama/…`, so that a controller that Ray has restarted finds what its predecessor reserved:
Ray removes a placement group when its creator is dead for good and the creator's job is over (Ray 2.60; the job of a
detached creator counts as over).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.config import Placement
from raysharding.errors import GroupError, PlacementError
from raysharding.group.cluster.display import tell
from raysharding.group.cluster.ray_internals import (
    accelerator_names,
    free_resources,
    is_infeasible,
    may_grow,
    stale_nodes,
)

Resources = Mapping[str, float]

NAMESPACE = "raysharding"
_PLACE_S = 120.0
_GROW_S = 900.0
_REPORT_S = 10.0
_CANNOT_GROW = "Ray's autoscaler reports that no nodes that it may add make room for them"
_SLICE_S = 1.0
_PAUSE_S = 0.05


def check_name(name: str | None) -> None:
    """Check a group's name without calling Ray.

    Raises:
        ValueError: The name is neither `None` nor a printable str without '/'.
    """
    is_name = name is None or (type(name) is str and bool(name) and "/" not in name and name.isprintable())
    if not is_name:
        raise ValueError(f"name={name!r}: give None, or a printable str without '/', such as 'llama'")


def group_names() -> list[str]:
    """Return the names of the cluster's named groups, including groups that are still being made."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in named if one["namespace"] == NAMESPACE)


def name_taken(name: str) -> ValueError:
    """Return the error for a name that is taken."""
    return ValueError(
        f"name={name!r}: a group of that name is on the cluster; ShardedModelGroup.attach({name!r}) gives it to this "
        "driver, too (and its shutdown() ends it), replace=True ends it for a new one, or choose another name"
    )


def remove_placement_groups(key: str) -> None:
    """Remove what a controller that has died had reserved.

    Args:
        key: As `reserve` was given.
    """
    for placement_group_id, entry in placement_group_table().items():
        if entry["name"].startswith(_placement_group_prefix(key)) and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(placement_group_id))))


def _placement_group_prefix(key: str) -> str:
    return f"{NAMESPACE}/{key}/"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group."""

    placement_group: Any
    """Ray's placement group, one bundle for each rank."""
    world_size: int
    """Number of ranks."""
    need: Resources
    """Resources of one rank."""
    placement: Placement
    """Where the ranks may run."""

    @property
    def is_ours(self) -> bool:
        """True if the group made the placement group and therefore removes it."""
        return self.placement.placement_group is None

    def node_ip(self, bundle: int) -> str:
        """Return the address of the node that Ray chose for a bundle, `unknown` if Ray does not know."""
        node_id = placement_group_table(self.placement_group)["bundles_to_node_id"].get(bundle)
        return next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node_id), "unknown")

    def release(self) -> None:
        """Release the resources, unless the placement group is the user's."""
        if self.is_ours:
            remove_placement_group(self.placement_group)


def cluster_gpus(device_type: str = "cuda") -> int:
    """Return the number of accelerators of a type in the cluster, used or not."""
    return int(ray.cluster_resources().get(accelerator_names(device_type).resource, 0))


def cluster_cpus() -> list[float]:
    """Return the number of CPUs of each node of the cluster, used or not."""
    return [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]


def choose_ranks(
    device: str | None, world_size: int | None, placement: Placement, num_gpus: int, node_cpus: Sequence[float]
) -> tuple[str, int]:
    """Return the device type and the number of ranks.

    Args:
        device: The caller's choice. Default: `cuda` if there are GPUs.
        world_size: The caller's choice. Default: one rank per bundle of a given placement group, else as many on each
            GPU as `gpus_per_rank` allows, one by default; on CPUs two if a node has the CPUs for both, else one, which
            a line on stderr tells.
        placement: May hold a placement group.
        num_gpus: Number of GPUs.
        node_cpus: Number of CPUs of each node.

    Raises:
        ValueError: The device type is unknown, or is one of which there is none to count; or the CPU, with a part of a
            GPU for each rank.
    """
    from raysharding.distributed.comm import check_device_type  # imports torch

    if device == "cpu" and placement.gpus_per_rank != 1:
        what = f"Placement(gpus_per_rank={placement.gpus_per_rank:g}) with device='cpu'"
        raise ValueError(f"{what}: ranks on CPUs reserve no GPU: leave gpus_per_rank out, or device")
    device_type = device or ("cuda" if num_gpus else "cpu")
    check_device_type(device_type)
    if world_size is None and placement.placement_group is not None:
        world_size = int(placement.placement_group.bundle_count)
    if world_size is None and device_type == "cpu":
        most = max(node_cpus, default=0.0)
        world_size = 2 if most >= 2 * max(1.0, placement.cpus_per_rank) else 1
        ranks = "1 rank" if world_size == 1 else "2 ranks"
        tell(f"{ranks} on CPUs, since world_size is not given and the largest node has {most:g} CPUs")
    if world_size is None:
        if not num_gpus:
            raise ValueError("world_size=None means one rank per GPU, but no GPU is available: give world_size")
        world_size = num_gpus * ranks_per_gpu(placement)
    return device_type, world_size


def choose_num_threads(placement: Placement) -> int:
    """Return the number of torch threads of a CPU rank: OMP_NUM_THREADS of its runtime environment, else one per CPU.

    Ray sets OMP_NUM_THREADS in every worker, so a rank cannot tell whether the user chose its value.
    """
    variables: dict[str, str] = {}
    for environment in (ray.get_runtime_context().runtime_env, placement.runtime_env or {}):
        variables.update(environment.get("env_vars") or {})
    chosen = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(chosen) if chosen.isdecimal() and int(chosen) else max(1, int(placement.cpus_per_rank))


def reserve(
    world_size: int, device_type: str, placement: Placement, key: str, place_s: float | None = None
) -> Reservation:
    """Ask Ray for one bundle for each rank; `wait_placed` waits until the placement group is ready.

    Args:
        world_size: Number of ranks.
        device_type: Any but `cpu` adds one accelerator, or `gpus_per_rank` of one, to each bundle.
        placement: Strategy, CPUs, labels; or an existing placement group.
        key: Key of the group.
        place_s: The user's deadline, until which CPUs are waited for; `None`: not for those of nodes that nothing adds.

    Raises:
        PlacementError: Even the idle cluster has too little room, and no further nodes are to be expected; or Ray does
            not create the placement group.
        ValueError: The bundles of an existing placement group do not fit the ranks.
    """
    need = rank_need(device_type, placement)
    if placement.placement_group is not None:
        _check_bundles(placement.placement_group, world_size, need)
        return Reservation(placement.placement_group, world_size, need, placement)
    bundles = [dict(need) for _ in range(world_size)]
    selector = [dict(placement.labels)] * world_size if placement.labels else None
    name = f"{_placement_group_prefix(key)}{secrets.token_hex(4)}"  # the one before a restart may not be gone yet
    made = placement_group(bundles, strategy=placement.strategy, bundle_label_selector=selector, name=name)
    reservation = Reservation(made, world_size, need, placement)  # Ray has refused invalid labels
    try:
        _refuse_infeasible(reservation, place_s)
    except PlacementError:
        reservation.release()
        raise
    return reservation


def wait_placed(
    reservation: Reservation,
    place_s: float | None,
    *,
    held: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until all bundles are placed: Ray moves the bundles of a lost node to nodes that have the resources.

    The placement group is pending meanwhile, so an autoscaler sees what it needs.

    Args:
        reservation: A reservation.
        place_s: Deadline in seconds. `None`: 120, or 900 where an autoscaler may add nodes that make room.
        held: Lines about what the driver's program itself holds, for the error of a busy cluster.
        tell: Takes a line every 10 s: what is missing, and for how long.
        is_wanted: Returns False once the ranks are not to start any more; asked every second.

    Raises:
        PlacementError: No node had the resources before the deadline, or none can have them; the error lists need
            against have, per node. The reservation stays.
        GroupError: The ranks are not wanted any more.
    """
    reported = begun = time.monotonic()
    limit_s = _PLACE_S if place_s is None else place_s
    # In slices, since Ray's own wait does not react to Ctrl-C.
    while not reservation.placement_group.wait(max(0.0, min(_SLICE_S, begun + limit_s - time.monotonic()))):
        now = time.monotonic()
        if not is_wanted():
            raise GroupError("the group was stopped while its ranks waited for resources")
        if now - begun >= limit_s:
            # A wait of less than a second may miss bundles that are placed, and there may have been no other wait.
            if placement_group_table(reservation.placement_group)["state"] == "CREATED":
                return
            infeasible = _is_infeasible(reservation)
            # Not earlier: a cluster that has just started does not say yet whether it grows.
            if infeasible or place_s is not None or limit_s == _GROW_S or not may_grow():
                raise _placement_error(reservation, limit_s, held, infeasible)
            limit_s = _GROW_S
        if now - reported >= _REPORT_S:
            reported = now
            _refresh_stale_nodes(reservation.need)
            if reservation.is_ours:  # by now a cluster that has just started says whether it grows
                _refuse_infeasible(reservation, place_s)
            if tell is not None:
                cannot = f"; {_CANNOT_GROW}" if _is_infeasible(reservation) else ""
                tell(_waiting(reservation, now - begun) + cannot)
        time.sleep(_PAUSE_S)  # in case the slice is shorter than Ray's resolution


def _refresh_stale_nodes(need: Resources) -> None:
    """Run an empty task on each stale node, so that it reports its free resources: else Ray places no rank there."""
    task = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    for node_id in stale_nodes(need):
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


def _is_infeasible(reservation: Reservation) -> bool:
    """Return True if the autoscaler reports so, and no rank would fit where others hold resources."""
    if not is_infeasible(reservation.placement_group.id.hex()):
        return False
    room = _room(reservation)
    return room.fits_now == room.fits_empty


def _waiting(reservation: Reservation, seconds: float) -> str:
    """Return a line that says for what the ranks wait."""
    world_size, need, room = reservation.world_size, reservation.need, _room(reservation)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    # After the loss of a node the bundles on other nodes stay placed.
    placed = placement_group_table(reservation.placement_group)["bundles_to_node_id"].values()
    missing = max(0, world_size - sum(node in alive for node in placed) - room.fits_now)
    each = f"ranks of {show_resources(need)} each"
    if not missing or not reservation.is_ours:
        strategy = reservation.placement.strategy
        return f"waiting for Ray to place {world_size} {each} with strategy={strategy!r}, {seconds:.0f} s"
    name = _accelerator(need)
    return f"waiting for {missing} of {world_size} {each if name is None else f'{name}s'}, {seconds:.0f} s"


def rank_need(device_type: str, placement: Placement) -> dict[str, float]:
    """Return the resources of one rank, by Ray's names.

    Raises:
        ValueError: The rank would need no resources.
    """
    need = {"CPU": float(placement.cpus_per_rank)} if placement.cpus_per_rank else {}
    if device_type != "cpu":
        need[accelerator_names(device_type).resource] = float(placement.gpus_per_rank)
    if not need:
        raise ValueError("cpus_per_rank=0 on CPUs reserves nothing: give a positive number, such as 0.5")
    return need


def _check_bundles(existing: Any, world_size: int, need: Resources) -> None:
    bundles = existing.bundle_specs
    if len(bundles) < world_size:
        raise ValueError(
            f"the placement group has {len(bundles)} bundles, but world_size={world_size}: give one bundle per rank"
        )
    for index, bundle in enumerate(bundles[:world_size]):
        short = {name: amount for name, amount in need.items() if _units(bundle.get(name, 0)) < _units(amount)}
        if short:
            raise ValueError(
                f"bundle {index} of the placement group holds {show_resources(bundle)}, but a rank needs "
                f"{show_resources(need)}: change the bundles or Placement(cpus_per_rank=..., gpus_per_rank=...)"
            )


def _accelerator(need: Resources) -> str | None:
    return next((name for name in need if name != "CPU"), None)


def _refuse_infeasible(reservation: Reservation, place_s: float | None) -> None:
    """Raise if even the idle cluster has too little room for the ranks, and no further nodes are to be expected.

    Where a node has died, the same node or another may come in its place: `restart` waits for it until `place_s`.
    """
    if place_s is not None and _accelerator(reservation.need) is None:
        return  # the user may be adding nodes by hand
    has_lost_node = not all(node["Alive"] for node in ray.nodes())
    if not has_lost_node and _room(reservation).fits_empty < reservation.world_size and not may_grow():
        raise _placement_error(reservation)


def _placement_error(
    reservation: Reservation, waited_s: float | None = None, held: Sequence[str] = (), infeasible: bool = False
) -> PlacementError:
    """Return an error that compares need and have; a pending placement group holds nothing of the free resources."""
    world_size, need, strategy = reservation.world_size, reservation.need, reservation.placement.strategy
    room = _room(reservation)
    lines = list(room.lines)
    when_idle = f"when idle, the cluster has space for {room.fits_empty} ranks"
    if infeasible:
        verdict = (
            f"infeasible: {_CANNOT_GROW} with strategy={strategy!r}; use fewer ranks, or give it such nodes (node "
            "types, max_workers)"
        )
    elif not reservation.is_ours:
        verdict = "the given placement group is not ready"
    elif room.fits_empty < world_size and may_grow():
        verdict = (
            f"the autoscaler has not added the nodes: even {when_idle}. `ray status` shows what it adds, and whether "
            "it has nodes with such resources; if they only take longer, raise Timeouts.place_s"
        )
    elif room.fits_empty < world_size:
        verdict = f"infeasible: even {when_idle}; use fewer, or wait until more nodes have joined"
    else:
        verdict = f"busy: {when_idle}; free resources, raise Timeouts.place_s, or relax strategy={strategy!r}"
        lines += held
    if (name := _accelerator(need)) is not None:
        verdict += f'; with device="cpu" ranks need no {name}'
    outcome = "cannot be placed" if waited_s is None else f"were not placed within {waited_s:g} s"
    message = f"{world_size} ranks of {show_resources(need)} each {outcome}; {verdict}"
    return PlacementError("\n  ".join((message, *lines)), need=need, have=room.have)


def own_bundles(world_size: int, need: Resources) -> list[str]:
    """Return a line on the placement group of a Tune trial or Serve replica, where the ranks fit into its bundles."""
    own = get_current_placement_group()
    bundles = own.bundle_specs[:world_size] if own is not None else []
    if len(bundles) < world_size or any(bundle.get(name, 0) < need[name] for bundle in bundles for name in need):
        return []
    has = f"the placement group of this actor or task has {own.bundle_count} bundles"
    cure = "Placement(placement_group=ray.util.get_current_placement_group()) places one rank in each"
    return [f"{has}: {cure}; the actor itself must take nothing of them (num_cpus=0)"]


@dataclass(frozen=True, slots=True)
class _Room:
    """Free resources of the nodes, and the ranks that fit into them."""

    lines: Sequence[str]
    """A line for each node."""
    have: Mapping[str, Mapping[str, float]]
    """Node → its free resources."""
    fits_now: int
    """Number of ranks that fit into what is free."""
    fits_empty: int
    """Number of ranks that fit into the idle cluster."""


def _room(reservation: Reservation) -> _Room:
    need, labels = reservation.need, reservation.placement.labels
    free = free_resources()
    have: dict[str, dict[str, float]] = {}
    lines = []
    fits_now = fits_empty = 0
    for node in (node for node in ray.nodes() if node["Alive"]):
        matches = labels_match(node, labels)
        total = {name: node["Resources"].get(name, 0.0) for name in need}
        now = {name: free.get(node["NodeID"], {}).get(name, 0.0) for name in need}
        # Two raylets may share an address (in tests, for example): the id distinguishes them.
        address = node["NodeManagerAddress"]
        have[address if address not in have else f"{address} ({node['NodeID'][:8]})"] = now
        note = "" if matches else f"; its labels do not match {dict(labels or {})}"
        fits = ranks_that_fit(now, need) if matches else 0
        fits_now += fits
        fits_empty += ranks_that_fit(total, need) if matches else 0
        lines.append(
            f"node {address}: free {show_resources(now)} of {show_resources(total)}, space for {fits} ranks now{note}"
        )
    return _Room(lines, have, fits_now, fits_empty)


def able_nodes(need: Resources, labels: Mapping[str, str] | None) -> list[str]:
    """Return Ray's ids of the nodes that have room for a rank, when they are idle."""
    alive = (node for node in ray.nodes() if node["Alive"] and labels_match(node, labels))
    return [node["NodeID"] for node in alive if ranks_that_fit(node["Resources"], need)]


def labels_match(node: Mapping[str, Any], labels: Mapping[str, str] | None) -> bool:
    """Return True if a node, as `ray.nodes()` lists it, carries all labels."""
    carried = node.get("Labels", {})
    return all(carried.get(key) == value for key, value in (labels or {}).items())


def ranks_that_fit(resources: Resources, need: Resources) -> int:
    """Return how many ranks, each of which needs `need`, fit into `resources`.

    No rank takes parts of two GPUs; parts below one GPU are taken for parts of one.
    """

    def fit(name: str, amount: float) -> int:
        whole, rest = divmod(resources.get(name, 0.0), 1.0) if name != "CPU" else (0.0, resources.get(name, 0.0))
        return int(whole) * (_units(1) // _units(amount)) + _units(rest) // _units(amount)

    return min(fit(name, amount) for name, amount in need.items())


def ranks_per_gpu(placement: Placement) -> int:
    """Return how many ranks Ray puts on one GPU."""
    return _units(1) // _units(placement.gpus_per_rank)


def _units(amount: float) -> int:
    """Return an amount of a resource in the units in which Ray counts, so that ten times 0.1 is 1."""
    return round(amount * 10_000)


def show_resources(resources: Resources) -> str:
    """Format resources for messages."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
