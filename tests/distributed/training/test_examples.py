"""Batches whose images are no rows: examples are dealt, ranks collate, and ranks without an image run the same modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import Split, deal
from raysharding.config import Sharding
from raysharding.data import SequenceRows
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard import shard_module
from raysharding.distributed.training import (
    Accumulation,
    Evaluation,
    EvaluationPlan,
    Fit,
    FitPlan,
    Forwarding,
    Prediction,
    PredictPlan,
    forward_backward,
    optim_step,
    train_step,
)
from raysharding.distributed.training.data_loader import DataPlan
from raysharding.errors import RayshardingError
from raysharding.outputs import gather_outputs
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

CPU = torch.device("cpu")
IMAGES = (2, 1, 1, 0)
"""Images of each row."""
NAMES = ["llava", "qwen2-vl"]
TOLERANCE = 1e-5
STEPS = 3
Example = dict[str, Any]


def examples(name: str, images: tuple[int, ...] = IMAGES) -> list[Example]:
    """Rows of text of unlike lengths, with the tokens of their images in front."""
    random, made = torch.Generator().manual_seed(3), []
    for row, number in enumerate(images):
        words = torch.randint(4, 50, (4 + 2 * row,), generator=random).tolist()
        marks = ([62, *[60] * 4, 63] if name == "qwen2-vl" else [3] * 4) * number
        shape = (number * 16, 96) if name == "qwen2-vl" else (number, 3, 16, 16)
        made.append({"ids": marks + words, "masked": len(marks), "pixels": torch.randn(shape, generator=random)})
    return made


class Collate:
    """Pads text; images are stacked beside it, and left out where there are none, as processors do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sizes: list[int] = []

    def __call__(self, rows: list[Example]) -> dict[str, Any]:
        self.sizes.append(len(rows))
        longest = max(len(row["ids"]) for row in rows)
        ids, mask, labels = (torch.full((len(rows), longest), fill) for fill in (0, 0, -100))
        for index, row in enumerate(rows):
            length = len(row["ids"])
            ids[index, :length] = torch.tensor(row["ids"])
            mask[index, :length] = 1
            labels[index, row["masked"] : length] = ids[index, row["masked"] : length]
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.name == "qwen2-vl":
            batch["mm_token_type_ids"] = (ids == 60).int()
        pixels = torch.cat([row["pixels"] for row in rows])
        if len(pixels):
            batch["pixel_values"] = pixels
            if self.name == "qwen2-vl":
                batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * (len(pixels) // 16))
        return batch


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = ARCHITECTURES[name].make()
    return model


def sharded(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    sharding = Sharding()
    module = shard_module(build(name), init_mesh("cpu", sharding), sharding)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def alone(name: str, rows: list[Example], steps: int = STEPS) -> list[tuple[float, float]]:
    """Loss and gradient norm of one process's steps on all rows at once."""
    model, found = build(name).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**Collate(name)(rows)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def agree(metrics: list[dict[str, float]], expected: list[tuple[float, float]]) -> None:
    assert len(metrics) == len(expected)
    for one, (loss, norm) in zip(metrics, expected, strict=True):
        assert abs(one["loss"] - loss) < TOLERANCE, (metrics, expected)
        assert abs(one["grad_norm"] - norm) < TOLERANCE * max(1, norm), (metrics, expected)


def dealt(name: str, rows: list[Example], **more: Any) -> Any:
    batch = Split(rows, collate=Collate(name), **more)
    return deal([batch], {}, dist.get_world_size())[dist.get_rank()]


def train_all(names: list[str]) -> None:
    for name in names:
        rows = examples(name)
        expected = alone(name, rows)
        for num_parts in (1, 2, 4):
            module, optimizer = sharded(name)
            options = {"gradient_accumulation_steps": num_parts}
            agree([train_step(module, optimizer, dealt(name, rows), **options) for _ in range(STEPS)], expected)
            module, optimizer = sharded(name)
            run = Fit(FitPlan(DataPlan(SequenceRows(rows), 4, STEPS, collate=Collate(name)), **options), CPU)
            agree([run.step(module, optimizer).metrics for _ in range(STEPS)], expected)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_over_images_equal_one_process(world_size: int) -> None:
    pytest.importorskip("transformers")
    run_ranks(world_size, train_all, NAMES, timeout_s=180)
