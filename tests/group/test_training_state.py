"""Optimizer state through saves and loads of a group, and the torch-level functions that it offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysharding import CheckpointError, GroupError, PlanError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.group.conftest import make_group
from tests.group.test_group import mean_square

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def test_a_save_holds_the_optimizer(fresh: ShardedModelGroup, rows: torch.Tensor, tmp_path: Path) -> None:
    """The next step is the same: in the group that loads its own save, and in one of another world size."""
    step = partial(fresh.train_step, Split(rows), loss=mean_square())
    step()
    step()
    report = fresh.save(tmp_path / "saved")
    assert report is not None
    assert report.num_tensors == 4 + 2 * 4
    expected = step()
    weights = fresh.state_dict()
    step()
    assert fresh.load(tmp_path / "saved").num_tensors == 4
    assert step() == expected
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, weights[name]), name
    factory = partial(torch.optim.AdamW, lr=5.0)  # what was saved wins
    with make_group(tmp_path / "saved", world_size=3, optimizer=factory) as other:
        assert other.train_step(Split(rows), loss=mean_square()) == pytest.approx(expected, rel=1e-5)
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
        weights = other.state_dict()
        other.set_optimizer(two_groups())
        with pytest.raises(PlanError, match="param groups were saved"):
            other.load(tmp_path / "saved")
        # Nothing of the save came: not the weights either, which are others since the step.
        assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
        assert other.state is GroupState.READY
    fresh.save(tmp_path / "bare", optimizer=False)
    assert not (tmp_path / "bare" / "optimizer").exists()
    before = fresh.state_dict()
    fresh.load(tmp_path / "bare")
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def two_groups() -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """An optimizer factory that pickles by value."""

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)

    return make


def test_a_load_that_does_not_fit_leaves_the_group_ready(fresh: ShardedModelGroup, tmp_path: Path) -> None:
    before = fresh.state_dict()
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="missing from the checkpoint"):
        fresh.load(tmp_path)
    with pytest.raises(CheckpointError):
        fresh.load(tmp_path / "none")
    assert fresh.state is GroupState.READY
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def backward(rows: torch.Tensor) -> None:
    """Leave gradients of a sum over this rank's rows."""
    from raysharding import current_worker

    module = current_worker().module
    module.zero_grad()
    module(rows).square().sum().backward()


def test_gradients_are_clipped(fresh: ShardedModelGroup, checkpoint: Path, rows: torch.Tensor) -> None:
    fresh.load(checkpoint)
    fresh.call(by_value(backward), rows)
    norm = fresh.clip_grad_norm_(None)
    weights = load_file(checkpoint)
    hidden = torch.nn.functional.linear(rows, weights["0.weight"].requires_grad_(), weights["0.bias"].requires_grad_())
    output = torch.nn.functional.linear(
        hidden.relu(), weights["2.weight"].requires_grad_(), weights["2.bias"].requires_grad_()
    )
    output.square().sum().backward()
    expected = torch.nn.utils.get_total_norm([value.grad for value in weights.values() if value.grad is not None])
    assert norm == pytest.approx(expected.item(), rel=1e-5)
    assert fresh.clip_grad_norm_(norm / 4) == pytest.approx(norm)
    assert fresh.clip_grad_norm_(None) == pytest.approx(norm / 4, rel=1e-4)
    largest = fresh.clip_grad_norm_(None, float("inf"))
    assert 0 < largest < norm
    for bad, said in (((1.0, 0.0), "norm_type"), ((-1.0,), "max_norm"), ((float("nan"),), "max_norm")):
        with pytest.raises(ValueError, match=said) as raised:
            fresh.clip_grad_norm_(*bad)
        assert not isinstance(raised.value, GroupError), "before the ranks"
    assert fresh.state is GroupState.READY


def by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` so that the ranks need not import the tests."""
    import types

    return types.FunctionType(fn.__code__, {"__builtins__": __builtins__, "torch": torch}, fn.__name__)


def summed() -> Callable[[], tuple[tuple[int, ...], float]]:
    """Look at full parameters, and change one."""

    def look() -> tuple[tuple[int, ...], float]:
        from raysharding import current_worker
        from raysharding.distributed import summon_full_params

        module = current_worker().module
        with torch.no_grad(), summon_full_params(module):
            weight = module.get_parameter("0.weight")
            found = tuple(weight.shape), float(weight.sum())
            weight.fill_(2.0)
            module.get_parameter("0.bias").data.fill_(3.0)
        return found

    return look


def test_full_parameters_inside_a_call(fresh: ShardedModelGroup, checkpoint: Path) -> None:
    fresh.load(checkpoint)
    expected = load_file(checkpoint)["0.weight"]

    def weights_version() -> int | None:
        call = fresh.forward.remote(torch.ones(1, 8))
        call.result()
        return call.weights_version

    before = weights_version()
    assert before is not None
    for shape, total in fresh.call(summed()):
        assert shape == (16, 8)
        assert total == pytest.approx(expected.sum().item(), abs=1e-4)
    found = fresh.state_dict(["0.weight", "0.bias"])
    assert torch.equal(found["0.weight"], torch.full((16, 8), 2.0))
    assert torch.equal(found["0.bias"], torch.full((16,), 3.0))
    assert weights_version() == before + 1
