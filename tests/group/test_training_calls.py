"""`forward_backward`, `optim_step`, `zero_grad`: updates of several calls, equal to one process on all rows at once."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import CheckpointError, GroupError, Same, Scheduled, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.conftest import make_group, make_mlp

pytestmark = pytest.mark.usefixtures("cluster")


def masked_mean() -> Callable[..., Any]:
    """A loss that pickles by value, over the rows that count."""

    def loss(output: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> Any:
        return (output.square().mean(dim=1) * counts).sum(), counts.sum()

    return loss


def mean_square() -> Callable[..., torch.Tensor]:
    """Another, over all rows."""

    def loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    return loss


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(9, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def counts() -> torch.Tensor:
    return torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 0, 1])


class Twin:
    """One process with the same weights."""

    def __init__(self, group: ShardedModelGroup) -> None:
        self.module = make_mlp()()
        self.module.load_state_dict(group.state_dict())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def step(self, rows: torch.Tensor, counts: torch.Tensor, max_grad_norm: float | None = None) -> dict[str, float]:
        self.optimizer.zero_grad()
        total, count = masked_mean()(self.module(rows), rows, counts)
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_grad_norm or math.inf)
        self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def compare(self, group: ShardedModelGroup) -> None:
        for name, value in group.state_dict().items():
            torch.testing.assert_close(value, self.module.state_dict()[name], rtol=0, atol=1e-6)


@pytest.fixture
def training(fresh: ShardedModelGroup) -> ShardedModelGroup:
    return fresh


@pytest.fixture
def twin(training: ShardedModelGroup) -> Twin:
    training.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Twin(training)


def passes(group: ShardedModelGroup, rows: torch.Tensor, counts: torch.Tensor, *cuts: int, sync: bool) -> list[float]:
    losses = []
    for start, end in itertools.pairwise(cuts):
        said = group.forward_backward(
            Split(rows[start:end]), counts=Split(counts[start:end]), loss=masked_mean(), sync=sync or end == cuts[-1]
        )
        losses.append(said["loss"])
    return losses


@pytest.mark.parametrize("sync", [True, False])
def test_several_passes_are_one_update(
    training: ShardedModelGroup, twin: Twin, rows: torch.Tensor, counts: torch.Tensor, sync: bool
) -> None:
    losses = passes(training, rows, counts, 0, 1, 5, 8, 9, sync=sync)
    assert math.isnan(losses[2]), "nothing counts in rows 5 to 7"
    assert training.optim_step(max_grad_norm=0.05) == pytest.approx(twin.step(rows, counts, 0.05), abs=1e-5)
    step = training.train_step(
        Split(rows), counts=Split(counts), loss=masked_mean(), gradient_accumulation_steps=3, max_grad_norm=0.05
    )
    assert step == pytest.approx(twin.step(rows, counts, 0.05), abs=1e-5)
    twin.compare(training)


def test_what_was_given_up_is_in_no_update(
    training: ShardedModelGroup, twin: Twin, rows: torch.Tensor, counts: torch.Tensor, tmp_path: Path
) -> None:
    """By `zero_grad`, by an error in a later pass, by one in another call, by a `train_step`, by a load."""

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no")

    saved = tmp_path / "saved"
    training.save(saved)
    half = Split(rows[:4]), masked_mean()
    for give_up in (
        lambda: training.zero_grad(),
        lambda: training.forward_backward(half[0], loss=fail),
        lambda: training.call(fail),
        lambda: training.load(tmp_path / "nowhere"),
        lambda: training.load(saved),
    ):
        training.forward_backward(half[0], loss=half[1], counts=Split(counts[:4]), sync=False)
        try:
            give_up()
        except (GroupError, CheckpointError):
            assert training.state is GroupState.READY
        with pytest.raises(GroupError, match="no gradients since the last update: call forward_backward first"):
            training.optim_step()
    training.forward_backward(half[0], loss=half[1], counts=Split(counts[:4]), sync=False)
    step = training.train_step(Split(rows), counts=Split(counts), loss=masked_mean())
    assert step == pytest.approx(twin.step(rows, counts), abs=1e-5)
    twin.compare(training)


def test_an_update_takes_each_gradient_once(
    training: ShardedModelGroup, twin: Twin, rows: torch.Tensor, counts: torch.Tensor
) -> None:
    passes(training, rows, counts, 0, 9, sync=True)
    training.optim_step()
    twin.step(rows, counts)
    with pytest.raises(GroupError, match="no gradients since the last update"):
        training.optim_step()
    passes(training, rows, counts, 0, 9, sync=True)
    training.optim_step()
    twin.step(rows, counts)
    twin.compare(training)


def test_gradients_of_a_call_are_updated_with(training: ShardedModelGroup, twin: Twin, rows: torch.Tensor) -> None:
    def backward(rows: torch.Tensor) -> None:
        from raysharding import current_worker

        worker = current_worker()
        worker.module.zero_grad()
        worker.module(rows).square().sum().backward()

    training.call(backward, rows)
    said = training.optim_step()
    twin.optimizer.zero_grad()
    twin.module(rows).square().sum().backward()
    twin.optimizer.step()
    assert list(said) == ["grad_norm"]
    twin.compare(training)


def test_what_the_driver_can_see_is_refused_there(checkpoint: Path, rows: torch.Tensor) -> None:
    with make_group(checkpoint) as group:
        with pytest.raises(ValueError, match=r"optim_step needs an optimizer: call group.set_optimizer"):
            group.optim_step()
        said = group.forward_backward(Split(rows), loss=lambda output, rows: output.square().mean())
        assert said["loss"] > 0
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="max_grad_norm=0: give a positive number"):
            group.optim_step(max_grad_norm=0)
        with pytest.raises(ValueError, match="gradient_accumulation_steps=0: give 1 or more"):
            group.train_step(Split(rows), gradient_accumulation_steps=0)
        with pytest.raises(ValueError, match="this call has no Split"):
            group.train_step(rows, gradient_accumulation_steps=2)
        assert group.state is GroupState.READY


def halving() -> Callable[..., Any]:
    """A schedule that pickles by value."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        from torch.optim.lr_scheduler import ExponentialLR

        return ExponentialLR(optimizer, 0.5)

    return schedule


