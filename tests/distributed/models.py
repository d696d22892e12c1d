"""A plain module with every kind of tensor that a load must get right."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed import gather_state_dict

TIED = ("head.weight", "twin")
"""Second names."""


class Odd(nn.Module):
    """Odd row counts, fewer rows than ranks, 0-dim parameters, ties, and buffers of both kinds."""

    positions: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.narrow = nn.Parameter(torch.zeros(2, 64))
        self.large = nn.Parameter(torch.zeros(521, 520))  # a quarter of it is a message of its own
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(12, dtype=torch.int32).reshape(3, 4))
        self.register_buffer("twin", self.table)
        self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("positions", torch.arange(5).expand(2, 5).clone(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [N, L] to logits [N, L, 37]."""
        hidden = self.embed(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden) * self.large[0, 0])
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden) + self.narrow.sum(0) + self.positions[0, 0]
        return self.head(hidden)


def saved_in_place(model: Odd) -> list[torch.Tensor]:
    """Every parameter and persistent buffer, once."""
    return [tensor for name, tensor in model.state_dict().items() if name not in TIED]


def filled(seed: int = 0) -> Odd:
    """An `Odd` in which no tensor has the value that its constructor gives it."""
    torch.manual_seed(seed)
    model = Odd()
    with torch.no_grad():
        for tensor in saved_in_place(model):
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
            elif tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.add_(7)
    return model.eval()


def saved(model: Odd) -> dict[str, torch.Tensor]:
    """What a checkpoint of `model` holds: tied tensors once."""
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in TIED}


def on_meta() -> Odd:
    """An `Odd` on meta but for its non-persistent buffer, which has no rule."""
    with torch.device("meta"):
        model = Odd()
    model.positions = torch.arange(5).expand(2, 5).clone()
    return model


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """On rank 0 the module's full state dict."""
    return {name: value for part in gather_state_dict(module) for name, value in part.items()}


def require_equal(module: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """What the shards hold is `expected`, bit for bit."""
    found = gathered(module)
    if dist.get_rank() == 0:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
