"""Batches whose images are no rows: ranks collate examples, and those without an image run the same modules."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.batch import Split, deal, gather_outputs
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
    zero_grad,
)
from raysharding.distributed.training.data_loader import DataPlan
from raysharding.distributed.training.fit import StepMetrics
from raysharding.errors import RayshardingError
from raysharding.models import InputBounds
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import each
from tests.models.architectures import ARCHITECTURES

pytestmark = pytest.mark.all_ranks

pytest.importorskip("transformers")

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


def build(name: str, trained: str = "") -> nn.Module:
    """Return a model of which the parameters with `trained` in their name are trained."""
    torch.manual_seed(0)
    model: nn.Module = ARCHITECTURES[name].make()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(trained in path)
    return model


def sharded(name: str, trained: str = "", **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    sharding = Sharding(**more)
    module = shard_module(build(name, trained), init_mesh("cpu", sharding), sharding)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def alone(name: str, rows: list[Example], steps: int = STEPS) -> list[tuple[float, float]]:
    """Loss and gradient norm of one process's steps on all rows at once."""
    return steps_alone(build(name), Collate(name)(rows), steps)


def steps_alone(model: nn.Module, batch: dict[str, Any], steps: int = STEPS, loss: Any = None) -> Any:
    model, found = model.train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(**batch)
        value = output.loss if loss is None else sum(total / count for total, count in loss(output, batch["labels"]))
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        found.append((value.item(), norm.item()))
    return found


def agree(metrics: list[dict[str, float]], expected: list[tuple[float, float]], tolerance: float = TOLERANCE) -> None:
    assert len(metrics) == len(expected)
    for one, (loss, norm) in zip(metrics, expected, strict=True):
        assert abs(one["loss"] - loss) < tolerance, (metrics, expected)
        assert abs(one["grad_norm"] - norm) < tolerance * max(1, norm), (metrics, expected)


def dealt(name: str, rows: list[Example], **more: Any) -> Any:
    batch = Split(rows, collate_fn=Collate(name), **more)
    return deal([batch], {}, dist.get_world_size())[dist.get_rank()]


def steps_equal(name: str) -> None:
    rows = examples(name)
    expected = alone(name, rows)
    for num_parts in (1, 2, 4):  # of one rank's four, the last is text alone
        module, optimizer = sharded(name)
        step = partial(train_step, module, optimizer, gradient_accumulation_steps=num_parts)
        agree([step(dealt(name, rows)) for _ in range(STEPS)], expected)
    module, optimizer = sharded(name)
    done = fitted(name, rows, module, optimizer)
    agree([one.metrics for one in done], expected)
    assert sum(all_ranks(done[0].num_rows)) == len(rows)
    with_padding = [len(one) for one in Collate(name)(rows)["input_ids"]]
    assert sum(map(len, (row["ids"] for row in rows))) <= sum(all_ranks(done[0].num_tokens)) <= sum(with_padding)


def fitted(name: str, rows: list[Example], module: nn.Module, optimizer: torch.optim.Optimizer) -> list[StepMetrics]:
    """Steps of a run in two parts."""
    plan = DataPlan(SequenceRows(rows), 4, STEPS, collate_fn=Collate(name))
    run = Fit(FitPlan(plan, gradient_accumulation_steps=2), CPU)
    done = [one for _ in range(STEPS) if (one := run.step(module, optimizer)) is not None]
    run.settle()
    return done


def all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks(1, 2, 3)
def test_steps_over_images_equal_one_process() -> None:
    """Rows of 2, 1, 1 and 0 images, by `train_step` in 1, 2 and 4 parts, and by `fit` in two."""
    each(steps_equal, [(name,) for name in NAMES])


PROJECTOR = "multi_modal_projector"


def pairs(output: Any, labels: torch.Tensor) -> list[Any]:
    """Two terms, whose counts have another ratio in each row."""
    logits, words, counted = output.logits[:, :-1], labels[:, 1:], labels[:, 1:] != -100
    total = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")
    return [(total, counted.sum()), ((logits.square().mean(-1) * counted).sum(), 4 * len(words))]


def by_labels(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **more: Any) -> torch.Tensor:
    """A model's own loss of which only the labels can be counted."""
    scores, words = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    counted = words != -100
    total = -(scores.gather(-1, words.clamp(min=0)[..., None])[..., 0] * counted).sum()
    return total / (more.get("num_items_in_batch") or counted.sum())


