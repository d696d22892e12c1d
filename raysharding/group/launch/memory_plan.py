"""`plan_group`: from a checkpoint's headers and the cluster's nodes to a `GroupPlan`; nothing is started.

`GroupPlan`: what a group would hold, rank by rank and node by node, and whether it fits.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from raysharding.checkpoint import Checkpoint
from raysharding.distributed.footprint import Footprint, footprints, gathered_bytes, load_bytes, planned_tensors
from raysharding.distributed.transfer import RANK_BYTES
from raysharding.group.cluster import (
    NodeCapacity,
    assign,
    cluster_capacity,
    html_rows,
    join_announced,
    local_capacity,
    rank_need,
    show_resources,
    text_table,
)
from raysharding.group.launch.find_checkpoint import opened_here, opened_on_a_node, opened_without_cluster
from raysharding.group.launch.spec import GroupSpec, fitted_module
from raysharding.models import wrap_groups
from raysharding.units import format_bytes as size

CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context and NCCL's buffers on a GPU. A round number, not measured."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank would hold. Bytes."""

    rank: int
    """Global rank."""
    node: str
    """Name of its node; empty where no node has room for it."""
    footprint: Footprint
    """Parameters, buffers, gradients and optimizer state."""
    load_bytes: int
    """At most, beside the shards while it loads: the ring of buckets."""
    gathered_bytes: int
    """Full parameters of the groups that compute at one time. An estimate."""
    host_bytes: int
    """Most host memory, its process (an estimate) included."""
    device_bytes: int
    """Most GPU memory, a CUDA context (an estimate) included; 0 on CPUs."""


@dataclass(frozen=True)
class NodePlan:
    """What the ranks of one node would hold together. Bytes."""

    room: NodeCapacity
    """What the node has."""
    ranks: tuple[int, ...]
    """Ranks that would run there."""
    host_bytes: int
    """Host memory of all of them."""
    device_bytes: int
    """GPU memory of the rank that needs most; each has a GPU of its own."""


