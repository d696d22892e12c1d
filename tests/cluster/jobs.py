"""What tests ask a driver on some host to do; see `driver.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import nn

from raysharding import Placement, ShardedModelGroup, Split, Timeouts
from raysharding.group import Call
from raysharding.group.ranks import RankInfo
from tests.clock import now, wait_until
from tests.forking import runtime_env

_group: ShardedModelGroup | None = None
_call: Call | None = None


def join() -> None:
    """Connect to the cluster."""
    ray.init(runtime_env=runtime_env())


def nodes() -> set[str]:
    """Addresses of the nodes that Ray takes for alive."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def await_nodes(number: int) -> None:
    """Wait until Ray knows so many nodes that are alive.

    A node that was killed counts until Ray has given it up: another one at its address would answer for it.
    """
    wait_until(lambda: len([node for node in ray.nodes() if node["Alive"]]) == number, 30, f"{number} nodes are alive")


def make_mlp(width: int = 16) -> Callable[[], nn.Module]:
    """Return a model callable that pickles by value, so that the ranks need not import the tests."""

    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    return build


def start(
    checkpoint: str, *, strategy: Any = "STRICT_SPREAD", labels: Any = None, width: int = 16, **options: Any
) -> list[RankInfo]:
    """Make the driver's group, in place of one before; returns its ranks."""
    global _group
    stop()
    given: dict[str, Any] = {"world_size": 3, "placement": Placement(strategy=strategy, labels=labels)} | options
    _group = ShardedModelGroup.from_checkpoint(checkpoint, model=make_mlp(width), device="cpu", **given)
    return list(_group.ranks)


def attach(name: str, timeouts: Timeouts | None = None) -> None:
    """Use the group that another driver has made."""
    global _group
    _group = ShardedModelGroup.attach(name, timeouts=timeouts)


def group() -> ShardedModelGroup:
    """The driver's group."""
    assert _group is not None
    return _group


def stop() -> None:
    """Shut the group down."""
    global _group
    if _group is not None:
        _group.shutdown()
    _group = None


def forward(rows: torch.Tensor) -> torch.Tensor:
    """The model's output."""
    output = group().forward(Split(rows))
    assert isinstance(output, torch.Tensor)
    return output


def train(rows: torch.Tensor, targets: torch.Tensor) -> list[dict[str, float]]:
    """Two steps of SGD on the mean square."""
    group().set_optimizer(torch.optim.SGD, lr=0.1)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - targets).square().sum(), output.numel()

    return [group().train_step(Split(rows), targets=Split(targets), loss=loss) for _ in range(2)]


def change() -> None:
    """Change the weights."""

    def add_one() -> None:
        import torch

        from raysharding import current_worker

        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.add_(1.0)

    group().call(add_one)


def begin_waiting(in_collective: bool) -> None:
    """Begin a call in which all ranks sleep, or, `in_collective`, all but rank 0 wait for it."""
    global _call

    def wait(in_collective: bool) -> None:
        import time

        import torch.distributed as dist

        if in_collective and dist.get_rank() != 0:
            dist.barrier()
        time.sleep(300)

    _call = group().call.remote(wait, in_collective)


def failure() -> tuple[float, BaseException | None]:
    """Wait for the call that was begun; returns the clock and how it ended."""
    assert _call is not None
    try:
        _call.result(timeout_s=200)
    except Exception as error:
        return now(), error
    return now(), None


def state_within(state: str, seconds: float) -> tuple[float, str]:
    """Wait until the group is in a state; returns the clock and why it is broken."""
    wait_until(lambda: group().state.value == state, seconds, f"the group is {state}", every_s=0.01)
    seen = now()
    try:
        group().forward(torch.ones(1, 8))
    except Exception as error:
        return seen, str(error)
    return seen, ""