@on_ranks(1, 2, 3)
def test_steps_of_a_projector_equal_one_process() -> None:
    """Rows of text have a loss without a graph: passes over them, the first, middle and last, count and add nothing."""
    one_row = 4 // dist.get_world_size()
    for images, num_parts, loss, own, more in (
        (IMAGES, 1, None, None, {}),
        (IMAGES, one_row, None, None, {}),
        ((0, 1, 0, 2), one_row, None, by_labels, {}),  # the first of two or four parts is text alone
        ((1, 0, 2, 0), one_row, None, None, {"wrap": "none"}),  # the last is
        ((1, 0, 2, 0), one_row, pairs, None, {"ignored_modules": f"model.{PROJECTOR}"}),
    ):
        rows, model = examples("llava", images), build("llava", PROJECTOR)
        expected = steps_alone(model, Collate("llava")(rows), loss=loss)
        module, optimizer = sharded("llava", PROJECTOR, **more)
        if own is not None:
            setattr(module, "loss_function", own)  # noqa: B010 - a property of transformers' classes
        step = partial(train_step, module, optimizer, loss=loss, gradient_accumulation_steps=num_parts)
        agree([step(dealt("llava", rows)) for _ in range(STEPS)], expected)
        same_weights(module, model)


@on_ranks(2)
def test_parts_of_text_come_first_in_bf16() -> None:
    """Parts of text alone come first: the tower has not run yet, and the projector gets no gradient with the others."""
    rows = examples("llava", (0, 1, 0, 2))
    for trained in ("", PROJECTOR):
        expected = steps_alone(build("llava", trained), Collate("llava")(rows))
        module, optimizer = sharded("llava", trained, mixed_precision="bf16", wrap=["CLIPEncoderLayer"])
        step = partial(train_step, module, optimizer, gradient_accumulation_steps=2)
        agree([step(dealt("llava", rows)) for _ in range(STEPS)], expected, tolerance=2e-2)