@dataclass(frozen=True)
class GroupPlan:
    """What `ShardedModelGroup.plan` returns."""

    checkpoint: str
    """Path or URI, as the user named it."""
    world_size: int
    """Number of ranks."""
    device: str
    """`cuda` or `cpu`."""
    num_replicas: int
    """Replicas of the model (HSDP); 1 without."""
    num_parameters: int
    """Elements of all parameters, tied ones once."""
    checkpoint_bytes: int
    """Bytes of the files' tensors."""
    optimizer: str
    """Name of the optimizer's factory; empty without training."""
    ranks: tuple[RankPlan, ...]
    """By rank."""
    nodes: tuple[NodePlan, ...]
    """The nodes that were looked at."""
    shortages: tuple[str, ...]
    """A line for each resource that is short, with the node, need against have, and what would help."""
    notes: tuple[str, ...]
    """What is estimated, unknown or left out."""

    @property
    def fits(self) -> bool:
        """Whether nothing that is known is short. Activations and what `notes` names are not in it."""
        return not self.shortages

    def __repr__(self) -> str:
        parts = [self._title(), text_table(*self._ranks()), text_table(*self._nodes()), *self._verdict()]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        verdict = "<br>".join(html.escape(line) for line in self._verdict())
        tables = html_rows(*self._ranks()) + html_rows(*self._nodes())
        return f"<div><b>{html.escape(self._title())}</b>{tables}{verdict}</div>"

    def _title(self) -> str:
        copies = f", {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        what = f"{self.checkpoint}: {self.num_parameters:,} parameters, {size(self.checkpoint_bytes)} in the files"
        return f"{what}; {self.world_size} ranks on {self.device}{copies}, {self.optimizer or 'no optimizer'}"

    def _verdict(self) -> list[str]:
        told = (
            ["fits, as far as is known"] if self.fits else ["does not fit:", *(f"  {line}" for line in self.shortages)]
        )
        return [*told, *(f"note: {note}" for note in self.notes)]

    def _ranks(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        header = ("rank", "node", "parameters", "buffers", "gradients", "optimizer", "gathered", "load", "host", "gpu")
        rows: list[Sequence[str]] = []
        for first, last in _runs(self.ranks):
            held, one = first.footprint, first
            numbers = str(first.rank) if first is last else f"{first.rank}-{last.rank}"
            parts = (held.parameter_bytes, held.buffer_bytes, held.gradient_bytes, held.optimizer_bytes)
            more = (one.gathered_bytes, one.load_bytes, one.host_bytes, one.device_bytes)
            rows.append((numbers, one.node or "no room", *map(size, (*parts, *more))))
        return header, rows

    def _nodes(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        header = ("node", "ranks", "cpus free", "gpus free", "host need", "host free", "gpu need", "gpu free")
        rows: list[Sequence[str]] = []
        for node in self.nodes:
            room = node.room
            amounts = (node.host_bytes, room.host_bytes, node.device_bytes, room.gpu_bytes)
            rows.append((room.name, str(len(node.ranks)), f"{room.cpus:g}", str(room.gpus), *map(size, amounts)))
        return header, rows


def _runs(ranks: Sequence[RankPlan]) -> list[tuple[RankPlan, RankPlan]]:
    """(first, last) of neighbouring ranks that hold the same on the same node: one row for 64 equal ranks."""
    found: list[tuple[RankPlan, RankPlan]] = []
    for one in ranks:
        if found and _row_key(found[-1][0]) == _row_key(one):
            found[-1] = (found[-1][0], one)
        else:
            found.append((one, one))
    return found


def _row_key(one: RankPlan) -> tuple[object, ...]:
    return one.node, one.footprint, one.load_bytes, one.gathered_bytes


def rank_plan(
    rank: int,
    node: str,
    footprint: Footprint,
    load_bytes: int,
    gathered_bytes: int,
    *,
    on_cuda: bool,
    offload: bool,
    reads: bool,
) -> RankPlan:
    """Sum up what one rank holds where.

    Args:
        rank: Global rank.
        node: Name of its node.
        footprint: What it holds of the module and the optimizer.
        load_bytes: Its ring.
        gathered_bytes: Full parameters while it computes.
        on_cuda: Whether it computes on a GPU.
        offload: `Sharding.cpu_offload`: then shards, gradients and optimizer state lie in host memory.
        reads: Whether it reads for others: on GPUs its ring is in host memory, too.
    """
    shards = footprint.parameter_bytes + footprint.training_bytes
    if not on_cuda:
        # While it loads there are no gradients yet, and while it computes there is no ring.
        busiest = max(load_bytes, footprint.training_bytes + gathered_bytes)
        host = RANK_BYTES + footprint.resident_bytes + busiest
        return RankPlan(rank, node, footprint, load_bytes, gathered_bytes, host, 0)
    ring = load_bytes if reads else 0
    host = RANK_BYTES + ring + (shards if offload else 0)
    work = gathered_bytes + (0 if offload else footprint.training_bytes)
    stays = footprint.buffer_bytes + (0 if offload else footprint.parameter_bytes)
    device = CONTEXT_BYTES + stays + max(load_bytes, work)
    return RankPlan(rank, node, footprint, load_bytes, gathered_bytes, host, device)


_ANSWER_S = 15.0
"""Longest wait for what nodes say of themselves; a worker process may have to start there first."""


def plan_group(spec: GroupSpec, nodes: Sequence[NodeCapacity] | None) -> GroupPlan:
    """Do what `ShardedModelGroup.plan` says."""
    spec.check()
    found = opened_here(spec)
    has_cluster = nodes is None and join_announced()
    if found is None:
        found = opened_on_a_node(spec, _ANSWER_S) if has_cluster else opened_without_cluster(spec)
    opened = found.base
    if nodes is None:
        nodes = cluster_capacity(spec.placement, _ANSWER_S) if has_cluster else local_capacity()
    device_type, world_size = _choose(spec, nodes)
    module = fitted_module(found.model, opened, spec.loading)
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


def _choose(spec: GroupSpec, nodes: Sequence[NodeCapacity]) -> tuple[str, int]:
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
        # Neighbouring ranks share a replica: `distributed/comm/device_mesh.py`.
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


def _node(room: NodeCapacity, ranks: Sequence[RankPlan]) -> NodePlan:
    device_bytes = max((one.device_bytes for one in ranks), default=0)
    return NodePlan(room, tuple(one.rank for one in ranks), sum(one.host_bytes for one in ranks), device_bytes)


def _unplaced(
    world_size: int, placed: Sequence[int], nodes: Sequence[NodeCapacity], need: Mapping[str, float], strategy: str
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
