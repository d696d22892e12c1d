"""Outputs that are views, changed in place: autograd drops FSDP2's hook of such a view, and with it the gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raysharding.batch import RankBatch, Split, deal
from raysharding.config import Sharding
from raysharding.distributed.fully_shard.internals import reshard
from raysharding.distributed.training.step import train_step
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import full, sharded

NUM_TOKENS, WIDTH = 11, 8


class Scaled(nn.Module):
    """A `Linear` with a bias gives a view of an input of three dims. The scale is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids) * self.scale)
        return logits


class Block(nn.Module):
    """Drops the first position."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shorter: torch.Tensor = self.down(F.gelu(self.up(hidden)))[:, 1:]
        return shorter


class Blocks(nn.Module):
    """Adds to the outputs of blocks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.position = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += self.position
        logits: torch.Tensor = self.head(hidden)
        return logits


def entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels[:, -output.shape[1] :].flatten())


def divided(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output.div_(2.0)
    return entropy(output, labels)


def masked(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output[..., 0] = -1e9
    return entropy(output, labels)


def squeezed(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output.unsqueeze(0).squeeze(0).div_(2.0)
    return entropy(output, labels)


OF_BLOCKS = {"wrap": ["Block"]}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Mapping[str, Any]]] = {
    "divided": (Scaled, divided, {}),
    "masked": (Scaled, masked, {"wrap": "none"}),
    "squeezed": (Scaled, squeezed, {}),
    "blocks": (Blocks, divided, OF_BLOCKS),
    "blocks of the root": (Blocks, divided, {"wrap": "none"}),
    "checkpointed": (Blocks, divided, {**OF_BLOCKS, "activation_checkpointing": True}),
    "compiled": (Blocks, divided, {**OF_BLOCKS, "compile": "eager"}),
}


@on_ranks(2)
def test_views_that_are_changed_in_place_train_as_in_one_process() -> None:
    for name, (make, loss, options) in CASES.items():
        torch.manual_seed(0)
        twin = make()
        module = sharded(twin, Sharding(**options))
        optimizer, twin_optimizer = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (module, twin))
        batch = {"ids": torch.randint(NUM_TOKENS, (5, 6)), "labels": torch.randint(1, NUM_TOKENS, (5, 6))}
        for _ in range(3):
            metrics = train_step(module, optimizer, dealt(**batch), loss=loss)
            value = loss(twin(batch["ids"]), batch["labels"])
            twin_optimizer.zero_grad()
            value.backward()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
            twin_optimizer.step()
            assert metrics == pytest.approx({"loss": value.item(), "grad_norm": norm.item()}, abs=1e-5), name
        reshard(module)
        weights = dict(twin.named_parameters())
        assert all(torch.allclose(full(one), weights[fqn], rtol=0, atol=1e-5) for fqn, one in module.named_parameters())


def dealt(**batch: torch.Tensor) -> RankBatch:
    return deal((), {key: Split(value) for key, value in batch.items()}, dist.get_world_size())[dist.get_rank()]


class Detached(Scaled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).detach().requires_grad_()


@on_ranks(2)
def test_a_step_without_any_gradient_is_refused() -> None:
    module = sharded(Detached(), Sharding())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    ids = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="gave none of the 4 trainable parameters of Detached a gradient"):
        train_step(module, optimizer, dealt(ids=ids, labels=ids), loss=entropy)
