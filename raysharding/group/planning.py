"""`plan_group`: from a checkpoint's headers and the cluster's nodes to a `GroupPlan`; nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from raysharding.checkpoint import Checkpoint
from raysharding.distributed.footprint import footprints, gathered_bytes, load_bytes, planned_tensors
from raysharding.group import checks
from raysharding.group.connect import join_announced
from raysharding.group.group_plan import GroupPlan, NodePlan, RankPlan, rank_plan, size
from raysharding.group.opening import opened_here, opened_on_a_node, opened_without_cluster
from raysharding.group.placement import rank_need, show_resources
from raysharding.group.rooms import NodeRoom, assign, rooms_here, rooms_of_cluster
from raysharding.group.spec import GroupSpec
from raysharding.models import wrap_groups

_ANSWER_S = 15.0
"""Longest wait for what nodes say of themselves; a worker process may have to start there first."""


def plan_group(spec: GroupSpec, nodes: Sequence[NodeRoom] | None) -> GroupPlan:
    """Do what `ShardedModelGroup.plan` says."""
    spec.check()
    found = opened_here(spec)
    has_cluster = nodes is None and join_announced()
    if found is None:
        found = opened_on_a_node(spec, _ANSWER_S) if has_cluster else opened_without_cluster(spec)
    opened = found.base
    if nodes is None:
        nodes = rooms_of_cluster(spec.placement, _ANSWER_S) if has_cluster else rooms_here()
    device_type, world_size = _choose(spec, nodes)
    module = checks.fitted_module(found.model, opened, spec.loading)
    need = rank_need(device_type, spec.placement)
    placed = assign(world_size, nodes, need, spec.placement.strategy)
    ranks = _ranks(spec, opened, module, device_type, [nodes[index].name for index in placed], world_size)
    node_plans = tuple(
        _node(room, [rank for rank, index in zip(ranks, placed, strict=False) if index == number])
        for number, room in enumerate(nodes)
    )
    shortages = [*_unplaced(world_size, placed, nodes, need, spec.placement.strategy)]
    shortages += [line for node in node_plans for line in _short(node)]
    return GroupPlan(
        checkpoint=spec.checkpoint,
        world_size=world_size,
        device=device_type,
        num_replicas=spec.sharding.replicate_size,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        checkpoint_bytes=found.num_bytes,
        optimizer=_name(spec.optimizer),
        ranks=tuple(ranks),
        nodes=node_plans,
        shortages=tuple(shortages),
        notes=tuple(_notes(spec, ranks, node_plans, device_type)),
    )


def _choose(spec: GroupSpec, nodes: Sequence[NodeRoom]) -> tuple[str, int]:
    """Device type and number of ranks, as `from_checkpoint` chooses them."""
    gpus = sum(room.gpus for room in nodes)
    device_type = spec.device or ("cuda" if gpus else "cpu")
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device={spec.device!r}: use 'cuda', 'cpu', or None for cuda where there are GPUs")
    world_size = spec.world_size
    if world_size is None and spec.placement.placement_group is not None:
        world_size = int(spec.placement.placement_group.bundle_count)
    if world_size is None and (device_type == "cpu" or not gpus):
        raise ValueError("world_size=None means one rank per free GPU, and there is none: give world_size")
    world_size = gpus if world_size is None else world_size
    if world_size % spec.sharding.replicate_size:
        size_of = spec.sharding.replicate_size
        raise ValueError(f"replicate_size={size_of} does not divide world_size={world_size}: give a divisor")
    return device_type, world_size


def _ranks(
    spec: GroupSpec, opened: Checkpoint, module: nn.Module, device_type: str, placed: Sequence[str], world_size: int
) -> list[RankPlan]:
    num_shards = world_size // spec.sharding.replicate_size
    tensors = planned_tensors(module, spec.sharding, num_shards)
    held = footprints(tensors, range(num_shards), spec.optimizer)
    gathered = gathered_bytes(module, spec.sharding, wrap_groups(module, spec.sharding))
    ranks = []
    for rank in range(world_size):
        # Neighbouring ranks share a replica: `distributed/mesh.py`.
        ring = load_bytes(spec.loading, num_shards, opened.num_bytes, reads=rank == 0)
        node = placed[rank] if rank < len(placed) else ""
        ranks.append(
            rank_plan(
                rank,
                node,
                held[rank % num_shards],
                ring,
                gathered,
                on_cuda=device_type == "cuda",
                offload=spec.sharding.cpu_offload,
                reads=rank == 0 or spec.loading.transport == "local",
            )
        )
    return ranks


def _node(room: NodeRoom, ranks: Sequence[RankPlan]) -> NodePlan:
    device_bytes = max((one.device_bytes for one in ranks), default=0)
    return NodePlan(room, tuple(one.rank for one in ranks), sum(one.host_bytes for one in ranks), device_bytes)


def _unplaced(
    world_size: int, placed: Sequence[int], nodes: Sequence[NodeRoom], need: Mapping[str, float], strategy: str
) -> list[str]:
    if len(placed) >= world_size:
        return []
    free = "; ".join(
        f"{room.name} has {show_resources({key: room.resources()[key] for key in need})}" for room in nodes
    )
    what = f"{world_size} ranks need {show_resources(need)} each, and there is room for {len(placed)}"
    return [f"{what} under strategy={strategy!r} ({free or 'there is no node'}): use fewer ranks, or add nodes"]


def _short(node: NodePlan) -> list[str]:
    lines = []
    room = node.room
    if room.host_bytes is not None and node.host_bytes > room.host_bytes:
        what = (
            f"host memory: its {len(node.ranks)} ranks need {size(node.host_bytes)}, {size(room.host_bytes)} are free"
        )
        lines.append(f"{room.name}: {what}: short by {size(node.host_bytes - room.host_bytes)}")
    if room.gpu_bytes is not None and node.device_bytes > room.gpu_bytes:
        what = f"GPU memory: a rank needs {size(node.device_bytes)}, {size(room.gpu_bytes)} are free on a GPU"
        lines.append(f"{room.name}: {what}: short by {size(node.device_bytes - room.gpu_bytes)}; use more ranks")
    return lines


def _notes(spec: GroupSpec, ranks: Sequence[RankPlan], nodes: Sequence[NodePlan], device_type: str) -> list[str]:
    notes = ["activations, the batch and its outputs are left out: they depend on what you run"]
    if spec.optimizer is None:
        notes.append("no optimizer: forward only; give optimizer= to count gradients and optimizer state")
    elif any(one.footprint.optimizer_bytes is None for one in ranks):
        what = f"the state of {_name(spec.optimizer)} is unknown, and left out: its step needs real values"
        notes.append(what)
    notes.append(
        "estimates: the process of each rank, gathered parameters" + ", a CUDA context" * (device_type == "cuda")
    )
    if spec.loading.mmap:
        notes.append("mmap=True: parameters are pages of the files until they are written, and may take less")
    for node in nodes:
        if node.room.host_bytes is None:
            notes.append(f"{node.room.name}: free host memory is unknown")
        if device_type == "cuda" and node.ranks and node.room.gpu_bytes is None:
            notes.append(f"{node.room.name}: free GPU memory is unknown")
    return notes


def _name(factory: Callable[..., Any] | None) -> str:
    if factory is None:
        return ""
    inner = getattr(factory, "func", factory)  # a functools.partial has no name of its own
    return str(getattr(inner, "__qualname__", type(inner).__name__))
