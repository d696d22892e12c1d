"""A fit on the simulated device: `group_checks` runs these in its driver."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import FitStep, ShardedModelGroup
from tests.accelerator.memory_checks import PLACEMENT


def make_model() -> nn.Module:
    """A model with drop-out, whose masks come from the device's generator."""
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The model's inputs and targets."""
    columns = {name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in ("x", "y")}
    return {"input": columns["x"], "targets": columns["y"].unsqueeze(1)}


def square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of the squares."""
    return (output - targets).square().mean()


def check_fit(path: Path) -> None:
    """A fit that loses a rank goes on from its last save, in the background, with the losses of an undisturbed one."""
    path = path.with_name("dropout.safetensors")
    save_file(make_model().state_dict(), path)
    rows = torch.randn(64, 8)
    data = path.with_name("rows.parquet")
    pq.write_table(pa.table({"x": rows.tolist(), "y": rows.sum(1).tolist()}), data)
    options: dict[str, Any] = {"batch_size": 8, "collate_fn": collate, "loss": square, "max_steps": 6, "epochs": 2}
    model: dict[str, Any] = {"model": make_model, "device": "sim", "placement": PLACEMENT, "world_size": 2}
    model["optimizer"] = torch.optim.AdamW
    with ShardedModelGroup.from_checkpoint(path, **model) as group:
        expected = group.fit(data, **options).history["loss"]
        evaluated = group.evaluate(data, batch_size=8, collate_fn=collate, loss=square)

    def kill(step: FitStep) -> None:
        if step.num_steps == 5 and not killed:
            killed.append(group.ranks[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    with ShardedModelGroup.from_checkpoint(path, max_restarts=1, **model) as group:
        saves: dict[str, Any] = {"save_to": path.with_name("saves"), "save_every": 2, "async_save": True}
        report = group.fit(data, callbacks=[kill], **saves, **options)
        assert killed
        assert report.history["loss"] == expected
        assert group.evaluate(data, batch_size=8, collate_fn=collate, loss=square) == evaluated
