"""Optimizers of weights in a low precision: torch updates them in it, and what is too small is lost."""

from __future__ import annotations

import re

import torch
from torch import nn

from raysharding.distributed.optim import make_optimizer, precision_warning


def num_moved(dtype: torch.dtype) -> int:
    """Return how many of 1,088 elements 50 steps of AdamW at a small learning rate move."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    optimizer = make_optimizer(module, torch.optim.AdamW, {"lr": 1e-6})
    before = [one.detach().clone() for one in module.parameters()]
    for _ in range(50):
        optimizer.zero_grad()
        module(torch.rand(8, 32, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    return sum(int((one != old).sum()) for one, old in zip(module.parameters(), before, strict=True))


def test_small_updates_are_lost_in_bfloat16_and_said_to_be() -> None:
    assert num_moved(torch.bfloat16) < 100
    assert num_moved(torch.float32) > 1000
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    module[1].float()
    said = r"2 of 4 trained parameters are stored in torch.bfloat16.*float32.* for 80 B more over all ranks"
    assert re.match(said, precision_warning(module) or "")


def test_frozen_weights_in_bfloat16_are_fine() -> None:
    module = nn.Sequential(nn.Linear(7, 6).to(torch.bfloat16).requires_grad_(False), nn.Linear(6, 3))
    assert precision_warning(module) is None
