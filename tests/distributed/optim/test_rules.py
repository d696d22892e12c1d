"""Every optimizer of torch and transformers over shards equals one process, or is refused with a reason."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR

from raysharding import Scheduled
from raysharding.config import Sharding
from raysharding.distributed import fsdp2_switch_optimizer_parameters, init_mesh, shard_module, train_step, using_group
from raysharding.distributed.footprint import footprints, tensor_footprints
from raysharding.distributed.fully_shard import ShardMap, local_tensor, module_tensors
from raysharding.distributed.optim import make_optimizer
from tests.distributed.checks import on_ranks
from tests.spawn import device_type, part_of_ranks

pytest.importorskip("transformers")

NUM_STEPS = 4
INPUTS = torch.linspace(-1, 1, 36).reshape(12, 3)


def model(*, bias: bool = True) -> nn.Module:
    """Matrices of 5, 2 and 1 rows, and vectors: on three ranks, uneven shards and empty ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5, bias), nn.Tanh(), nn.Linear(5, 2, bias), nn.Tanh(), nn.Linear(2, 1, bias)]
    return nn.Sequential(*layers)


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name → class and hyperparameters: each class with each of its options, but for those of graphs."""
    from transformers.optimization import Adafactor

    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    options: dict[str, dict[str, Any]] = {
        **{name: {name: True} for name in ("foreach", "fused", "maximize", "amsgrad", "centered")},
        "momentum": {"momentum": 0.9},
        "nesterov": {"nesterov": True, "momentum": 0.9},
        "weight_decay": {"weight_decay": 0.1},
    }
    names = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD Muon NAdam RAdam RMSprop Rprop SGD"
    for name in names.split():
        cls = getattr(torch.optim, name)
        parameters = inspect.signature(cls.__init__).parameters
        found[name] = (cls, {"lr": 1e-2})
        for option, values in options.items():
            if option in parameters:
                found[f"{name} {option}"] = (cls, {"lr": 1e-2, **values})
    for name in ("Adam", "SGD", "Adafactor"):
        found[f"{name} tensor"] = (getattr(torch.optim, name), {"lr": torch.tensor(1e-2)})
    found["transformers"] = (Adafactor, {})
    fixed = {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1}
    found["transformers fixed"] = (Adafactor, fixed)
    return found


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, world_size: int = 1) -> None:
    rows = INPUTS.chunk(world_size)[rank]
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        ((module(rows) - 1) ** 2).sum().mul(world_size / len(INPUTS)).backward()
        optimizer.step()


@on_ranks(3, full=(1, 2))
def test_every_rule_equals_one_process() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_mesh(device_type())
    wrong = {}
    for name, (cls, options) in cases().items():
        make = partial(model, bias="Muon" not in name)  # which takes matrices only
        alone, module = make(), shard_module(make(), mesh)
        take_steps(alone, cls(alone.parameters(), **copy.deepcopy(options)))
        take_steps(module, make_optimizer(module, cls, copy.deepcopy(options)), rank, world_size)
        difference = distance(module, alone)
        if not difference <= 1e-5:
            wrong[name] = difference
    assert not wrong


def distance(module: nn.Module, alone: nn.Module) -> float:
    """Of all parameters; NaN if one is."""
    pairs: Iterable[tuple[Any, Any]] = zip(module.parameters(), alone.parameters(), strict=True)
    return torch.stack([(one.full_tensor() - other).abs().max() for one, other in pairs]).max().item()


@on_ranks(4)
def test_a_step_of_ours_adapts_an_optimizer_of_the_callers() -> None:
    """Made by the caller, with replicas, clipping, and a step of ours: the same decisions on every rank."""
    sharding = Sharding(replicate_size=2)
    module, alone = shard_module(model(), init_mesh(device_type(), sharding), sharding), model()
    rows = INPUTS.chunk(4)[dist.get_rank()]
    optimizer = torch.optim.Adafactor(module.parameters(), lr=1e-2)
    expected_optimizer = torch.optim.Adafactor(alone.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        found = train_step(module, optimizer, {"input": rows}, loss=_loss, max_grad_norm=0.1)
        expected_optimizer.zero_grad()
        _loss(alone(INPUTS)).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        expected_optimizer.step()
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-5, atol=1e-6)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


@on_ranks(2)
def test_hooks_and_schedules_run_once_a_step_and_state_is_small() -> None:
    module = shard_module(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), init_mesh(device_type()))
    optimizer = make_optimizer(module, Scheduled(torch.optim.Adafactor, partial(ExponentialLR, gamma=0.5), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    batch = {"input": torch.ones(2, 64)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = [train_step(module, optimizer, batch, loss=_loss)["lr"] for _ in range(2)]
    assert rates == [0.1, 0.05]
    assert calls == ["before", "after"] * 2
    assert all(isinstance(one, DTensor) for one in optimizer.state)
    adamw = make_optimizer(module, torch.optim.AdamW)
    train_step(module, adamw, batch, loss=_loss)
    with using_group(part_of_ranks()):
        index = ShardMap.of(module_tensors(module)).shard_index
    planned = footprints(tensor_footprints(module), [index], torch.optim.Adafactor)[index].optimizer_bytes
    assert planned == state_bytes(optimizer), "what a plan says"
    # Each rank: rows and columns of both matrices, its half of both biases, and four counts.
    assert state_bytes(optimizer) == 4 * (2 * (64 + 64) + 2 * 32 + 4) == 1296
    assert state_bytes(adamw) == 4 * (2 * 2 * (64 * 32 + 32) + 4) == 33296


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for held in optimizer.state.values() for value in held.values()]
    return sum(local_tensor(value).nbytes for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (torch.optim.LBFGS, {}, "LBFGS is not supported: it runs the loss several times in one step"),
        (torch.optim.SparseAdam, {}, "SparseAdam is not supported: it takes sparse gradients only"),
        (torch.optim.Adam, {"differentiable": True}, r"Adam\(differentiable=True\) is not supported"),
    ],
)
def test_what_is_refused_with_its_reason(cls: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_optimizer(model(), cls, options)
    with pytest.raises(ValueError, match=says):
        fsdp2_switch_optimizer_parameters(cls(model().parameters(), **options), {})


class Overriding(torch.optim.SGD):
    """A `step` of its own that looks like torch's."""

    calls = 0

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Count, and step as SGD does."""
        self.calls += 1
        return super().step(closure)


class Remembering(torch.optim.AdamW):
    """State of another shape than the parameter's, made by an `_init_group` of its own."""

    def _init_group(self, group: Any, *lists: Any, **kwargs: Any) -> Any:
        found = super()._init_group(group, *lists, **kwargs)  # type: ignore[no-untyped-call]
        for parameter in group["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("seen", torch.zeros(3)).add_(1)
        return found


class RpropOfOurs(torch.optim.Rprop):
    """A `step` around one that does not run on DTensors."""

    def step(self, closure: Any = None) -> Any:
        """Step as Rprop does."""
        return super().step(closure)


@on_ranks(2)
def test_a_step_of_the_users_own_is_run_or_refused() -> None:
    module = shard_module(model(), init_mesh("cpu"))
    batch = {"input": INPUTS}
    loss: Any = lambda output: output.square().mean()  # noqa: E731
    train = partial(train_step, batch=batch, loss=loss)
    overriding = Overriding(module.parameters(), lr=0.1)
    train(module, overriding)
    assert overriding.calls == 1
    scheduled = torch.optim.AdamW(module.parameters())
    ExponentialLR(scheduled, 0.9)
    inner, calls = scheduled.step, []

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    scheduled.step = wrapper  # type: ignore[method-assign]
    train(module, scheduled)
    assert calls == [1]
    remembering = Remembering(module.parameters())
    train(module, remembering)
    assert all(state["seen"].tolist() == [1.0] * 3 for state in remembering.state.values())
    with pytest.raises(ValueError, match="RpropOfOurs has a step of its own around that of Rprop"):
        train(module, RpropOfOurs(module.parameters()))


@on_ranks(1)
def test_an_optimizer_goes_with_its_last_reference() -> None:
    """Its state is as large as two models: not only when the collector runs."""
    module = shard_module(model(), init_mesh("cpu"))
    optimizer = torch.optim.AdamW(module.parameters())
    train_step(module, optimizer, {"input": INPUTS}, loss=lambda output: output.square().mean())
    gc.disable()
    found = weakref.ref(optimizer)
    del optimizer
    assert found() is None
    gc.enable()


@on_ranks(2)
def test_gradients_in_another_dtype_than_the_weights_are_taken() -> None:
    module = model()
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    sharding = Sharding(mixed_precision="bf16", keep_low_precision_grads=True)
    shard_module(module, init_mesh("cpu", sharding), sharding)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    train_step(module, optimizer, {"input": INPUTS}, loss=lambda output: output.square().mean())
    for parameter, before in zip(module.parameters(), expected, strict=True):
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.dtype is torch.bfloat16
        torch.testing.assert_close(parameter.full_tensor(), before - 0.5 * parameter.grad.full_tensor().float())
