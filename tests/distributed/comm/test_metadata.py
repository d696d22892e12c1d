"""JSON between ranks, of any length, and of different lengths."""

from __future__ import annotations

import torch.distributed as dist

from raysharding.distributed.comm import all_gather_ints, all_gather_json, broadcast_json
from tests.distributed.checks import on_ranks

LENGTHS = (0, 1, 4096, 70_000)


@on_ranks(3)
def test_values_of_every_length_arrive() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for length in LENGTHS:
        for others in (length, 3):  # of one length, and of different ones
            expected = [[one, "é" * (length if one == 1 else others)] for one in range(world_size)]
            assert all_gather_json(expected[rank]) == expected
        assert broadcast_json({"text": "x" * length} if rank == 0 else "ignored") == {"text": "x" * length}
    largest = (1 << 63) - 1
    assert all_gather_ints([rank, -largest, largest]) == [[one, -largest, largest] for one in range(world_size)]
