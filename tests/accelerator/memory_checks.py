"""Out of memory on the ranks of a group: `group_checks` runs these in its driver."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import GroupError, Loading, Placement, PreflightError, ShardedModelGroup, Sharding, Split
from raysharding.group.launch.memory_plan import CONTEXT_BYTES
from tests import forking
from tests.accelerator.build import load_extension
from tests.accelerator.device import sim

PLACEMENT = Placement(runtime_env={"env_vars": {forking.DEVICE: "sim"}})


def allocated() -> int:
    """Bytes of the rank's device."""
    return int(sim().memory_allocated())


def limit_memory(num_bytes: int | None) -> None:
    """Let the rank's device have so many bytes beside those in use; `None`: all there are."""
    limit = None if num_bytes is None else allocated() + num_bytes
    load_extension().set_limit(sim().current_device(), limit)


def make_layers() -> nn.Module:
    """4 MB of parameters."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def limited(make: Any, num_bytes: int) -> nn.Module:
    """A model that leaves its rank so many bytes."""
    limit_memory(num_bytes)
    return make()


class LimitedAdamW(torch.optim.AdamW):
    """Has no memory for its state the first time."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        if not self.state and not self.param_groups[0]["params"][0].is_meta:  # on meta the preflight takes one
            limit_memory(0)
        return super().step(closure)


def group_of(path: Path, **options: Any) -> ShardedModelGroup:
    """Two ranks on the simulated device."""
    options = {"model": make_layers, "placement": PLACEMENT, "world_size": 2, **options}
    return ShardedModelGroup.from_checkpoint(path, device="sim", **options)


def check_out_of_memory_in_a_load(path: Path) -> None:
    """What does not fit is refused by the preflight; a load without memory for its buffers leaves the weights."""
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    small = partial(limited, make_layers, 1 << 20)
    with pytest.raises(PreflightError, match=r"GPU memory of rank 0 \(sim:0 .* needed for shards and load"):
        group_of(path, model=small)
    with pytest.raises(GroupError, match=r"raised in plan: torch\.OutOfMemoryError"):
        group_of(path, model=small, preflight=False)
    rows = torch.randn(8, 512)
    with group_of(path, loading=Loading("scatter")) as group:
        expected, used = group.forward(Split(rows)), list(group.call(allocated))
        group.call(limit_memory, 1 << 20)
        with pytest.raises(GroupError, match="OutOfMemoryError"):
            group.load(path)
        assert group.state.value == "ready"
        assert list(group.call(allocated)) == used
        group.call(limit_memory, None)
        group.load(path)
        assert torch.equal(group.forward(Split(rows)), expected)


def check_out_of_memory_in_a_forward(path: Path) -> None:
    """A forward that fails leaves the group ready, and gives its memory back."""
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    rows = torch.randn(8, 512)
    with group_of(path) as group:
        expected, used = group.forward(Split(rows)), list(group.call(allocated))
        group.call(limit_memory, 0)
        with pytest.raises(GroupError, match="OutOfMemoryError"):
            group.forward(Split(rows))
        assert group.state.value == "ready"
        group.call(limit_memory, None)
        assert torch.equal(group.forward(Split(rows)), expected)
        assert list(group.call(allocated)) == used


def check_out_of_memory_in_a_step(path: Path) -> None:
    """A step that fails may have changed weights on some ranks: the group is broken, until a restart."""
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    rows = torch.randn(8, 512)
    step: dict[str, Any] = {"targets": Split(rows), "loss": square}
    with group_of(path) as group:
        used = list(group.call(allocated))
        group.set_optimizer(LimitedAdamW, lr=0.01)
        with pytest.raises(GroupError, match="OutOfMemoryError"):
            group.train_step(Split(rows), **step)
        assert group.state.value == "broken"
        report = group.restart()
        assert list(group.call(allocated)) == used, report
        group.set_optimizer(torch.optim.AdamW, lr=1e-4)
        losses = [group.train_step(Split(rows), **step)["loss"] for _ in range(3)]
        assert losses[2] < losses[0], losses


def check_out_of_memory_on_a_shared_device(path: Path) -> None:
    """Of two ranks on one device, the one that had no memory left is named as the cause; a restart makes both whole.

    The group is broken, since the other rank waited in a collective of the device.
    """
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    rows = torch.randn(8, 512)
    with group_of(path, placement=replace(PLACEMENT, gpus_per_rank=0.5)) as group:
        assert [rank.device for rank in group.ranks] == ["sim:0", "sim:0"]
        expected = group.forward(Split(rows))
        group.call(limit_rank, 1)
        with pytest.raises(GroupError, match="OutOfMemoryError") as caught:
            group.forward(Split(rows))
        assert {rank: one.kind for rank, one in caught.value.failures.items()} == {0: "collateral", 1: "raised"}
        assert caught.value.primary == caught.value.failures[1]
        assert group.state.value == "broken"
        group.restart()
        assert [rank.device for rank in group.ranks] == ["sim:0", "sim:0"]
        assert torch.equal(group.forward(Split(rows)), expected)


def limit_rank(rank: int) -> None:
    """Leave one rank no memory."""
    if torch.distributed.get_rank() == rank:
        limit_memory(0)


def check_plan_and_preflight(path: Path) -> None:
    """A plan counts what a load then takes, and the preflight shows the GPUs of the group."""
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    for offload in (False, True):
        # The largest ring of the transports, so that the load is what takes most.
        options: dict[str, Any] = {"loading": Loading("broadcast"), "sharding": Sharding(cpu_offload=offload)}
        plan = ShardedModelGroup.plan(path, model=make_layers, device="sim", world_size=2, **options)
        with group_of(path, **options) as group:
            peaks = [report["peak_device_bytes"] for report in group.status()["ranks"]]
            preflight = group.preflight_report
        assert peaks == pytest.approx([rank.device_bytes - CONTEXT_BYTES for rank in plan.ranks], rel=0.02)
        assert preflight is not None
        assert [len(node.gpu_free_bytes) for node in preflight.nodes] == [2]


def square(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum and count of the squares."""
    return (output - targets).square().sum(), output.numel()
