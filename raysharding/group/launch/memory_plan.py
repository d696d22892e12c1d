"""`plan_group`: computes a `GroupPlan` from a checkpoint's headers and the cluster's nodes; starts nothing.

`GroupPlan`: the memory that a group would need on each rank and node, and whether the group fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn

from raysharding.config import Timeouts
from raysharding.distributed.footprint import (
    Footprint,
    footprints,
    full_bytes,
    gathered_bytes,
    load_buffers,
    planned_tensors,
    save_buffers,
)
from raysharding.distributed.transfer import RANK_BYTES
from raysharding.group.cluster import (
    NodeCapacity,
    assign,
    choose_ranks,
    cluster_capacity,
    local_capacity,
    rank_need,
    ranks_per_gpu,
    show_resources,
)
from raysharding.group.launch.spec import GroupSpec, fitted_module, open_spec
from raysharding.models import wrap_groups
from raysharding.report import Report, Table
from raysharding.units import format_bytes as size

CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context and NCCL's buffers on a GPU; a round estimate, not measured."""


@dataclass(frozen=True)
class RankPlan:
    """Planned memory of one rank, in bytes."""

    rank: int
    """Global rank."""
    node: str
    """Name of its node; empty if no node has space for the rank."""
    footprint: Footprint
    """Parameters, buffers, gradients and optimizer state."""
    load_bytes: int
    """Buffers that a load needs beside the shards, at most: in the GPU's memory, and in host memory on CPUs."""
    gathered_bytes: int
    """Full parameters of the groups that compute at one time; an estimate."""
    host_bytes: int
    """Peak host memory, including the process itself (an estimate)."""
    device_bytes: int
    """Peak GPU memory, including a CUDA context (an estimate); 0 on CPUs."""


@dataclass(frozen=True)
class NodePlan:
    """Planned memory of the ranks of one node, in bytes."""

    room: NodeCapacity
    """Resources of the node."""
    ranks: tuple[int, ...]
    """Ranks that would run on the node."""
    host_bytes: int
    """Host memory of all these ranks."""
    device_bytes: int
    """GPU memory that the ranks of one GPU need together, on the GPU that needs most."""


@dataclass(frozen=True, repr=False)
class GroupPlan(Report):
    """Result of `ShardedModelGroup.plan`."""

    checkpoint: str
    """Path or URI; of a hub id the commit's."""
    world_size: int
    """Number of ranks."""
    device: str
    """Device type of the ranks."""
    num_replicas: int
    """Number of replicas of the model; 1 without HSDP."""
    num_parameters: int
    """Elements of all parameters; tied parameters count once."""
    checkpoint_bytes: int
    """Bytes of the tensors in the files."""
    optimizer: str
    """Name of the optimizer's factory; empty without training."""
    ranks: tuple[RankPlan, ...]
    """Plans by rank."""
    nodes: tuple[NodePlan, ...]
    """Plans of the nodes that were considered."""
    shortages: tuple[str, ...]
    """A text for each resource that is short: the node, need against have, and a remedy."""
    notes: tuple[str, ...]
    """Texts on what is estimated, unknown or left out."""

    @property
    def fits(self) -> bool:
        """True if no known resource is short; activations and the items in `notes` are not counted."""
        return not self.shortages

    def _title(self) -> str:
        copies = f", {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        what = f"{self.checkpoint}: {self.num_parameters:,} parameters, {size(self.checkpoint_bytes)} in the files"
        return f"{what}; {self.world_size} ranks on {self.device}{copies}, {self.optimizer or 'no optimizer'}"

    def _parts(self) -> Iterator[Table | str]:
        yield self._rank_table()
        yield self._node_table()
        yield "fits, as far as is known" if self.fits else "does not fit:"
        yield from (f"  {line}" for line in self.shortages)
        yield from (f"note: {note}" for note in self.notes)

    def _rank_table(self) -> Table:
        header = ("rank", "node", "parameters", "buffers", "gradients", "optimizer", "gathered", "load", "host", "gpu")
        rows: list[Sequence[str]] = []
        # Adjacent ranks with equal plans on one node share a row.
        for _, equal in groupby(self.ranks, lambda one: (one.node, one.footprint)):
            plan, *others = equal
            held = plan.footprint
            numbers = f"{plan.rank}-{others[-1].rank}" if others else str(plan.rank)
            parts = (held.parameter_bytes, held.buffer_bytes, held.gradient_bytes, held.optimizer_bytes)
            more = (plan.gathered_bytes, plan.load_bytes, plan.host_bytes, plan.device_bytes)
            rows.append((numbers, plan.node or "no space", *map(size, (*parts, *more))))
        return Table(header, rows)

    def _node_table(self) -> Table:
        header = ("node", "ranks", "cpus free", "gpus free", "host need", "host free", "gpu need", "gpu free")
        rows: list[Sequence[str]] = []
        for node in self.nodes:
            has = node.room
            amounts = (node.host_bytes, has.host_bytes, node.device_bytes, has.gpu_bytes)
            rows.append((has.name, str(len(node.ranks)), f"{has.cpus:g}", f"{has.gpus:g}", *map(size, amounts)))
        return Table(header, rows)


