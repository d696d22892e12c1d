"""The global gradient norm and the gradients of replicated parameters against plain torch on full gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.config import Sharding
from raysharding.distributed import clip_grad_norm_, init_mesh, reduce_replicated_gradients, shard_module
from tests.spawn import device_type, run_ranks


class Uneven(nn.Module):
    """Odd row counts, fewer rows than ranks (empty shards), and two 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(3, 7)
        self.few = nn.Parameter(torch.ones(1, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.wide = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.idle = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.odd(x).sum() + (self.few * x[0, 0]).sum()) * self.scale
        return out + self.wide.to(out) * x.square().sum()


def full_gradients(module: nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]


def run_norms(replicate_size: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharding = Sharding(replicate_size=replicate_size)
    for norm_type in (0.5, 1.0, 2.0, 3.0, math.inf):
        torch.manual_seed(0)
        module = shard_module(Uneven(), init_mesh(device_type(), sharding), sharding)
        rows = torch.rand(world_size, 3, generator=torch.Generator().manual_seed(1))
        module(rows[rank : rank + 1]).backward()
        before = full_gradients(module)
        expected = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in before]), norm_type)
        measured = clip_grad_norm_(module, None, norm_type)
        assert measured.dtype == torch.float32
        assert torch.allclose(measured.double(), expected, rtol=1e-6), (norm_type, measured, expected)
        bound = 0.25 * expected.item()
        assert torch.equal(clip_grad_norm_(module, math.inf, norm_type), measured)
        assert torch.equal(clip_grad_norm_(module, bound, norm_type), measured)
        for old, new in zip(before, full_gradients(module), strict=True):
            assert torch.allclose(new, (old * 0.25).to(new), rtol=1e-4)


def run_replicated() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = shard_module(Uneven(), init_mesh(device_type()))
    scale, wide, idle = (module.get_parameter(name) for name in ("scale", "wide", "idle"))
    if rank == 1:  # the others have no gradient: they count as zeros
        scale.grad = torch.tensor(6.0)
    wide.grad = torch.tensor(float(rank), dtype=torch.float64)
    reduce_replicated_gradients(module)
    assert scale.grad is not None
    assert scale.grad.item() == pytest.approx(6.0 / world_size)
    assert wide.grad is not None
    assert wide.grad.dtype == torch.float64
    assert wide.grad.item() == pytest.approx((world_size - 1) / 2)
    assert idle.grad is None, "a parameter without a gradient anywhere must stay without: weight decay would move it"


def run_nothing() -> None:
    """No gradient on any rank, then on one rank alone: a zero norm and no deadlock."""
    module = shard_module(Uneven(), init_mesh(device_type()))
    assert clip_grad_norm_(module, 1.0).item() == 0.0
    assert clip_grad_norm_(module, 1.0, math.inf).item() == 0.0
    if dist.get_rank() == 1:
        weight = module.get_parameter("few")
        weight.grad = torch.zeros_like(weight)
    assert clip_grad_norm_(module, 1.0).item() == 0.0
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_(module, bad)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            clip_grad_norm_(module, 1.0, bad)


def run_all() -> None:
    run_norms(1)
    run_norms(2)
    run_replicated()
    run_nothing()


@pytest.mark.timeout(100)
def test_gradient_norms() -> None:
    run_ranks(4, run_all, timeout_s=90)
