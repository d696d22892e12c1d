"""Transport of a bucket's sections from readers to shards: messages along routes, or one broadcast.

Note: one rule for every transport.
    Some ranks are *readers*. A section is read once, by a reader that holds its shard if there is one, else by the
    readers in turn, which so share the reading in disjoint stripes. It is forwarded along its *path*: reader, first
    holder, next replica. Every byte leaves the source once, and replicas are filled by their peers. With rank 0 as the
    only reader this is a scatter; if every rank is a reader, only replicas need messages.

    Ranks that map the reader's buffers (`shared_memory.py`) are *served* there. The others form a *chain* of messages.

Note: every rank does the same, bucket by bucket.
    `start` starts the first messages of a bucket, `arrive` waits for incoming messages and forwards them, `release`
    waits until the buffer is no longer in use. All ranks call them for the same buckets in the same order, so that
    every message has a counterpart. A reader that fails sends its buffer as it is, and the ranks agree to stop
    (`FailureFlag`): the others would wait for a rank that stopped early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from raysharding.distributed.comm import current_group, is_accelerator, wait_for
from raysharding.distributed.fully_shard import ShardMap
from raysharding.distributed.transfer.bucket_plan import REPLICATED, Bucket, BucketPlan, Section, Segment
from raysharding.distributed.transfer.buffers import RING_SIZE, LocalShards, SlotBytes
from raysharding.distributed.transfer.shared_memory import SharedRings


@dataclass(frozen=True)
class Routes:
    """Readers and paths of all sections."""

    shards: ShardMap
    """Which rank holds which shard."""
    readers: tuple[int, ...]
    """Ranks that read files; rank 0 is always one."""
    num_ranged: int
    """Buckets before this index are ranges of files; only rank 0 can make the later ones."""
    shared: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Reader → ranks that map its buffers."""

    _paths: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def path(self, index: int, shard_index: int) -> tuple[int, ...]:
        """Return the path of a shard's section of bucket `index`, with its reader first."""
        turn = index % len(self.readers) if index < self.num_ranged else -1
        path = self._paths.get((turn, shard_index))
        if path is None:
            path = self._paths[turn, shard_index] = self._find_path(turn, shard_index)
        return path

    def _find_path(self, turn: int, shard_index: int) -> tuple[int, ...]:
        shards = self.shards
        holders = tuple(range(shards.world_size)) if shard_index == REPLICATED else shards.holders[shard_index]
        # In turn, so that replicas that see the files share the reading, and use both directions of a link.
        readers = (0,) if turn < 0 else self.readers[turn:] + self.readers[:turn]
        reader = next((rank for rank in readers if rank in holders), readers[shard_index % len(readers)])
        return reader, *(rank for rank in holders if rank != reader)

    def served(self, index: int, shard_index: int) -> frozenset[int]:
        """Return the ranks that copy a section from the reader's buffer."""
        path = self.path(index, shard_index)
        return self.shared.get(path[0], frozenset()).intersection(path[1:])

    def chain(self, index: int, shard_index: int) -> tuple[int, ...]:
        """Return the path without served ranks: each rank sends the section to the next."""
        served = self.served(index, shard_index)
        return tuple(rank for rank in self.path(index, shard_index) if rank not in served)

    def travelling(self, index: int, bucket: Bucket, rank: int) -> list[Section]:
        """Return the sections of a bucket that `rank` reads for others, or receives."""
        return [section for section in bucket.sections if self._concerns(index, section, rank, alone=False)]

    def alone(self, index: int, bucket: Bucket, rank: int) -> list[Section]:
        """Return the sections of a bucket that `rank` reads and no other rank needs."""
        return [section for section in bucket.sections if self._concerns(index, section, rank, alone=True)]

    def _concerns(self, index: int, section: Section, rank: int, alone: bool) -> bool:
        path = self.path(index, section.shard_index)
        return rank in path and (len(path) == 1) == alone

    def offsets(self, index: int, bucket: Bucket, rank: int) -> dict[int, int]:
        """Return shard index → first byte in `rank`'s buffer of its sections: shared ones first, then its own.

        Ranks that map a reader's buffer also use this to find their sections.
        """
        offsets: dict[int, int] = {}
        position = 0
        for section in [*self.travelling(index, bucket, rank), *self.alone(index, bucket, rank)]:
            offsets[section.shard_index] = position
            position += section.num_bytes
        return offsets

    def slot_bytes(self, plan: BucketPlan, rank: int, local_shards: LocalShards) -> SlotBytes:
        """Return the largest bytes of a bucket in `rank`'s buffer, which holds `local_shards`."""
        host = wire = 0
        for index, bucket in enumerate(plan):
            offsets = self.offsets(index, bucket, rank)
            for section in self.travelling(index, bucket, rank):
                end = offsets[section.shard_index] + section.num_bytes
                wire = max(wire, end)
                if self.path(index, section.shard_index)[0] == rank:
                    host = max(host, end)
            for section in self.alone(index, bucket, rank):
                end = offsets[section.shard_index] + section.num_bytes
                if not all(local_shards.takes_wire_bytes(segment.tensor, "cpu") for segment in section.segments):
                    host = max(host, end)
                if any(local_shards.converts_on_device(segment.tensor) for segment in section.segments):
                    wire = max(wire, end)
        return SlotBytes(host, wire)

    def any_travels(self, plan: BucketPlan, reader: int | None = None) -> bool:
        """Return True if a rank needs a section that another rank, or `reader`, reads."""
        paths = (self.path(index, part.shard_index) for index, bucket in enumerate(plan) for part in bucket.sections)
        return any(len(path) > 1 and reader in (None, path[0]) for path in paths)