_ANSWER_S = 15.0
"""Longest wait, in seconds, for the facts of the nodes; a worker process may have to start on a node first."""


def plan_group(options: Mapping[str, Any]) -> GroupPlan:
    """Plan a group from the arguments of `ShardedModelGroup.plan`."""
    nodes: Sequence[NodeCapacity] | None = options["nodes"]
    spec = replace(GroupSpec.of(options), timeouts=Timeouts(start_s=_ANSWER_S))
    spec, opened, has_cluster = open_spec(spec, alone=nodes is not None)
    base, adapters = opened.base, opened.adapters
    if nodes is None:
        nodes = cluster_capacity(spec.placement, _ANSWER_S) if has_cluster else local_capacity()
    device_type, world_size = _choose(spec, nodes)
    module = fitted_module(opened.model, base, spec.loading)
    need = rank_need(device_type, spec.placement)
    placed = assign(world_size, nodes, need, spec.placement.strategy)
    ranks = _ranks(spec, module, device_type, [nodes[index].name for index in placed], world_size)
    per_gpu = ranks_per_gpu(spec.placement)
    node_plans = tuple(
        _node(capacity, per_gpu, [rank for rank, index in zip(ranks, placed, strict=False) if index == number])
        for number, capacity in enumerate(nodes)
    )
    shortages = [*_unplaced(world_size, placed, nodes, need, spec.placement.strategy)]
    shortages += [line for node in node_plans for line in _short(node, per_gpu)]
    return GroupPlan(
        checkpoint=spec.checkpoint,
        world_size=world_size,
        device=device_type,
        num_replicas=spec.sharding.replicate_size,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        checkpoint_bytes=base.num_bytes + (0 if adapters is None else adapters.num_bytes),
        optimizer=_name(spec.optimizer),
        ranks=tuple(ranks),
        nodes=node_plans,
        shortages=tuple(shortages),
        notes=tuple(_notes(spec, ranks, node_plans, device_type)),
    )


def _choose(spec: GroupSpec, nodes: Sequence[NodeCapacity]) -> tuple[str, int]:
    """Return the device type and the number of ranks, as `from_checkpoint` chooses them."""
    num_gpus = sum(math.ceil(capacity.gpus) for capacity in nodes)  # of one, a part may be free
    node_cpus = [capacity.cpus for capacity in nodes]
    device_type, world_size = choose_ranks(spec.device, spec.world_size, spec.placement, num_gpus, node_cpus)
    if world_size % spec.sharding.replicate_size:
        size_of = spec.sharding.replicate_size
        raise ValueError(f"replicate_size={size_of} does not divide world_size={world_size}: give a divisor")
    return device_type, world_size


