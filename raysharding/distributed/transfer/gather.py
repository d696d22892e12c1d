"""Gather: shards to full tensors, one bucket at a time, on the ranks that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm import agreeing, current_group, is_accelerator, to_host, using_group, wait_for
from raysharding.distributed.fully_shard import (
    ShardMap,
    by_mesh,
    group_of,
    local_tensor,
    message_device,
    over_ranks_of,
    persistent_names,
    reshard,
    tensor_layout,
)
from raysharding.distributed.transfer.bucket_plan import (
    REPLICATED,
    Bucket,
    BucketPlan,
    PlannedTensor,
    Section,
    Segment,
    plan_buckets,
    plan_in_order,
)
from raysharding.distributed.transfer.buffers import LocalShards, ReadShard
from raysharding.distributed.transfer.sources import as_bytes
from raysharding.distributed.transfer.transport import connect_ranks
from raysharding.models import all_names
from raysharding.units import MIB, split_by_bytes

Sink = Callable[[str, int, torch.Tensor], None]
"""Called as `(fqn, first element, values)`: 1-D values of a range of the flattened tensor. On the CPU, valid in the
call; with `Gather.on_device` where they are, valid until the next round."""

GATHER_BUCKET_BYTES = 32 * MIB
"""Bytes in flight in one round of a gather, over all destinations."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (FQN, tensor) of every parameter and persistent buffer, under each of its names."""
    persistent = persistent_names(module)
    return ((name, tensor) for name, tensor in all_names(module) if name in persistent)


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return canonical FQN → parameter or persistent buffer, tied tensors once, as in a checkpoint of the module."""
    first: dict[torch.Tensor, str] = {}
    for name, tensor in named_tensors(module):
        first.setdefault(tensor, name)
    return {name: tensor for tensor, name in first.items()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return other FQN of a tied parameter or persistent buffer → canonical FQN, the one in `saved_tensors`."""
    canonical = {tensor: name for name, tensor in saved_tensors(module).items()}
    return {name: canonical[tensor] for name, tensor in named_tensors(module) if canonical[tensor] != name}


