"""`GroupPlan`: what a group would hold, rank by rank and node by node, and whether it fits."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from raysharding.distributed.footprint import Footprint
from raysharding.distributed.memory import RANK_BYTES
from raysharding.group.describe import html_rows, text_table
from raysharding.group.rooms import NodeRoom

CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context and NCCL's buffers on a GPU. A round number, not measured."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1; `?` for `None`."""
    if num_bytes is None:
        return "?"
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


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

    room: NodeRoom
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
