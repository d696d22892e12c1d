"""`connect_links`: shared memory between ranks of one host, messages between all others."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from raysharding.distributed.comm import SpanningGroup
from raysharding.distributed.transfer import counters_in, map_shared, offer_shared, reserve_shared
from raysharding.distributed.weights.copy_plan import CopyPlan, Pair
from raysharding.distributed.weights.links import NUM_COUNTERS, NUM_SLOTS, Link, MessageLink, SharedLink

_ALIGNMENT = 64
"""A slot begins at a multiple of this: any dtype can be viewed there."""


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
    areas = _areas(plan, near) if is_source else {}
    data_bytes = sum(NUM_SLOTS * slot for _, slot in areas.values())
    descriptor, memory = reserve_shared(data_bytes, NUM_COUNTERS * len(near)) if areas else (None, None)
    mapped: dict[int, mmap.mmap] = {}
    try:
        offer = None
        if memory is not None:
            ends = {pair[1]: area for pair, area in areas.items()}
            offer = offer_shared(descriptor, memory) | {"areas": ends, "data_bytes": data_bytes}
        offers = span.exchange(offer)
        for source, _ in near if not is_source else ():
            found = None if offers[source] is None else map_shared(offers[source])
            if found is not None:
                mapped[source] = found
        # A rank says what it has mapped, and its pid: both ends of a pair must choose the same link.
        every = span.exchange({"mapped": sorted(mapped), "pid": os.getpid()})
    finally:
        if descriptor is not None:
            os.close(descriptor)
    links: dict[Pair, Link] = {}
    for pair in plan.buckets:
        source, target = pair[0], num_sources + pair[1]
        peer = target if is_source else source
        if source in every[target]["mapped"]:
            whole = memory if is_source else mapped[source]
            assert whole is not None, "it was offered, and mapped"
            links[pair] = _shared_link(whole, offers[source], pair, (peer, every[peer]["pid"]), span)
        else:
            slot = plan.slot_bytes(pair)
            slots = torch.empty(NUM_SLOTS, slot, dtype=torch.uint8, device=device or "cpu").unbind()
            links[pair] = MessageLink(slots, peer, span)
    return links


def _areas(plan: CopyPlan, pairs: Sequence[Pair]) -> dict[Pair, tuple[int, int]]:
    """Return pair → (first byte of its slots, size of a slot)."""
    areas: dict[Pair, tuple[int, int]] = {}
    first = 0
    for pair in pairs:
        slot = -(-plan.slot_bytes(pair) // _ALIGNMENT) * _ALIGNMENT
        areas[pair] = first, slot
        first += NUM_SLOTS * slot
    return areas


def _shared_link(
    memory: mmap.mmap, offer: dict[str, Any], pair: Pair, peer: tuple[int, int], span: SpanningGroup
) -> SharedLink:
    areas = {int(target): area for target, area in offer["areas"].items()}  # JSON has made text of the keys
    first, slot = areas[pair[1]]
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=NUM_SLOTS * slot)
    number = NUM_COUNTERS * list(areas).index(pair[1])
    counters = counters_in(memory, offer["data_bytes"], NUM_COUNTERS, number)
    return SharedLink(whole.view(NUM_SLOTS, slot).unbind(), counters, peer, span)
