"""A forward over items of several rows: the model sees whole items, also where the rows of its outputs are found."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import Split, deal
from raysharding.distributed.training.forward import Forwarding
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair, each


class Pairs(nn.Module):
    """Has outputs of rows and of rows by rows, and takes no half pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x.unflatten(0, (-1, 2))).flatten(0, 1)
        return {"scores": scores, "alike": scores @ scores.T}


def forward_pairs(num_rows: int) -> None:
    share = num_rows // 2
    pair = Pair(lambda: Pairs(share), "sgd")
    x = torch.arange(3.0 * num_rows).reshape(num_rows, 3) / 10
    batch = deal((Split(x, rows_per_item=2),), {}, 2)[dist.get_rank()]
    output = Forwarding(pair.module).run(batch)
    assert output.local == ("['alike']",), "both are as large in the second dim as the rank has rows"
    own = x[share * dist.get_rank() :][:share]
    assert torch.allclose(output.value["scores"], pair.twin(own)["scores"])


@on_ranks(2)
def test_rows_are_found_by_whole_items() -> None:
    """With one pair on each rank, another forward has two; with two pairs, one."""
    each(forward_pairs, [(4,), (8,)])
