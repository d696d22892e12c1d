"""JSON between ranks, of any length, and of different lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from raysharding.distributed.comm.json_collectives import (
    all_gather_ints,
    all_gather_json,
    broadcast_json,
)
from tests.spawn import run_ranks

LENGTHS = (0, 1, 4096, 70_000)


def exchange() -> list[Any]:
    """On every rank: what does not come back as it was sent."""
    rank = dist.get_rank()
    wrong = []
    for length in LENGTHS:
        # Of one length, and of different ones.
        for mine in ("é" * (length // 2), "x" * (length if rank == 1 else 3)):
            every = all_gather_json([rank, mine])
            if every[rank] != [rank, mine] or [value[0] for value in every] != list(range(dist.get_world_size())):
                wrong.append(("all_gather", length))
        if broadcast_json({"text": "x" * length} if rank == 0 else "ignored") != {"text": "x" * length}:
            wrong.append(("broadcast", length))
    largest = (1 << 63) - 1
    if all_gather_ints([rank, -largest, largest]) != [[one, -largest, largest] for one in range(dist.get_world_size())]:
        wrong.append(("all_gather_ints", 3))
    return wrong


@pytest.mark.timeout(60)
def test_values_of_every_length_arrive() -> None:
    assert run_ranks(3, exchange, timeout_s=50) == [[], [], []]
