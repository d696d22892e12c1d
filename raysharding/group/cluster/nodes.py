"""`NodeFacts`: what a process sees of its node: versions, network interface, free memory, GPUs.

`NodeCapacity`: the resources that a node has for ranks; `assign`: which ranks Ray would place on which node.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.config import Placement
from raysharding.group.cluster.placement import labels_match, ranks_that_fit
from raysharding.group.cluster.ray_internals import free_resources, has_token_auth, is_worker
from raysharding.units import MIB

PACKAGES = ("torch", "ray", "transformers", "safetensors")
_NVIDIA_SMI_S = 10.0


@dataclass(frozen=True)
class NodeFacts:
    """Versions, interface and memory of a node, as a process there sees them; versions should agree between nodes."""

    node_ip: str
    """Address of the node, as Ray knows it."""
    versions: Mapping[str, str]
    """`python` and package → version; a package that is not installed is left out."""
    interface: str | None
    """The network interface that owns `node_ip`; `None` if none does."""
    chosen_interface: str | None
    """The value of GLOO_SOCKET_IFNAME; `None` if it is not set."""
    has_token_auth: bool
    """True if Ray requires a token on the node."""
    available_bytes: int
    """Host memory that a process can still allocate."""
    gpu_free_bytes: tuple[int, ...] = field(default=())
    """Free memory of each GPU that the process or its group may use; empty without GPUs."""


def facts_here(node_ip: str, with_gpus: bool = True) -> NodeFacts:
    """Return the facts of this machine; takes some ms, and with GPUs also the time of nvidia-smi."""
    from raysharding.distributed.comm import interface_of  # imports torch
    from raysharding.distributed.transfer import available_bytes

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
    """Return the versions in this process's environment."""
    # raysharding's is that of the running source, installed or not: pip's metadata may be of another checkout. It is
    # read through `sys.modules`, since the package's own names are on a floor above this one.
    versions = {"python": platform.python_version(), "raysharding": str(sys.modules["raysharding"].__version__)}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _gpu_free_bytes() -> tuple[int, ...]:
    """Return the free memory of the GPUs that CUDA_VISIBLE_DEVICES leaves, by nvidia-smi; makes no CUDA context."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" and not is_worker():  # before Ray 2.60 also the mask of a task that asks for no GPU
        return ()
    if visible:
        command.append(f"--id={visible}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()  # no NVIDIA driver, or one that does not answer
    return tuple(int(line) * MIB for line in output.split() if line.isdecimal())


def ask_nodes(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
) -> Iterator[tuple[str, Any]]:
    """Call a function on nodes, by a task on each that needs no CPU.

    Yields Ray's id of a node and the answer there, in the order of the answers. The answer is a `RayError` where the
    task failed. Nodes that are late come last, with a `GetTimeoutError`.

    Args:
        function: The function, of one argument.
        arguments: Ray's id of a node → the argument there.
        timeout_s: Deadline for all nodes together. Tasks that are late are cancelled.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(argument): node_id
        for node_id, argument in arguments.items()
    }
    until = time.monotonic() + timeout_s
    try:
        while pending and (ready := ray.wait(list(pending), timeout=max(0.0, until - time.monotonic()))[0]):
            node_id = pending.pop(ready[0])
            try:
                answer = ray.get(ready[0], timeout=0)
            except ray.exceptions.RayError as error:
                answer = error
            yield node_id, answer
        for node_id in pending.values():
            yield node_id, ray.exceptions.GetTimeoutError(f"no answer within {timeout_s:g} s")
    finally:
        # Only these: Ray 2.60 ends the driver when a task is cancelled whose reply has just arrived.
        for late in pending:
            ray.cancel(late, force=True)


