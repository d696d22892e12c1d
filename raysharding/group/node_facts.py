"""`NodeFacts`: what one node of the cluster says of itself: versions, network interface, free memory, GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.distributed.memory import available_bytes
from raysharding.distributed.process_group import interface_of

PACKAGES = ("torch", "raysharding", "ray", "transformers", "safetensors")
_NVIDIA_SMI_S = 10.0
MIB = 1 << 20


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
        has_token_auth=get_authentication_mode() == AuthenticationMode.TOKEN,
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
