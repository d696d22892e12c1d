"""Reserves resources for the ranks: one Ray placement-group bundle per rank, or an error that lists what is short."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from raysharding.config import Placement
from raysharding.errors import PlacementError
from raysharding.group.cluster.names import Lifetime
from raysharding.group.cluster.ray_internals import free_resources
from raysharding.group.cluster.reaper import create_reaped

Resources = Mapping[str, float]

_SLICE_S = 1.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Reservation:
    """A ready placement group."""

    placement_group: Any
    """Ray's placement group, one bundle for each rank."""
    need: Resources
    """Resources of one rank."""
    is_ours: bool
    """True if the group made the placement group and therefore removes it."""
    reaper: Any = None
    """The actor that removes the placement group when this process dies (see `reaper.py`); `None` if Ray does."""

    def node_ip(self, bundle: int) -> str:
        """Return the address of the node that Ray chose for a bundle, `unknown` if Ray does not know."""
        node_id = placement_group_table(self.placement_group)["bundles_to_node_id"].get(bundle)
        return next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node_id), "unknown")

    def release(self) -> None:
        """Release the resources, unless the placement group is the user's."""
        if self.is_ours:
            remove_placement_group(self.placement_group)
        self.outlive_owner()

    def outlive_owner(self) -> None:
        """Keep a detached placement group beyond the death of this process."""
        if self.reaper is not None:
            ray.kill(self.reaper)


def cluster_gpus() -> int:
    """Return the number of GPUs in the cluster, used or not."""
    return int(ray.cluster_resources().get("GPU", 0))


def choose_device_type(device: str | None) -> str:
    """Return `cuda` or `cpu`: the caller's choice, else `cuda` if the cluster has GPUs.

    Raises:
        ValueError: The device type is unknown.
    """
    if device is None:
        return "cuda" if cluster_gpus() else "cpu"
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: use 'cuda', 'cpu', or None for cuda if the cluster has GPUs")
    return device


def check_world_size(world_size: int | None) -> None:
    """Check the given number of ranks without calling Ray.

    Raises:
        ValueError: The number is not a positive int.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"world_size={world_size!r}: give 1 or more, as an int")


def choose_world_size(world_size: int | None, device_type: str, placement: Placement) -> int:
    """Return the number of ranks: as given, else one per bundle of a given placement group, else one per GPU.

    Raises:
        ValueError: No number is given, and there are no bundles or GPUs to count.
    """
    if world_size is not None:
        return world_size
    if placement.placement_group is not None:
        return int(placement.placement_group.bundle_count)
    if device_type != "cuda":
        raise ValueError("world_size=None means one rank per GPU, but this group runs on CPUs: give world_size")
    if not cluster_gpus():
        raise ValueError("world_size=None means one rank per GPU, but the cluster has no GPU: give world_size")
    return cluster_gpus()


def choose_num_threads(placement: Placement) -> int:
    """Return the number of torch threads of a CPU rank: OMP_NUM_THREADS of its runtime environment, else one per CPU.

    Ray sets OMP_NUM_THREADS in every worker, so a rank cannot tell whether the user chose its value.
    """
    variables: dict[str, str] = {}
    for environment in (ray.get_runtime_context().runtime_env, placement.runtime_env or {}):
        variables.update(environment.get("env_vars") or {})
    chosen = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(chosen) if chosen.isdecimal() and int(chosen) else max(1, int(placement.cpus_per_rank))


def reserve(world_size: int, device_type: str, placement: Placement, place_s: float, lifetime: Lifetime) -> Reservation:
    """Reserve one bundle for each rank, and wait until the placement group is ready.

    Args:
        world_size: Number of ranks.
        device_type: `cuda` adds one GPU to each bundle.
        placement: Strategy, CPUs, labels; or an existing placement group.
        place_s: Deadline.
        lifetime: What ends the placement group.

    Raises:
        PlacementError: The placement group is not ready at the deadline (the error lists need against have, per node),
            or Ray does not create it. Nothing stays reserved.
        ValueError: The bundles of an existing placement group do not fit the ranks.
    """
    need = rank_need(device_type, placement)
    if placement.placement_group is not None:
        reservation = Reservation(placement.placement_group, need, is_ours=False)
        _check_bundles(placement.placement_group, world_size, need)
    else:
        reservation = _create(world_size, need, placement, lifetime)
    try:
        if not _wait_ready(reservation.placement_group, place_s):
            raise _placement_error(world_size, need, placement, place_s)
    except BaseException:
        reservation.release()
        raise
    return reservation


def _create(world_size: int, need: Resources, placement: Placement, lifetime: Lifetime) -> Reservation:
    """Create a placement group, without waiting until it is ready."""
    bundles = [dict(need) for _ in range(world_size)]
    selector = [dict(placement.labels)] * world_size if placement.labels else None
    options = {"strategy": placement.strategy, "bundle_label_selector": selector, **lifetime.placement_group_options()}
    if lifetime.ends_with_job():
        return Reservation(placement_group(bundles, **options), need, is_ours=True)
    try:
        made, reaper = create_reaped(bundles, options, lifetime.start_s)
    except ray.exceptions.RayError as error:
        what = f"the actor that is to create the placement group did not start within {lifetime.start_s:g} s"
        raise PlacementError(f"{what}: {error}", need=need, have={}) from error
    return Reservation(made, need, is_ours=True, reaper=reaper)


def wait_placed(reservation: Reservation, world_size: int, placement: Placement, place_s: float) -> None:
    """Wait until all bundles are placed: Ray moves the bundles of a lost node to nodes that have the resources.

    Args:
        reservation: A reservation that was ready before.
        world_size: Number of ranks.
        placement: The placement that it was reserved with.
        place_s: Deadline.

    Raises:
        PlacementError: No node had the resources before the deadline. The other bundles stay reserved.
    """
    if not _wait_ready(reservation.placement_group, place_s):
        raise _placement_error(world_size, reservation.need, placement, place_s)


def _wait_ready(made: Any, place_s: float) -> bool:
    """Wait in slices, since Ray's own wait does not react to Ctrl-C; return True if the placement group is ready."""
    until = time.monotonic() + place_s
    while not made.wait(max(0.0, min(_SLICE_S, until - time.monotonic()))):
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_S)  # in case the slice is shorter than Ray's resolution
    return True