def connect_ranks(flag: torch.Tensor) -> None:
    """Let all ranks take part in one operation, before messages between some of them; collective on accelerators.

    NCCL connects the ranks of a group in its first operation, unless the group is bound to a device. If that is a batch
    of messages in which some ranks have no part, the result is undefined, says torch's page on `batch_isend_irecv`.

    Args:
        flag: One element on the device of the messages; all ranks have it, or the others would wait for one.
    """
    if is_accelerator(flag.device):
        dist.all_reduce(flag, group=current_group())


SegmentMemory = Callable[[Segment], torch.Tensor | None]
"""Returns the uint8 memory that a large segment is received into, or `None` if it must be staged."""


@dataclass
class BucketTransfer:
    """Transfer of one bucket on this rank."""

    index: int
    """The bucket's index in the plan."""
    bucket: Bucket
    """The bucket."""
    buffer: torch.Tensor
    """uint8 buffer of this rank, for sections that it reads for others or receives."""
    incoming: list[dist.Work] = field(default_factory=list)
    """Messages to this rank."""
    outgoing: list[dist.Work] = field(default_factory=list)
    """Messages from `buffer` and from shards."""
    in_place: set[Segment] = field(default_factory=set)
    """Segments that were received directly into the shard."""


class Scatter:
    """Point-to-point messages along the routes: each rank receives only the sections that it needs.

    Wire: each section once to each holder except its reader. Ranks that map the reader's ring read sections there;
    counters in shared memory signal that a bucket is filled, and that it was read.
    """

    def __init__(self, routes: Routes, rings: SharedRings, memory_of: SegmentMemory, timeout_s: float) -> None:
        self.routes = routes
        self._memory_of = memory_of
        self._rank = routes.shards.rank
        self._rings = rings
        self._timeout_s = timeout_s
        self.wire_bytes = 0
        self.shared_bytes = 0

    def offsets(self, index: int, bucket: Bucket) -> dict[int, int]:
        """Return shard index → first byte of the section in this rank's buffer."""
        return self.routes.offsets(index, bucket, self._rank)

    def reads(self, index: int, bucket: Bucket) -> list[Section]:
        """Return the sections that this rank reads."""
        return [item for item in bucket.sections if self.routes.path(index, item.shard_index)[0] == self._rank]

    def is_alone(self, index: int, section: Section) -> bool:
        """Return True if only its reader needs a section."""
        return len(self.routes.path(index, section.shard_index)) == 1

    def start(self, transfer: BucketTransfer) -> None:
        """Start the messages of a bucket's readers to the next ranks."""
        self._start_hop(transfer, 0)
        if self._served_by_me(transfer):
            self._rings.rings[self._rank].counters.post(0, transfer.index + 1)

    def arrive(self, transfer: BucketTransfer) -> None:
        """Wait for this rank's sections and forward them to the next ranks."""
        self._wait(transfer.incoming)
        for reader in self._serve_me(transfer):
            ring = self._rings.rings[reader]
            ring.counters.wait(0, transfer.index + 1, self._timeout_s, ring.reader_pid)
        longest = max(len(self._chain(transfer, section)) for section in transfer.bucket.sections)
        for hop in range(1, longest - 1):
            transfer.incoming = []
            self._start_hop(transfer, hop)
            self._wait(transfer.incoming)

    def received(self, transfer: BucketTransfer) -> Iterator[tuple[Section, torch.Tensor]]:
        """Yield the sections that this rank received, with their uint8 memory, after `arrive`."""
        bucket, index = transfer.bucket, transfer.index
        held = (self.routes.shards.shard_index, REPLICATED)
        own = self.routes.offsets(index, bucket, self._rank)
        theirs: dict[int, dict[int, int]] = {}
        for section in self.routes.travelling(index, bucket, self._rank):
            if section.shard_index not in held:
                continue  # read for others
            memory, offset = transfer.buffer, own[section.shard_index]
            if self._rank in self.routes.served(index, section.shard_index):
                reader = self.routes.path(index, section.shard_index)[0]
                if reader not in theirs:
                    theirs[reader] = self.routes.offsets(index, bucket, reader)
                memory = self._rings.rings[reader].slots[index % RING_SIZE]
                offset = theirs[reader][section.shard_index]
                self.shared_bytes += section.num_bytes
            yield section, memory[offset : offset + section.num_bytes]

    def release(self, transfer: BucketTransfer) -> None:
        """Signal readers that this rank has read their rings, and wait until its buffer is no longer in use."""
        for reader in self._serve_me(transfer):
            self._rings.rings[reader].counters.post(1 + self._rank, transfer.index + 1)
        self._wait(transfer.outgoing)
        for peer in self._served_by_me(transfer):
            counters = self._rings.rings[self._rank].counters
            counters.wait(1 + peer, transfer.index + 1, self._timeout_s, self._rings.pids[peer])

    def _chain(self, transfer: BucketTransfer, section: Section) -> tuple[int, ...]:
        return self.routes.chain(transfer.index, section.shard_index)

    def _served_by_me(self, transfer: BucketTransfer) -> list[int]:
        """Return the ranks that read a section of this bucket from this rank's ring."""
        reads = self.reads(transfer.index, transfer.bucket)
        return sorted({peer for item in reads for peer in self.routes.served(transfer.index, item.shard_index)})

    def _serve_me(self, transfer: BucketTransfer) -> list[int]:
        """Return the ranks whose rings this rank reads a section of this bucket from."""
        index = transfer.index
        mine = [item.shard_index for item in self.routes.travelling(index, transfer.bucket, self._rank)]
        return sorted({self.routes.path(index, i)[0] for i in mine if self._rank in self.routes.served(index, i)})

    def _start_hop(self, transfer: BucketTransfer, hop: int) -> None:
        """Start the messages from rank number `hop` of each chain to the next rank."""
        sends, receives = [], []
        offsets = self.offsets(transfer.index, transfer.bucket)
        for section in self.routes.travelling(transfer.index, transfer.bucket, self._rank):
            chain = self._chain(transfer, section)
            if len(chain) <= hop + 1 or self._rank not in chain[hop : hop + 2]:
                continue
            sends_it = chain[hop] == self._rank
            peer = chain[hop + 1] if sends_it else chain[hop]
            memory = transfer.buffer[offsets[section.shard_index] :]
            for offset, length, segment in section.messages:
                piece = memory[offset : offset + length]
                if segment is not None and (not sends_it or segment in transfer.in_place):
                    direct = self._memory_of(segment)
                    if direct is not None:
                        piece = direct
                        transfer.in_place.add(segment)
                if sends_it:
                    sends.append(dist.P2POp(dist.isend, piece, group=current_group(), group_peer=peer))
                    self.wire_bytes += length
                else:
                    receives.append(dist.P2POp(dist.irecv, piece, group=current_group(), group_peer=peer))
        # One batch per hop: on NCCL, messages with several peers outside of a batch would wait for each other.
        works: list[dist.Work] = dist.batch_isend_irecv(receives + sends) if receives or sends else []
        if len(works) == len(receives) + len(sends):
            transfer.incoming += works[: len(receives)]
            transfer.outgoing += works[len(receives) :]
        else:  # NCCL returns one handle for all
            transfer.incoming += works

    def _wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for messages, with a timeout, so that a stopped peer does not block this rank forever."""
        for work in works:
            wait_for(work, timedelta(seconds=self._timeout_s))


class Broadcast:
    """One broadcast per bucket: every rank receives all sections and keeps its own.

    Wire: W − 1 times the checkpoint on gloo (its broadcast sends to each rank). Same calls as `Scatter`.
    """

    def __init__(self, routes: Routes, timeout_s: float) -> None:
        self.routes = routes
        self._timeout = timedelta(seconds=timeout_s)
        self.wire_bytes = 0
        self.shared_bytes = 0

    def offsets(self, index: int, bucket: Bucket) -> dict[int, int]:
        """As `Scatter.offsets`: the offsets in the bucket, which is sent as a whole."""
        return {section.shard_index: section.offset for section in bucket.sections}

    def reads(self, index: int, bucket: Bucket) -> list[Section]:
        """As `Scatter.reads`: all sections on the bucket's reader."""
        return list(bucket.sections) if self._reader(index) == self.routes.shards.rank else []

    def is_alone(self, index: int, section: Section) -> bool:
        """As `Scatter.is_alone`: never, every section passes through the buffer."""
        return False

    def start(self, transfer: BucketTransfer) -> None:
        """Start a bucket's broadcast."""
        whole = transfer.buffer[: transfer.bucket.num_bytes]
        reader = self._reader(transfer.index)
        if reader == self.routes.shards.rank:
            self.wire_bytes += whole.numel() * (self.routes.shards.world_size - 1)
        # Every rank calls this for every bucket, after a failed read too: the others would wait in the broadcast.
        work = dist.broadcast(whole, group=current_group(), group_src=reader, async_op=True)
        transfer.incoming += [work] if work is not None else []

    def arrive(self, transfer: BucketTransfer) -> None:
        """Wait for the broadcast, with a timeout, so that a stopped peer does not block this rank forever."""
        for work in transfer.incoming:
            wait_for(work, self._timeout)

    def received(self, transfer: BucketTransfer) -> Iterator[tuple[Section, torch.Tensor]]:
        """As `Scatter.received`."""
        held = (self.routes.shards.shard_index, REPLICATED)
        for section in transfer.bucket.sections:
            if section.shard_index in held:
                yield section, transfer.buffer[section.offset :][: section.num_bytes]

    def release(self, transfer: BucketTransfer) -> None:
        """Do nothing: `arrive` has waited."""

    def _reader(self, index: int) -> int:
        readers = self.routes.readers if index < self.routes.num_ranged else (0,)
        return readers[index % len(readers)]


BucketTransport = Scatter | Broadcast