class Measured(nn.Module):
    """Takes numbers of what torch's loss functions give of detached values, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.layer(x)
        told: dict[str, Any] = {"loss": nn.functional.cross_entropy(logits, labels)}
        if (labels == 2).any():
            one = nn.functional.mse_loss(logits.detach(), x[:, :3])
            told |= {"item": one.item(), "numpy": one.numpy()}
        return told


@on_ranks(2)
def test_a_model_may_measure_by_loss_functions() -> None:
    """Their values have no graph, as in one process, and need not be computed on every rank."""
    torch.manual_seed(0)
    model, batch = Measured(), {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 1])}
    sharding = Sharding()
    module = shard_module(copy.deepcopy(model), init_mesh("cpu", sharding), sharding)
    model(**batch)["loss"].backward()
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]).item()
    own = deal([], {name: Split(value) for name, value in batch.items()}, dist.get_world_size())[dist.get_rank()]
    metrics = train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), own)
    agree([metrics], [(model(**batch)["loss"].item(), norm)])


def same_weights(module: nn.Module, model: nn.Module) -> None:
    for found, expected in zip(module.parameters(), model.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)


@on_ranks(1, 2)
def test_fit_and_calls_of_a_projector_equal_one_process() -> None:
    """`fit` in two parts, calls of `forward_backward` of which the last is text alone, and no row with an image."""
    rows, model = examples("llava"), build("llava", PROJECTOR)
    expected = steps_alone(model, Collate("llava")(rows))
    module, optimizer = sharded("llava", PROJECTOR)
    agree([one.metrics for one in fitted("llava", rows, module, optimizer)], expected)
    same_weights(module, model)
    module, optimizer = sharded("llava", PROJECTOR)
    with pytest.raises(ValueError, match=r"none of the 4 trainable .* \(of text alone, where"):
        train_step(module, optimizer, dealt("llava", rows[3:]))
    found = []
    for _ in range(STEPS):
        zero_grad(module, optimizer)
        done = Accumulation()
        for part in (rows[:2], rows[2:3], rows[3:]):
            forward_backward(module, dealt("llava", part), done, sync=part == rows[3:])
        with torch.no_grad():  # and registers full parameters, which have no gradient
            module(**Collate("llava")(rows[3:]))
        found.append(optim_step(module, optimizer, done))
    agree(found, expected)


def calls_equal(name: str) -> None:
    rows = examples(name)
    module, optimizer = sharded(name)
    twin = build(name).eval()
    evaluates(name, rows, module, twin)
    forwards(name, rows, module, twin)
    predicts(name, rows, module, twin)
    forward_backward(module, dealt(name, rows[3:]), done := Accumulation(), sync=False)
    last = forward_backward(module, dealt(name, rows[:3]), done)
    agree([optim_step(module, optimizer, done)], alone(name, rows, 1))
    assert last["loss"] == pytest.approx(alone(name, rows[:3], 1)[0][0], abs=TOLERANCE)


@on_ranks(2, 3)
def test_calls_over_images_equal_one_process() -> None:
    """`evaluate`, `forward`, `predict`, and `forward_backward` on text, then on images."""
    each(calls_equal, [(name,) for name in NAMES])


def words(output: Any, labels: torch.Tensor) -> tuple[int, int]:
    """A metric that is no 0: the mean number of the words that are found."""
    counted = labels != -100
    return int(output.logits.argmax(-1)[counted].sum()), int(counted.sum())


def evaluates(name: str, rows: list[Example], module: nn.Module, twin: nn.Module) -> None:
    whole = Collate(name)(rows)
    plan = DataPlan(SequenceRows(rows), 4, collate_fn=Collate(name))
    run = Evaluation(EvaluationPlan(plan, metrics={"words": words}), CPU)
    while run.step(module):
        pass
    with torch.no_grad():
        output = twin(**whole)
    total, count = words(output, whole["labels"])
    assert run.values() == pytest.approx(
        {"loss": output.loss.item(), "words": total / count, "num_rows": 4}, abs=TOLERANCE
    )


def forwards(name: str, rows: list[Example], module: nn.Module, twin: nn.Module) -> None:
    """Rows of one length are joined in order, though an output may have hidden states of images and others none."""
    longest = max(len(row["ids"]) for row in rows)
    even = [{**row, "ids": row["ids"] + [9] * (longest - len(row["ids"]))} for row in rows]
    batch = dealt(name, even)
    output = gather_outputs(all_ranks(Forwarding(module).run(batch)), batch.rows)
    with torch.no_grad():
        expected = twin(**Collate(name)(even))
    torch.testing.assert_close(output.logits, expected.logits, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.loss, expected.loss, atol=TOLERANCE, rtol=0)


def predicts(name: str, rows: list[Example], module: nn.Module, twin: nn.Module) -> None:
    """Each row's last logits, from the table of its part."""

    def last(output: Any, batch: dict[str, Any]) -> dict[str, Any]:
        ends = batch["attention_mask"].sum(1) - 1
        return {"last": output.logits[range(len(ends)), ends]}

    run = Prediction(PredictPlan(SequenceRows(rows), 4, last, collate_fn=Collate(name), rows_per_file=1), CPU)
    found: dict[int, Any] = {}
    while not run.is_over:
        run.steps(module, 1)
        found |= {part.start: table.column("last").to_pylist()[0] for part, table in run.finished}
        run.finished = []
    whole = Collate(name)(rows)
    with torch.no_grad():
        expected = last(twin(**whole), whole)["last"]
    for start, values in found.items():
        torch.testing.assert_close(torch.tensor(values), expected[start], atol=TOLERANCE, rtol=0)
    assert sum(len(own) for own in all_ranks(found)) == 4


@on_ranks(2)
def test_every_rank_hears_of_what_one_collate_does() -> None:
    """What one rank's collate raises, or makes that cannot be a dummy elsewhere, is every rank's error."""
    name, rows = "llava", examples("llava")
    module, optimizer = sharded(name)

    def opaque(rows: list[Example]) -> dict[str, Any]:
        made = Collate(name)(rows)
        return made | {"images": object()} if "pixel_values" in made else made

    def picky(rows: list[Example]) -> dict[str, Any]:
        if rows[0]["masked"] == 0:
            raise RuntimeError("no image")
        return Collate(name)(rows)

    def other_ids(rows: list[Example]) -> dict[str, Any]:
        made = Collate(name)(rows)
        return made if "pixel_values" in made else made | {"input_ids": made["input_ids"] + 60}

    for collate, said in (
        (opaque, "images is a object: .*a blank image"),
        (picky, "no image"),
        (other_ids, "train_step: input_ids holds"),
    ):
        batch = deal([Split([rows[1], rows[3]], collate_fn=collate)], {}, 2)[dist.get_rank()]
        with pytest.raises((ValueError, RuntimeError, RayshardingError), match=said):
            train_step(module, optimizer, batch)
        run = Fit(
            FitPlan(DataPlan(SequenceRows([rows[1], rows[3]]), 2, collate_fn=collate)),
            CPU,
            bounds=InputBounds.of(module),
        )
        with pytest.raises((ValueError, RayshardingError), match=said.replace("train_step", "data")):
            run.step(module, optimizer)
        run.data_loader.close()
    agree([train_step(module, optimizer, dealt(name, rows)) for _ in range(STEPS)], alone(name, rows))