def _ranks(
    spec: GroupSpec, module: nn.Module, device_type: str, placed: Sequence[str], world_size: int
) -> list[RankPlan]:
    """Sum up the host and GPU memory of each rank."""
    num_shards = world_size // spec.sharding.replicate_size
    groups = wrap_groups(module, spec.sharding)
    tensors = planned_tensors(module, spec.sharding, groups, num_shards)
    held = footprints(tensors, range(num_shards), spec.optimizer)
    gathered = gathered_bytes(module, spec.sharding, groups)
    weights = full_bytes(tensors)
    state = sum(one.optimizer_bytes or 0 for one in held.values())
    saves = save_buffers(max(weights, state), device_type, is_one_host=len(set(placed)) == 1)
    loads = load_buffers(weights, spec.loading.bucket_bytes, device_type)
    on_cpu = device_type == "cpu"

    def plan(rank: int, node: str) -> RankPlan:
        footprint = held[rank % num_shards]
        host, device = footprint.held(device_type, offload=spec.sharding.cpu_offload)
        # There are no gradients during the load, and there are no load's buffers during compute.
        host_peak = max(loads[0], host.training + max(gathered * on_cpu, saves[0]))
        device_peak = max(loads[1], device.training + max(gathered, saves[1]))
        host_bytes = RANK_BYTES + host.resident + host_peak
        device_bytes = 0 if on_cpu else CONTEXT_BYTES + device.resident + device_peak
        return RankPlan(rank, node, footprint, loads[not on_cpu], gathered, host_bytes, device_bytes)

    return [plan(rank, node) for rank, node in enumerate([*placed, *[""] * (world_size - len(placed))])]


def _node(capacity: NodeCapacity, per_gpu: int, ranks: Sequence[RankPlan]) -> NodePlan:
    # Ray fills one GPU with ranks before the next.
    on_gpus = [ranks[first : first + per_gpu] for first in range(0, len(ranks), per_gpu)]
    device_bytes = max((sum(one.device_bytes for one in few) for few in on_gpus), default=0)
    return NodePlan(capacity, tuple(one.rank for one in ranks), sum(one.host_bytes for one in ranks), device_bytes)


def _unplaced(
    world_size: int, placed: Sequence[int], nodes: Sequence[NodeCapacity], need: Mapping[str, float], strategy: str
) -> list[str]:
    if len(placed) >= world_size:
        return []
    free = "; ".join(
        f"{node.name} has {show_resources({key: node.resources().get(key, 0.0) for key in need})}" for node in nodes
    )
    what = f"{world_size} ranks need {show_resources(need)} each, but there is space for {len(placed)}"
    return [f"{what} under strategy={strategy!r} ({free or 'there is no node'}): use fewer ranks, or add nodes"]


def _short(node: NodePlan, per_gpu: int) -> list[str]:
    lines = []
    has = node.room
    if has.host_bytes is not None and node.host_bytes > has.host_bytes:
        what = f"host memory: its {len(node.ranks)} ranks need {size(node.host_bytes)}, {size(has.host_bytes)} are free"
        lines.append(f"{has.name}: {what}: short by {size(node.host_bytes - has.host_bytes)}")
    if has.gpu_bytes is not None and node.device_bytes > has.gpu_bytes:
        sharing = min(per_gpu, len(node.ranks))
        who = "a rank needs" if sharing == 1 else f"{sharing} ranks that share a GPU need"
        what = f"GPU memory: {who} {size(node.device_bytes)}, {size(has.gpu_bytes)} are free on a GPU"
        lines.append(f"{has.name}: {what}: short by {size(node.device_bytes - has.gpu_bytes)}; use more ranks")
    return lines


def _notes(spec: GroupSpec, ranks: Sequence[RankPlan], nodes: Sequence[NodePlan], device_type: str) -> list[str]:
    left_out = "activations, the batch and its outputs, and a background save's copies of the shards"
    context = ", a device context" * (device_type != "cpu")
    notes = [
        f"{left_out} are left out: they depend on what you run",
        f"estimates: the process of each rank, gathered parameters{context}",
    ]
    if spec.optimizer is None:
        notes.append("no optimizer: forward only; give optimizer= to count gradients and optimizer state")
    elif any(one.footprint.optimizer_bytes is None for one in ranks):
        notes.append(f"the state of {_name(spec.optimizer)} is unknown and left out: its step needs real values")
    if spec.loading.mmap:
        notes.append("mmap=True: parameters are pages of the files until they are written, and may take less")
    for node in nodes:
        if node.room.host_bytes is None:
            notes.append(f"{node.room.name}: free host memory is unknown")
        if device_type != "cpu" and node.ranks and node.room.gpu_bytes is None:
            notes.append(f"{node.room.name}: free GPU memory is unknown")
    return notes


def _name(factory: Callable[..., Any] | None) -> str:
    if factory is None:
        return ""
    inner = getattr(factory, "func", factory)  # a functools.partial has no name of its own
    return str(getattr(inner, "__qualname__", type(inner).__name__))