@dataclass
class Gather:
    """Gathers tensors on the ranks that need them. Every rank makes one with equal arguments and calls `run` once.

    In round k, every rank sends its sections of each destination's k-th bucket, and the destination passes the received
    segments to its sink. Large segments are sent from the shard, small ones are packed. The destination itself, and a
    rank beside it (on its host), passes its segments to its own sink instead of sending them.
    """

    tensors: Mapping[str, torch.Tensor]
    """FQN → parameter or buffer of the module."""
    destinations: Mapping[int, Sequence[str]]
    """Rank → FQNs that it needs, in order."""
    sink: Sink
    """Receives the tensors of this rank; unused on ranks that need none."""
    device: torch.device
    """Device of the messages."""
    timeout_s: float
    """Longest wait for one round, in seconds."""
    bucket_bytes: int = GATHER_BUCKET_BYTES
    """Bytes in flight in one round, over all destinations."""
    beside: Mapping[int, Set[int]] = field(default_factory=dict)
    """Rank → destinations that it is beside; the same on every rank."""
    in_order: bool = False
    """True to transfer the tensors of a destination one after the other, from first to last element."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """FQN → dtype on the wire; the tensor's own by default. The sink may get this rank's values unconverted."""
    read: ReadShard | None = None
    """Returns the values to send in place of a shard's own; by default they are its own."""
    on_device: bool = False
    """True to give the sink values on the device of the messages, or of this rank's shard, without a copy."""
    wire_bytes: int = field(default=0, init=False)
    """Bytes that this rank sent."""
    num_messages: int = field(default=0, init=False)
    """Messages that this rank sent or received; ranks have different numbers."""

    def __post_init__(self) -> None:
        self._shards = ShardMap.of(self.tensors)
        share = max(self.bucket_bytes // max(len(self.destinations), 1), 1)
        self._plans = {rank: self._plan(names, share) for rank, names in self.destinations.items()}
        self._local_shards = {
            rank: LocalShards(plan.tensors, self.tensors, read=self.read) for rank, plan in self._plans.items()
        }

    def _plan(self, names: Sequence[str], share: int) -> BucketPlan:
        planned = [
            PlannedTensor(tensor_layout(name, self.tensors[name]), self.dtypes.get(name, self.tensors[name].dtype))
            for name in names
        ]
        if self.in_order:
            return plan_in_order(planned, self._shards.num_shards, share)
        return plan_buckets(planned, self._shards.num_shards, share)

    def run(self, on_round: Callable[[int], None] | None = None) -> None:
        """Transfer all tensors; collective. `on_round` is called on every rank with the bytes delivered so far."""
        for delivered in self.rounds():
            if on_round is not None:
                on_round(delivered)

    def rounds(self) -> Iterator[int]:
        """Transfer all tensors, a bucket of each destination at a time; collective: every rank iterates to the end.

        Yields:
            The bytes delivered so far, over all destinations.
        """
        delivered = 0
        rounds = max((len(plan) for plan in self._plans.values()), default=0)
        own = self._plans.get(self._shards.rank)
        size = own.max_bucket_bytes if own is not None and self._receives() else 0
        # One rank alone can run out of memory: the others would wait for its messages.
        with agreeing():
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            pinned = self._pinned_memory()
            flag = torch.zeros(1, device=self.device)
        connect_ranks(flag)
        for index in range(rounds):
            self._transfer(index, buffer, pinned)
            if own is not None and index < len(own):
                self._deliver(own[index], buffer, pinned)
            delivered += sum(plan[index].payload_bytes for plan in self._plans.values() if index < len(plan))
            yield delivered

    def _transfer(self, index: int, buffer: torch.Tensor, pinned: torch.Tensor | None) -> None:
        """Send and receive one round's buckets, and pass this rank's own segments to its sink."""
        staged: list[torch.Tensor] = []
        ops: list[dist.P2POp] = []
        for rank, plan in self._plans.items():
            if index < len(plan):
                ops += self._messages(rank, plan[index], buffer, staged)
                self._hand_over(rank, plan[index], pinned)
        # One batch per round, in the same order on all ranks, so that every send has a posted receive.
        self.num_messages += len(ops)
        for work in dist.batch_isend_irecv(ops) if ops else []:
            wait_for(work, timedelta(seconds=self.timeout_s))

    def _is_beside(self, sender: int, destination: int) -> bool:
        return sender == destination or destination in self.beside.get(sender, ())

    def _receives(self) -> bool:
        """Return True if this rank receives messages."""
        rank = self._shards.rank
        senders = {self._sender(section) for bucket in self._plans[rank] for section in bucket.sections}
        return any(not self._is_beside(sender, rank) for sender in senders)

    def _pinned_memory(self) -> torch.Tensor | None:
        """Make pinned memory for a bucket that goes to this rank's sink; `None` on CPUs, or if it stays on a device."""
        if self.on_device or not is_accelerator(self.device):
            return None
        sizes = [
            plan.max_bucket_bytes for rank, plan in self._plans.items() if self._is_beside(self._shards.rank, rank)
        ]
        size = max(sizes, default=0)
        return torch.empty(size, dtype=torch.uint8, pin_memory=size > 0)

    def _hand_over(self, destination: int, bucket: Bucket, pinned: torch.Tensor | None) -> None:
        """Pass this rank's segments of a bucket to its sink, if it is beside the destination."""
        if not self._is_beside(self._shards.rank, destination):
            return
        local_shards, plan = self._local_shards[destination], self._plans[destination]
        for section in bucket.sections:
            if self._sender(section) == self._shards.rank:
                for segment in section.segments:
                    values = local_shards.values(segment)
                    if pinned is not None and is_accelerator(values.device):
                        values = values.to(plan.tensors[segment.tensor].wire_dtype)
                        values = to_host(values, pinned[: values.nbytes].view(values.dtype))
                    self.sink(plan.tensors[segment.tensor].layout.fqn, segment.start, values)

    def _sender(self, section: Section) -> int:
        """Return the rank that sends a section: its first holder; rank 0 for replicated sections."""
        return 0 if section.shard_index == REPLICATED else self._shards.holders[section.shard_index][0]

    def _messages(
        self, destination: int, bucket: Bucket, buffer: torch.Tensor, staged: list[torch.Tensor]
    ) -> list[dist.P2POp]:
        """This rank's part in bringing a bucket to `destination`; pieces to send are appended to `staged`."""
        ops: list[dist.P2POp] = []
        rank, group = self._shards.rank, current_group()
        for section in bucket.sections:
            sender = self._sender(section)
            if self._is_beside(sender, destination):
                continue
            if rank == sender:
                pieces = self._pieces(destination, section)
                # Until the round's wait: then the current stream is behind the messages, and may reuse the memory.
                staged += pieces
                ops += [dist.P2POp(dist.isend, piece, group=group, group_peer=destination) for piece in pieces]
                self.wire_bytes += section.num_bytes
            elif rank == destination:
                memory = buffer[section.offset :]
                ops += [
                    dist.P2POp(dist.irecv, memory[offset:][:length], group=group, group_peer=sender)
                    for offset, length, _ in section.messages
                ]
        return ops

    def _pieces(self, destination: int, section: Section) -> list[torch.Tensor]:
        """A section's messages as uint8 on the message device: the packed part, then each large segment."""
        local_shards, planned = self._local_shards[destination], self._plans[destination].tensors

        def wire_bytes(segment: Segment) -> torch.Tensor:
            return as_bytes(local_shards.values(segment).to(planned[segment.tensor].wire_dtype))

        pieces = []
        for _, length, segment in section.messages:
            if segment is not None:
                pieces.append(wire_bytes(segment).to(self.device))
                continue
            packed = torch.empty(length, dtype=torch.uint8, device=self.device)
            for small in section.packed:
                packed[small.offset : small.offset + small.num_bytes].copy_(wire_bytes(small))
            pieces.append(packed)
        return pieces

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, pinned: torch.Tensor | None) -> None:
        received = buffer[: bucket.num_bytes]  # empty, where nothing is received
        host = received if self.on_device else to_host(received, None if pinned is None else pinned[: len(received)])
        plan = self._plans[self._shards.rank]
        for section in bucket.sections:
            if self._is_beside(self._sender(section), self._shards.rank):
                continue
            for segment in section.segments:
                start = section.offset + segment.offset
                planned = plan.tensors[segment.tensor]
                values = host[start : start + segment.num_bytes].view(planned.wire_dtype)
                self.sink(planned.layout.fqn, segment.start, values)


