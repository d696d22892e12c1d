"""`connect_links`: shared memory between ranks of one host, messages between all others."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from raysharding.distributed.comm import SpanningGroup
from raysharding.distributed.transfer import counters_in, map_shared, offer_shared, reserve_shared
from raysharding.distributed.weights.copy_plan import CopyPlan, Pair
from raysharding.distributed.weights.links import NUM_COUNTERS, NUM_SLOTS, Link, MessageLink, SharedLink


def connect_links(
    span: SpanningGroup,
    plan: CopyPlan,
    hosts: tuple[Sequence[object], Sequence[object]],
    device: torch.device | None,
) -> dict[Pair, Link]:
    """Make a link for each pair of this rank; collective over the spanning group.

    Args:
        span: The spanning group.
        plan: The plan.
        hosts: See `plan_copy`.
        device: Device that sends and receives by itself; `None` for host memory.

    Returns:
        Pair → link. Memory: two slots a pair, on the source for shared memory; at most two buckets a rank.
    """
    num_sources = span.sizes[0]
    is_source = span.rank < num_sources
    near = [pair for pair in plan.buckets if device is None and hosts[0][pair[0]] == hosts[1][pair[1]]]
    # Each pair has memory of its own: two slots, then the counters.
    own = {pair: reserve_shared(NUM_SLOTS * plan.slot_bytes(pair), NUM_COUNTERS) for pair in near if is_source}
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
            counters = counters_in(memory, NUM_SLOTS * slot, NUM_COUNTERS)
            links[pair] = SharedLink(slots.unbind(), counters, (peer, every[peer]["pid"]), span)
        else:
            slots = torch.empty(NUM_SLOTS, slot, dtype=torch.uint8, device=device or "cpu")
            links[pair] = MessageLink(slots.unbind(), peer, span)
    return links
