"""Links: how the buckets of one pair of ranks travel, through memory of one host or in messages.

Both have two slots: while the target empties one, the source fills the other. The source calls `wait_free`, fills the
slot and calls `post`; the target calls `expect` ahead, then `take`, empties the slot and calls `release`; each for
bucket 0, 1, 2, ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from raysharding.distributed.comm import PeerLostError, SpanningGroup
from raysharding.distributed.transfer import Counters, counters_in, map_shared, offer_shared, reserve_shared
from raysharding.distributed.weights.copy_plan import CopyPlan, Pair

NUM_SLOTS = 2
_FILLED, _EMPTIED = 0, 1
_NUM_COUNTERS = 2
"""Counters of a `SharedLink`: buckets that the source has filled, and those that the target has emptied."""


class SharedLink:
    """Link in shared memory of one host.

    Args:
        slots: uint8 [slot bytes] each, which both ends map.
        counters: The two counters of this pair.
        peer: (rank in the spanning group, pid) of the other end.
        span: The spanning group, for its deadline.
    """

    is_shared = True
    """True if the bytes pass through shared memory."""

    def __init__(
        self, slots: tuple[torch.Tensor, ...], counters: Counters, peer: tuple[int, int], span: SpanningGroup
    ) -> None:
        self.num_bytes = 0
        """Bytes that this end has received in this copy."""
        self._slots = slots
        self._counters = counters
        self._peer, self._pid = peer
        self._span = span
        self._next = self._first = 0

    def begin(self) -> None:
        """Begin a copy, whose buckets are numbered from 0. The counters go on from one copy to the next."""
        self._first, self.num_bytes = self._next, 0

    def wait_free(self, index: int) -> torch.Tensor:
        """Wait until the slot of a bucket is free; return it. On the source."""
        self._next = self._first + index + 1
        self._wait(_EMPTIED, self._next - NUM_SLOTS)
        return self._slots[index % NUM_SLOTS]

    def post(self, index: int, num_bytes: int) -> None:
        """Send the slot of a bucket, which is filled. On the source."""
        self._counters.post(_FILLED, self._first + index + 1)

    def expect(self, index: int, num_bytes: int) -> None:
        """Let a bucket come into its slot, which is free. On the target. Nothing here: the source sees free slots."""

    def take(self, index: int, num_bytes: int) -> torch.Tensor:
        """Wait for a bucket; return its slot. On the target."""
        self._next = self._first + index + 1
        self._wait(_FILLED, self._next)
        self.num_bytes += num_bytes
        return self._slots[index % NUM_SLOTS]

    def release(self, index: int) -> None:
        """Give the slot of a bucket back. On the target."""
        self._counters.post(_EMPTIED, self._first + index + 1)

    def end(self, num_buckets: int) -> None:
        """Wait until the target has received everything. On the source."""
        self._wait(_EMPTIED, self._first + num_buckets)

    def stop(self) -> None:
        """Make both ends fail that wait, or will. From any thread."""
        self._counters.stop()

    def _wait(self, counter: int, value: int) -> None:
        try:
            self._counters.wait(counter, value, self._span.left_s, self._pid)
        except RuntimeError as error:
            raise PeerLostError(f"{self._span.name_of(self._peer)}: {error}") from error


class MessageLink:
    """Link by messages of the spanning group, with the methods of a `SharedLink`.

    Args:
        slots: uint8 [slot bytes] each, on the CPU, or on the accelerator if the group sends from there.
        peer: Rank of the other end in the spanning group.
        span: The spanning group.
    """

    is_shared = False

    def __init__(self, slots: tuple[torch.Tensor, ...], peer: int, span: SpanningGroup) -> None:
        self.num_bytes = 0
        self._slots = slots
        self._peer = peer
        self._span = span
        self._works: list[dist.Work | None] = [None] * NUM_SLOTS

    def begin(self) -> None:
        """Begin a copy."""
        self._works, self.num_bytes = [None] * NUM_SLOTS, 0

    def wait_free(self, index: int) -> torch.Tensor:
        """Wait until the last message from the slot of a bucket has left; return the slot."""
        work, self._works[index % NUM_SLOTS] = self._works[index % NUM_SLOTS], None
        if work is not None:
            try:
                self._span.wait(work)
            except PeerLostError as error:
                raise PeerLostError(f"{self._span.name_of(self._peer)} {error}") from error
        return self._slots[index % NUM_SLOTS]

    def post(self, index: int, num_bytes: int) -> None:
        """Send the slot of a bucket."""
        self._works[index % NUM_SLOTS] = self._span.send(self._slots[index % NUM_SLOTS][:num_bytes], self._peer)

    def expect(self, index: int, num_bytes: int) -> None:
        """Let a bucket come into its slot."""
        self._works[index % NUM_SLOTS] = self._span.receive(self._slots[index % NUM_SLOTS][:num_bytes], self._peer)

    def take(self, index: int, num_bytes: int) -> torch.Tensor:
        """Wait for a bucket; return its slot."""
        self.num_bytes += num_bytes
        return self.wait_free(index)

    def release(self, index: int) -> None:
        """Do nothing: `expect` comes next for this slot."""

    def end(self, num_buckets: int) -> None:
        """Wait until all messages have left."""
        for index in range(NUM_SLOTS):
            self.wait_free(index)

    def stop(self) -> None:
        """Do nothing: the spanning group ends the waits for messages."""


Link = SharedLink | MessageLink
"""One end of a link."""


def connect_links(
    span: SpanningGroup, plan: CopyPlan, hosts: tuple[Sequence[object], Sequence[object]], device: torch.device | None
) -> dict[Pair, Link]:
    """Make a link for each pair of this rank; collective over the spanning group.

    Args:
        span: The spanning group.
        plan: The plan.
        hosts: Identities of the hosts of the source's and the target's ranks, by rank.
        device: Device that sends and receives by itself; `None` for host memory.

    Returns:
        Pair → link. Memory: two slots a pair, on the source for shared memory; at most two buckets a rank.
    """
    num_sources = span.sizes[0]
    is_source = span.rank < num_sources
    near = [pair for pair in plan.buckets if device is None and hosts[0][pair[0]] == hosts[1][pair[1]]]
    # Each pair has memory of its own: two slots, then the counters.
    own = {pair: reserve_shared(NUM_SLOTS * plan.slot_bytes(pair), _NUM_COUNTERS) for pair in near if is_source}
    held = {pair: reserved for pair, reserved in own.items() if reserved is not None}
    mapped = {pair: memory for pair, (_, memory) in held.items()}
    try:
        offers = span.exchange({str(pair[1]): offer_shared(*reserved) for pair, reserved in held.items()})
        for pair in near if not is_source else ():
            offer = offers[pair[0]].get(str(pair[1]))  # JSON has made text of the keys
            found = None if offer is None else map_shared(offer)
            if found is not None:
                mapped[pair] = found
        # A rank says what it has mapped, and its pid: both ends of a pair must choose the same link.
        every = span.exchange({"mapped": [source for source, _ in mapped], "pid": os.getpid()})
    finally:
        for descriptor, _ in held.values():
            os.close(descriptor)
    links: dict[Pair, Link] = {}
    for pair in plan.buckets:
        source, target = pair[0], num_sources + pair[1]
        peer = target if is_source else source
        slot = plan.slot_bytes(pair)
        if source in every[target]["mapped"]:
            memory = mapped[pair]
            slots = torch.frombuffer(memory, dtype=torch.uint8, count=NUM_SLOTS * slot).view(NUM_SLOTS, slot)
            counters = counters_in(memory, NUM_SLOTS * slot, _NUM_COUNTERS)
            links[pair] = SharedLink(slots.unbind(), counters, (peer, every[peer]["pid"]), span)
        else:
            slots = torch.empty(NUM_SLOTS, slot, dtype=torch.uint8, device=device or "cpu")
            links[pair] = MessageLink(slots.unbind(), peer, span)
    return links
