"""What a new rank of an HSDP group gets from its replicas: all of it, bit for bit, or an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raysharding.batch import deal
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.fully_shard.layout import local_tensor, module_tensors
from raysharding.distributed.loading.from_replica import copy_replicas
from raysharding.distributed.optim.factories import make_optimizer
from raysharding.distributed.training.step import train_step
from raysharding.errors import PlanError
from tests.grid import needs_sim
from tests.spawn import device_type, run_ranks

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Mixed(nn.Module):
    """Odd row counts, fewer rows than shards, a tie, a 0-dim parameter, and buffers of both kinds."""

    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 6)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.first.weight
        self.few = nn.Parameter(torch.rand(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.rand(5, 3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("hidden", torch.rand(3), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(rows) + self.tied(rows))
        return self.last(torch.tanh(hidden)) * self.scale + self.few + self.hidden.sum()


def adam(parameters: Any) -> torch.optim.Optimizer:
    few = list(parameters)
    return torch.optim.AdamW([{"params": few[:2], "lr": 0.05}, {"params": few[2:], "weight_decay": 0.0}], lr=0.01)


def prepared(mesh: DeviceMesh, sharding: Sharding) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Mixed()
    shard_module(module, mesh, sharding)
    module.frozen.requires_grad_(False)
    module.norm.training = False
    return module, make_optimizer(module, adam)


def built_anew(mesh: DeviceMesh, sharding: Sharding) -> nn.Module:
    with torch.device("meta"):
        return shard_module(Mixed(), mesh, sharding)


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    def loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, rows)

    batch = deal((ROWS,), {}, dist.get_world_size())[dist.get_rank()]
    return train_step(module, optimizer, batch, loss=loss)


def contents(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Everything that the copy is to bring, as plain values that compare, floats bit for bit."""
    found: dict[str, Any] = {name: plain(tensor) for name, tensor in module_tensors(module).items()}
    found |= {f"{name} learns": tensor.requires_grad for name, tensor in module_tensors(module).items()}
    found |= {f"{name} trains": submodule.training for name, submodule in module.named_modules()}
    state = {"state": {}, "param_groups": []} if optimizer is None else optimizer.state_dict()
    for number, held in state["state"].items():
        found |= {f"{number}/{name}": plain(value) for name, value in held.items()}
    return found | {"param_groups": state["param_groups"]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert {name: (value, expected[name]) for name, value in found.items() if value != expected[name]} == {}


def plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return str(value.dtype), isinstance(value, DTensor), tuple(value.shape), local_tensor(value).tolist()


def train_on(replicate_size: int, sources: dict[int, int], bucket_bytes: int) -> None:
    """Two steps, ranks are replaced, two more steps: as four steps of the same ranks."""
    sharding = Sharding(replicate_size=replicate_size, wrap="none")
    mesh = init_mesh(device_type(), sharding)
    module, optimizer = prepared(mesh, sharding)
    expected = [train(module, optimizer) for _ in range(2)]
    before = contents(module, optimizer)
    expected += [train(module, optimizer) for _ in range(2)]
    after = contents(module, optimizer)

    module, optimizer = prepared(mesh, sharding)
    found = [train(module, optimizer) for _ in range(2)]
    is_new, mine = dist.get_rank() in sources, dist.get_rank() % mesh.size(1)
    if is_new:
        module = built_anew(mesh, sharding)
    steps: list[tuple[int, int]] = []
    follow: Any = lambda phase, done, total, name: steps.append((done, total))  # noqa: E731
    held = None if is_new else optimizer
    kept = copy_replicas(module, mesh, held, sources, adam, progress=follow, bucket_bytes=bucket_bytes)
    assert kept is not None
    assert_same(contents(module, kept), before)
    if any(rank % mesh.size(1) == mine for rank in sources):
        assert [steps[0][0], steps[-1][0]] == [0, steps[-1][1]]
    else:
        assert steps == [], "nothing of this shard was lost"
    found += [train(module, kept) for _ in range(2)]
    assert found == expected
    assert_same(contents(module, kept), after)


@pytest.mark.parametrize(
    ("device", "world_size", "replicate_size", "sources", "bucket_bytes"),
    [
        ("cpu", 4, 2, {2: 0}, 1 << 20),
        ("cpu", 4, 2, {0: 2, 1: 3}, 100),  # a whole replica; tensors in several buckets
        pytest.param("cpu", 3, 3, {0: 1, 2: 1}, 64, marks=pytest.mark.full),  # one shard, two replicas lost
        pytest.param("cpu", 6, 3, {4: 0, 3: 1}, 1 << 10, marks=pytest.mark.full),
        pytest.param("sim", 4, 2, {0: 2, 1: 3}, 100, marks=needs_sim),
    ],
)
def test_a_new_rank_goes_on_as_the_lost_one_would(
    device: str, world_size: int, replicate_size: int, sources: dict[int, int], bucket_bytes: int
) -> None:
    run_ranks(world_size, train_on, replicate_size, sources, bucket_bytes, device=device)


def refuse(change: str) -> None:
    """A source whose module or optimizer is not what a new rank makes: an error on all ranks, and nothing has moved."""
    sharding = Sharding(replicate_size=2, wrap="none")
    mesh = init_mesh(device_type(), sharding)
    module, optimizer = prepared(mesh, sharding)
    message = CHANGES[change](module)
    factory: Any = adam
    if change == "optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if change == "unknown":
        factory = None
    if change == "untold":
        optimizer.param_groups[0]["when"] = print
    is_new = dist.get_rank() == 1
    if is_new:
        module = built_anew(mesh, sharding)
    before = None if is_new else contents(module, optimizer)
    with pytest.raises(PlanError, match=message):
        copy_replicas(module, mesh, None if is_new else optimizer, {1: 0}, factory)
    if not is_new:
        assert contents(module, optimizer) == before


def _named(change: Callable[[Any], Any], message: str) -> Callable[[Any], str]:
    def apply(module: Any) -> str:
        change(module)
        return message

    return apply


CHANGES: dict[str, Callable[[Any], str]] = {
    "new buffer": _named(lambda module: module.register_buffer("late", torch.ones(2)), "tensors: late is"),
    "new module": _named(lambda module: module.add_module("late", nn.Identity()), r"submodules: late\. is"),
    "dtype": _named(lambda module: setattr(module, "flags", torch.ones(3)), "flags is .*float32.* left.*bool"),
    "persistence": _named(
        lambda module: module.register_buffer("hidden", module.hidden), "persistent: hidden is .*not there"
    ),
    "attribute": _named(lambda module: setattr(module.norm, "eps", 0.5), r"norm\.eps is \['0.5'\] .* \['1e-05'\]"),
    "optimizer": _named(lambda module: None, "the state of SGD was held, the optimizer is AdamW"),
    "unknown": _named(lambda module: None, r"\(AdamW\) that a call\(fn\) made"),
    "untold": _named(lambda module: None, "cannot be told to a new rank"),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(one, marks=[] if one in ("new buffer", "attribute") else pytest.mark.full) for one in CHANGES],
)
def test_what_is_not_as_it_was_built_is_refused_everywhere(change: str) -> None:
    run_ranks(2, refuse, change)
