"""The order of FSDP groups: ranks that run the same ones pass, ranks that do not all raise, with the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from raysharding.config import Sharding
from raysharding.distributed.comm import init_mesh, rank_name
from raysharding.distributed.fully_shard.execution_order import check_execution_order
from raysharding.distributed.fully_shard.internals import reset_iteration
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.spawn import device_type


class Experts(nn.Module):
    """Each row goes to the expert that the sign of its first element picks."""

    recompute = False
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0).long() == index).nonzero()[:, 0]
            if len(rows):
                out[rows] = checkpoint(expert, x[rows], use_reentrant=False) if self.recompute else expert(x[rows])
        if self.fails:
            raise ValueError("after the experts")
        result: torch.Tensor = self.head(out)
        return result


def recorded(wrap: str) -> Any:
    """`Experts`, cut over all ranks."""
    torch.manual_seed(0)
    sharding = Sharding(wrap=wrap)
    return shard_module(Experts(), init_mesh(device_type(), sharding), sharding)


@on_ranks(3)
def test_ranks_that_ran_other_groups_all_raise() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = recorded("auto")
    rows = torch.ones(2, 8) * (1 if rank == 0 else -1)
    with torch.no_grad():
        mixed = module(rows)
    with pytest.raises(PlanError, match=r"experts\.[01].*experts\.[01].*wrap='none'") as caught:
        check_execution_order(module)
    own, other = (1, 0) if rank == 0 else (0, 1)
    here, there = rank_name(rank), rank_name(int(rank == 0))
    assert f"rank {here} (this one) ran experts.{own} and rank {there} ran experts.{other}" in str(caught.value)
    torch.manual_seed(0)
    assert not torch.allclose(mixed, Experts()(rows)), "this is what the check is for"

    # Later forwards are judged by themselves, and one that was mixed before the last is found, too.
    same = torch.ones(2, 8) * torch.tensor([[1.0], [-1.0]])
    module(same).sum().backward()
    check_execution_order(module)
    with torch.no_grad():
        module(rows)
        module(same)
    with pytest.raises(PlanError, match="before the last"):
        check_execution_order(module)
    assert world_size == 3


@on_ranks(3)
def test_equal_orders_pass() -> None:
    module = recorded("auto")
    same = torch.ones(2, 8) * torch.tensor([[1.0], [-1.0]])
    # Forwards that activation checkpointing runs again inside backward do not count.
    module.recompute = dist.get_rank() == 0
    for _ in range(2):
        output = module(same)
        check_execution_order(module)
        output.sum().backward()
    # What an exception cut short says nothing about the next forward.
    module.fails = True
    with torch.no_grad(), pytest.raises(ValueError, match="after the experts"):
        module(same[dist.get_rank() % 2 :][:1])
    module.reshard()
    reset_iteration(module)
    module.fails = False
    module(same)
    check_execution_order(module)


@on_ranks(3)
def test_a_module_without_groups_is_not_checked() -> None:
    module = recorded("none")
    module(torch.ones(2, 8) * (1 if dist.get_rank() == 0 else -1))
    check_execution_order(module)
    check_execution_order(nn.Linear(2, 2))