def rank_need(device_type: str, placement: Placement) -> dict[str, float]:
    """Return the resources of one rank, by Ray's names.

    Raises:
        ValueError: The rank would need no resources.
    """
    need = {"CPU": float(placement.cpus_per_rank)} if placement.cpus_per_rank else {}
    if device_type == "cuda":
        need["GPU"] = 1.0
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
        short = {name: amount for name, amount in need.items() if bundle.get(name, 0) < amount}
        if short:
            raise ValueError(
                f"bundle {index} of the placement group holds {show_resources(bundle)}, but a rank needs "
                f"{show_resources(need)}: change the bundles or Placement(cpus_per_rank=...)"
            )


def _placement_error(world_size: int, need: Resources, placement: Placement, place_s: float) -> PlacementError:
    """Return an error that compares need and have; a pending placement group holds nothing of the free resources."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = free_resources()
    have: dict[str, dict[str, float]] = {}
    lines = []
    fits_empty = 0
    for node in nodes:
        matches = labels_match(node, placement.labels)
        total = {name: node["Resources"].get(name, 0.0) for name in need}
        now = {name: free.get(node["NodeID"], {}).get(name, 0.0) for name in need}
        # Two raylets may share an address (in tests, for example): the id distinguishes them.
        address = node["NodeManagerAddress"]
        have[address if address not in have else f"{address} ({node['NodeID'][:8]})"] = now
        fits_empty += ranks_that_fit(total, need) if matches else 0
        note = "" if matches else f"; its labels do not match {dict(placement.labels or {})}"
        fits = ranks_that_fit(now, need) if matches else 0
        lines.append(
            f"node {address}: free {show_resources(now)} of {show_resources(total)}, space for {fits} ranks now{note}"
        )
    if placement.placement_group is not None:
        verdict = "the given placement group is not ready"
    elif fits_empty < world_size:
        verdict = f"infeasible: even when idle, the cluster has space for {fits_empty} ranks; use fewer, or add nodes"
    else:
        verdict = (
            f"busy: when idle, the cluster has space for {fits_empty} ranks; free resources, raise "
            f"Timeouts.place_s, or relax strategy={placement.strategy!r}"
        )
    message = f"{world_size} ranks of {show_resources(need)} each were not placed within {place_s:g} s; {verdict}"
    return PlacementError("\n  ".join((message, *lines)), need=need, have=have)


def labels_match(node: Mapping[str, Any], labels: Mapping[str, str] | None) -> bool:
    """Return True if a node, as `ray.nodes()` lists it, carries all labels."""
    carried = node.get("Labels", {})
    return all(carried.get(key) == value for key, value in (labels or {}).items())


def ranks_that_fit(resources: Resources, need: Resources) -> int:
    """Return how many ranks, each of which needs `need`, fit into `resources`."""
    return min(int(resources.get(name, 0.0) // amount) for name, amount in need.items())


def show_resources(resources: Resources) -> str:
    """Format resources for messages."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