def test_a_schedule_goes_where_its_optimizer_goes(checkpoint: Path, rows: torch.Tensor, tmp_path: Path) -> None:
    """Through a save, into a group of another size, into the ranks of a restart, and back."""
    step: dict[str, Any] = {"loss": mean_square()}
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    with make_group(checkpoint, optimizer=adam) as group:
        group.set_scheduler(halving())
        rates = [group.train_step(Split(rows), **step)["lr"] for _ in range(2)]
        group.forward_backward(Split(rows), **step)
        rates.append(group.optim_step()["lr"])
        assert rates == [1e-2, 5e-3, 2.5e-3]
        group.save(tmp_path / "saved")
        expected = [group.train_step(Split(rows), **step) for _ in range(2)]
        os.kill(group.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1 died"):
            group.call(time.sleep, 5)
        assert group.restart().checkpoint == str(tmp_path / "saved")
        assert [group.train_step(Split(rows), **step) for _ in range(2)] == expected
        group.load(tmp_path / "saved")
        assert [group.train_step(Split(rows), **step) for _ in range(2)] == expected
        assert group.restart(tmp_path / "saved").checkpoint == str(tmp_path / "saved")
        assert [group.train_step(Split(rows), **step) for _ in range(2)] == expected
        with pytest.raises(ValueError, match="schedule=3: give a class of"):
            group.set_scheduler(3)  # type: ignore[arg-type]
        with pytest.raises(GroupError, match="unexpected keyword argument 'gamma'"):
            group.set_scheduler(halving(), gamma=3)
        assert group.state is GroupState.READY
    optimizer = Scheduled(torch.optim.AdamW, halving(), lr=7.0)  # what was saved wins
    with make_group(tmp_path / "saved", world_size=3, optimizer=optimizer) as other:
        found = [other.train_step(Split(rows), **step) for _ in range(2)]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)


def test_rows_beside_a_split_are_refused_by_every_call(training: ShardedModelGroup, rows: torch.Tensor) -> None:
    training.set_optimizer(torch.optim.SGD, lr=0.1)
    for name in ("forward", "generate", "train_step", "forward_backward", "call"):
        begin = getattr(training, name)
        args = [len, Split(rows)] if name == "call" else [Split(rows)]
        for run in (begin, begin.remote):
            with pytest.raises(
                ValueError, match=r"mask: shape \(9, 8\) has size 9 in dim 0, .*Give Split\(\.\.\.\) for rows"
            ):
                run(*args, mask=rows)
    with pytest.raises(ValueError, match=r"args\[1\] \(labels\): shape \(9,\)"):
        training.call(lambda x, labels: None, Split(rows), torch.zeros(9))
    assert training.call(lambda x, mask: tuple(mask.shape), Split(rows), mask=Same(rows)) == [(9, 8)] * 2
    assert training.state is GroupState.READY


def test_a_split_of_a_mapping_is_the_models_keyword_arguments(
    training: ShardedModelGroup, twin: Twin, rows: torch.Tensor, counts: torch.Tensor
) -> None:
    def loss(output: torch.Tensor, input: torch.Tensor, counts: torch.Tensor) -> Any:
        return (output.square().mean(dim=1) * counts).sum(), counts.sum()

    assert torch.equal(training.forward(Split({"input": rows})), training.forward(Split(rows)))
    batch = Split({"input": rows, "counts": counts})
    assert training.train_step(batch, loss=loss) == pytest.approx(twin.step(rows, counts), abs=1e-5)
    training.forward_backward(Split({"input": rows}), counts=Split(counts), loss=loss)
    assert training.optim_step() == pytest.approx(twin.step(rows, counts), abs=1e-5)
    assert training.call(lambda batch: sorted(batch), batch) == [["counts", "input"]] * 2, "fn gets the mapping itself"
    with pytest.raises(ValueError, match="counts: given twice"):
        training.train_step(batch, counts=Split(counts), loss=loss)
