"""Runs of `fit` that tests of the group take, and one process that takes the same steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from raysharding import FitStep, ShardedModelGroup
from tests.conftest import make_mlp

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
NUM_ROWS = 50
BATCH = 7
"""8 steps an epoch, the last with one row."""


def regression() -> Callable[..., torch.Tensor]:
    """A loss that pickles by value: the mean over rows."""

    def loss(output: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        return (output.mean(dim=1) - target).square().mean()

    return loss


def collate(dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """One positional argument of the model, and one of the loss."""

    def make(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {
            "input": torch.tensor([list(row["x"]) for row in rows], dtype=dtype),
            "target": torch.tensor([row["y"] for row in rows], dtype=dtype),
        }

    return make


def fit(group: ShardedModelGroup, data: Any, **options: Any) -> Any:
    return group.fit(data, **{"batch_size": BATCH, "loss": regression(), "collate_fn": collate(), **options})


def alone(weights: dict[str, torch.Tensor], rows: list[dict[str, Any]], epochs: int) -> list[float]:
    """Losses of one process on the same rows in order."""
    return trained_alone(weights, rows, epochs)[1]


def trained_alone(
    weights: dict[str, torch.Tensor], rows: list[dict[str, Any]], epochs: int
) -> tuple[nn.Module, list[float]]:
    """Return one process's module and its losses after epochs of the same rows in order."""
    module = make_mlp()()
    module.load_state_dict(weights)
    optimizer = ADAMW(module.parameters())
    losses = []
    for _ in range(epochs):
        for start in range(0, len(rows), BATCH):
            batch = collate()(rows[start : start + BATCH])
            loss = regression()(module(batch["input"]), target=batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return module, losses


def noisy_collate() -> Callable[..., Any]:
    """One that draws from the rank's generator."""
    plain = collate()

    def make(rows: list[Any]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = plain(rows)
        return made | {"input": made["input"] + torch.randn_like(made["input"])}

    return make


class Killer:
    """A callback that ends a rank's process, once, after a step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank
        self.group: ShardedModelGroup | None = None

    def __call__(self, step: FitStep) -> None:
        if step.num_steps == self.step and self.group is not None:
            os.kill(self.group.ranks[self.rank].pid, signal.SIGKILL)
            self.group = None


def slow_writes(seconds: float) -> Callable[[], None]:
    """Pickles by value: makes this rank's disk slow."""

    def slow() -> None:
        import time

        from raysharding.checkpoint.writing import FileWriter

        quick = FileWriter.write_at

        def write_at(self: Any, *args: Any) -> None:
            time.sleep(seconds)
            quick(self, *args)

        setattr(FileWriter, "write_at", write_at)  # noqa: B010

    return slow
