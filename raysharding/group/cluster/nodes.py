"""`NodeFacts`: what one node of the cluster says of itself: versions, network interface, free memory, GPUs.

`NodeCapacity`: what a node has for ranks, and which ranks Ray would put where.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.config import Placement
from raysharding.distributed.comm import interface_of
from raysharding.distributed.transfer import available_bytes
from raysharding.group.cluster.placement import labels_match, ranks_that_fit
from raysharding.group.cluster.ray_internals import free_resources, has_token_auth
from raysharding.units import MIB

PACKAGES = ("torch", "raysharding", "ray", "transformers", "safetensors")
_NVIDIA_SMI_S = 10.0


@dataclass(frozen=True)
class NodeFacts:
    """What a process on a node sees. Of every node the same, where all is well."""

    node_ip: str
    """Address of the node, as Ray knows it."""
    versions: Mapping[str, str]
    """`python` and package → version; a package that is not there is left out."""
    interface: str | None
    """The network interface that owns `node_ip`, `None` where none does."""
    chosen_interface: str | None
    """What GLOO_SOCKET_IFNAME says, where somebody set it."""
    has_token_auth: bool
    """Whether Ray asks for a token there."""
    available_bytes: int
    """Host memory that a process can still get."""
    gpu_free_bytes: tuple[int, ...] = field(default=())
    """Free memory of each GPU, by nvidia-smi's number; empty without GPUs."""


def facts_here(node_ip: str, with_gpus: bool = True) -> NodeFacts:
    """Look at this machine; takes some ms, and with GPUs what nvidia-smi takes."""
    return NodeFacts(
        node_ip=node_ip,
        versions=versions_here(),
        interface=interface_of(node_ip),
        chosen_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        has_token_auth=has_token_auth(),
        available_bytes=available_bytes(),
        gpu_free_bytes=_gpu_free_bytes() if with_gpus else (),
    )


def versions_here() -> dict[str, str]:
    """Versions in this process's environment."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        version = _version(package)
        if version is not None:
            versions[package] = version
    return versions


def _version(package: str) -> str | None:
    if package == "raysharding":
        # The source that runs, installed or not: what pip wrote down may be of another checkout. Not imported: the
        # package's own names are on a floor above this one.
        return str(sys.modules["raysharding"].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_free_bytes() -> tuple[int, ...]:
    """Free memory of the machine's GPUs, whichever of them Ray lets this process see, and without a CUDA context."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()  # no NVIDIA driver, or one that does not answer
    return tuple(int(line) * MIB for line in said.split() if line.isdecimal())


def ask_nodes(node_ids: Sequence[str], timeout_s: float) -> dict[str, NodeFacts]:
    """Ask nodes about themselves, by a task on each that needs no CPU.

    Args:
        node_ids: Ray's ids.
        timeout_s: Deadline for all of them.

    Returns:
        Node id → facts, of those that answered.
    """
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    task = ray.remote(num_cpus=0, max_retries=0)(facts_here)
    refs = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            addresses[node_id]
        ): node_id
        for node_id in node_ids
    }
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    for ref in late:
        ray.cancel(ref, force=True)
    facts = {}
    for ref in ready:
        try:
            facts[refs[ref]] = ray.get(ref)
        except ray.exceptions.RayError:
            continue  # a node that cannot run a task tells nothing; who wants it says so
    return facts


@dataclass(frozen=True)
class NodeCapacity:
    """One node, as far as a group needs it: real, or one that you think of buying."""

    name: str
    """Its address, or any name."""
    cpus: float
    """CPUs that Ray could give to ranks now."""
    gpus: int = 0
    """GPUs that Ray could give to ranks now."""
    host_bytes: int | None = None
    """Free host memory; `None`: unknown, so nothing is said of it."""
    gpu_bytes: int | None = None
    """Free memory of each GPU, of the fullest one where they differ; `None`: unknown."""
    ranks: int | None = None
    """How many ranks a given placement group puts there; `None`: as many as CPUs and GPUs allow."""

    def resources(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": self.cpus, "GPU": float(self.gpus)}


def local_capacity() -> list[NodeCapacity]:
    """This machine, as the cluster that `ray.init()` would start on it."""
    facts = facts_here("127.0.0.1")
    return [_room("this machine", {"CPU": float(os.cpu_count() or 1), "GPU": len(facts.gpu_free_bytes)}, facts)]


def cluster_capacity(placement: Placement, timeout_s: float) -> list[NodeCapacity]:
    """The nodes of the cluster that this program is connected to, each asked for its free memory.

    Args:
        placement: Only nodes that carry its labels count; of a given placement group only those that hold bundles.
        timeout_s: Deadline for the nodes' answers; memory of one that is late is unknown.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and labels_match(node, placement.labels)]
    bundles: list[str] = []
    if placement.placement_group is not None:
        bundles = list(placement_group_table(placement.placement_group)["bundles_to_node_id"].values())
        nodes = [node for node in nodes if node["NodeID"] in bundles]
    facts = ask_nodes([node["NodeID"] for node in nodes], timeout_s)
    free = free_resources()
    rooms: list[NodeCapacity] = []
    for node in nodes:
        name, node_id = node["NodeManagerAddress"], node["NodeID"]
        if any(room.name == name for room in rooms):
            name = f"{name} ({node_id[:8]})"  # two raylets may share an address
        count = bundles.count(node_id) if bundles else None
        rooms.append(_room(name, free.get(node_id, {}), facts.get(node_id), count))
    return rooms


def _room(name: str, free: Mapping[str, float], facts: NodeFacts | None, ranks: int | None = None) -> NodeCapacity:
    gpu_bytes = min(facts.gpu_free_bytes) if facts is not None and facts.gpu_free_bytes else None
    host_bytes = None if facts is None else facts.available_bytes
    return NodeCapacity(name, free.get("CPU", 0.0), int(free.get("GPU", 0)), host_bytes, gpu_bytes, ranks)


def assign(world_size: int, rooms: Sequence[NodeCapacity], need: Mapping[str, float], strategy: str) -> list[int]:
    """Which room each rank gets, by rank; shorter than `world_size` where CPUs or GPUs do not suffice.

    Ray knows no memory of ours, so memory has no say. Where several choices keep to the strategy, Ray's may differ.

    Args:
        world_size: Number of ranks.
        rooms: The nodes.
        need: Resources of one rank.
        strategy: Ray's placement-group strategy.
    """
    space = [ranks_that_fit(room.resources(), need) if room.ranks is None else room.ranks for room in rooms]
    fullest_first = sorted(range(len(rooms)), key=lambda index: -space[index])
    if strategy == "STRICT_PACK":
        fullest_first = fullest_first[:1]
    if strategy == "STRICT_SPREAD":
        space = [min(one, 1) for one in space]
    taken = [0] * len(rooms)
    if strategy == "SPREAD":
        for _ in range(world_size):
            open_rooms = [index for index in fullest_first if taken[index] < space[index]]
            if open_rooms:
                taken[min(open_rooms, key=lambda index: taken[index])] += 1
    else:
        for index in fullest_first:
            taken[index] = min(space[index], world_size - sum(taken))
    return [index for index in fullest_first for _ in range(taken[index])]