@dataclass(frozen=True)
class NodeCapacity:
    """The resources of one node that a group needs; the node may be real or hypothetical."""

    name: str
    """Address of the node, or any name."""
    cpus: float
    """CPUs that Ray could assign to ranks now."""
    gpus: float = 0
    """GPUs that Ray could assign to ranks now; a part of one where others have the rest."""
    host_bytes: int | None = None
    """Free host memory; `None` if unknown, in which case it is not checked."""
    gpu_bytes: int | None = None
    """Free memory of each GPU, the smallest value if they differ; `None` if unknown."""
    ranks: int | None = None
    """Number of ranks that a given placement group puts on the node; `None`: as many as CPUs and GPUs allow."""

    def resources(self) -> dict[str, float]:
        """Return the node's resources by Ray's names."""
        return {"CPU": self.cpus, "GPU": float(self.gpus)}


def local_capacity() -> list[NodeCapacity]:
    """Return this machine as the only node of the cluster that `ray.init()` would start on it."""
    facts = facts_here("127.0.0.1")
    return [_capacity("this machine", {"CPU": float(os.cpu_count() or 1), "GPU": len(facts.gpu_free_bytes)}, facts)]


def cluster_capacity(placement: Placement, timeout_s: float) -> list[NodeCapacity]:
    """Return the capacity of the nodes of the connected cluster, each queried for its free memory.

    Args:
        placement: Only nodes that carry its labels count; if it has a placement group, only nodes that hold bundles.
        timeout_s: Deadline for the nodes' answers; the memory of a late node is unknown.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and labels_match(node, placement.labels)]
    bundles: list[str] = []
    if placement.placement_group is not None:
        bundles = list(placement_group_table(placement.placement_group)["bundles_to_node_id"].values())
        nodes = [node for node in nodes if node["NodeID"] in bundles]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    # A node that cannot run a task has no facts.
    answers = ask_nodes(facts_here, addresses, timeout_s)
    facts = {node_id: answer for node_id, answer in answers if isinstance(answer, NodeFacts)}
    free = free_resources()
    capacities: list[NodeCapacity] = []
    for node_id, name in addresses.items():
        if any(capacity.name == name for capacity in capacities):
            name = f"{name} ({node_id[:8]})"  # two raylets may share an address
        count = bundles.count(node_id) if bundles else None
        capacities.append(_capacity(name, free.get(node_id, {}), facts.get(node_id), count))
    return capacities


def _capacity(name: str, free: Mapping[str, float], facts: NodeFacts | None, ranks: int | None = None) -> NodeCapacity:
    gpu_bytes = min(facts.gpu_free_bytes) if facts is not None and facts.gpu_free_bytes else None
    host_bytes = None if facts is None else facts.available_bytes
    return NodeCapacity(name, free.get("CPU", 0.0), free.get("GPU", 0), host_bytes, gpu_bytes, ranks)


def assign(world_size: int, nodes: Sequence[NodeCapacity], need: Mapping[str, float], strategy: str) -> list[int]:
    """Return the index of each rank's node, by rank; shorter than `world_size` if CPUs or GPUs do not suffice.

    Memory is not considered, since Ray does not know a group's memory. Where the strategy allows several placements,
    Ray may choose another one.

    Args:
        world_size: Number of ranks.
        nodes: Capacity of each node.
        need: Resources of one rank.
        strategy: Ray's placement-group strategy.
    """
    space = [ranks_that_fit(node.resources(), need) if node.ranks is None else node.ranks for node in nodes]
    fullest_first = sorted(range(len(nodes)), key=lambda index: -space[index])
    if strategy == "STRICT_PACK":
        fullest_first = fullest_first[:1]
    if strategy == "STRICT_SPREAD":
        space = [min(count, 1) for count in space]
    taken = [0] * len(nodes)
    if strategy == "SPREAD":
        for _ in range(world_size):
            with_space = [index for index in fullest_first if taken[index] < space[index]]
            if with_space:
                taken[min(with_space, key=lambda index: taken[index])] += 1
    else:
        for index in fullest_first:
            taken[index] = min(space[index], world_size - sum(taken))
    return [index for index in fullest_first for _ in range(taken[index])]