def gather_state_dict(
    module: nn.Module,
    keys: Sequence[str] | None = None,
    *,
    bucket_bytes: int = GATHER_BUCKET_BYTES,
    timeout_s: float = 120.0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Bring full tensors to rank 0, some at a time; collective: every rank iterates to the end.

    Args:
        module: A sharded module (or one that is not).
        keys: FQNs, tied aliases allowed; `None` for all parameters and persistent buffers.
        bucket_bytes: A part holds this many bytes, or one tensor that is larger.
        timeout_s: Longest wait for one round of messages.

    Returns:
        An iterator. On rank 0, FQN → full CPU tensor in the module's dtype, tied aliases beside their canonical name
        (one tensor object); on other ranks as many empty dicts. Each shard travels to rank 0 once.

    Raises:
        ValueError: On every rank, if a key is not in the module.
    """
    reshard(module)
    tensors = saved_tensors(module)
    aliases = tied_names(module)
    wanted = list(dict.fromkeys(keys)) if keys is not None else [*tensors, *aliases]
    unknown = [key for key in wanted if aliases.get(key, key) not in tensors]
    if unknown:
        raise ValueError(f"keys {unknown} are not in the module: it has {len(tensors)}, such as {list(tensors)[:3]}")
    names_of: dict[str, list[str]] = {}
    for key in wanted:
        names_of.setdefault(aliases.get(key, key), []).append(key)
    device, group = message_device(module), group_of(module)

    def gathered(part: Sequence[str]) -> dict[str, torch.Tensor]:
        wanted_now = {name: tensors[name] for name in part}
        with using_group(group):
            full = gather_tensors(wanted_now, (0,), device, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        return {key: full[name] for name in part for key in names_of[name]} if full else {}

    parts = split_by_bytes(names_of, lambda name: tensors[name].numel() * tensors[name].itemsize, bucket_bytes)
    return map(gathered, parts)


@over_ranks_of("tensors")
def gather_tensors(
    tensors: Mapping[str, torch.Tensor],
    ranks: Sequence[int],
    device: torch.device,
    *,
    bucket_bytes: int = GATHER_BUCKET_BYTES,
    timeout_s: float = 120.0,
) -> dict[str, torch.Tensor]:
    """Gather full tensors on some ranks; collective.

    Args:
        tensors: Name → DTensor, or a replicated tensor (rank 0's is used); the same names, layouts and order on every
            rank.
        ranks: Ranks that get the tensors.
        device: Device of the messages, as `message_device` returns it.
        bucket_bytes: Bytes in flight in one round, over all ranks.
        timeout_s: Longest wait for one round of messages, in seconds.

    Returns:
        Name → full CPU tensor on `ranks`, an empty dict elsewhere. Each shard is sent once to each of `ranks`.
    """
    full: dict[str, torch.Tensor] = {}
    if dist.get_rank(current_group()) in ranks:
        full = full_memory(tensors, on_cpu=True)
    gather_into(full, tensors, ranks, device, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return full


def full_memory(tensors: Mapping[str, torch.Tensor], *, on_cpu: bool) -> dict[str, torch.Tensor]:
    """Return name → memory of the full tensor: host memory, or memory of the device of its shards. Not collective."""
    devices = {name: torch.device("cpu") if on_cpu else local_tensor(one).device for name, one in tensors.items()}
    return {name: torch.empty(one.shape, dtype=one.dtype, device=devices[name]) for name, one in tensors.items()}


@over_ranks_of("tensors")
def gather_into(
    full: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    ranks: Sequence[int],
    device: torch.device,
    *,
    bucket_bytes: int = GATHER_BUCKET_BYTES,
    timeout_s: float = 120.0,
) -> int:
    """Gather as `gather_tensors`, into existing memory; collective.

    Args:
        full: Name → contiguous memory of the full tensor, on any device; empty on a rank that is not in `ranks`.
        tensors: Name → DTensor, or a replicated tensor (rank 0's is used); the same names, layouts and order on every
            rank.
        ranks: Ranks that get the tensors.
        device: Device of the messages.
        bucket_bytes: Bytes in flight in one round, over all ranks.
        timeout_s: Longest wait for one round of messages, in seconds.

    Returns:
        Number of messages that this rank sent or received.
    """

    def sink(name: str, first: int, values: torch.Tensor) -> None:
        full[name].view(-1)[first : first + values.numel()].copy_(values)

    num_messages = 0
    for part in by_mesh(tensors):
        gather = Gather(part, {rank: list(part) for rank in ranks}, sink, device, timeout_s, bucket_bytes)
        gather.run()
        num_messages += gather.num_messages
    return num_messages
