"""Memory of the ranks of a group: `group_checks` runs these in its driver."""

from __future__ import annotations

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

LOADING = Loading("broadcast")
"""The largest ring of the transports, so that the load is what takes most."""
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


def assert_as_planned(group: ShardedModelGroup, path: Path, offload: bool) -> None:
    """Assert that the load has taken what a plan counts, and that the preflight shows the GPUs of the group."""
    sharding = Sharding(cpu_offload=offload)
    plan = ShardedModelGroup.plan(
        path, model=make_layers, device="sim", world_size=2, loading=LOADING, sharding=sharding
    )
    peaks = [report["peak_device_bytes"] for report in group.status()["ranks"]]
    assert peaks == pytest.approx([rank.device_bytes - CONTEXT_BYTES for rank in plan.ranks], rel=0.02)
    assert group.preflight_report is not None
    assert [len(node.gpu_free_bytes) for node in group.preflight_report.nodes] == [2]


def check_out_of_memory(path: Path) -> None:
    """What does not fit is refused by the preflight. A load and a forward without memory leave the weights, and give
    back what they took; a step may have changed weights on some ranks: the group is broken, until a restart.
    """
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    small = partial(limited, make_layers, 1 << 20)
    with pytest.raises(PreflightError, match=r"GPU memory of rank 0 \(sim:0 .* needed for shards and load"):
        group_of(path, model=small)
    with pytest.raises(GroupError, match=r"raised in plan: torch\.OutOfMemoryError"):
        group_of(path, model=small, preflight=False)
    rows = torch.randn(8, 512)
    step: dict[str, Any] = {"targets": Split(rows), "loss": square}
    with group_of(path, loading=LOADING) as group:
        assert_as_planned(group, path, offload=False)
        expected, used = group.forward(Split(rows)), list(group.call(allocated))
        for work, left in ((partial(group.load, path), 1 << 20), (partial(group.forward, Split(rows)), 0)):
            group.call(limit_memory, left)
            with pytest.raises(GroupError, match="OutOfMemoryError"):
                work()
            assert group.state.value == "ready"
            assert list(group.call(allocated)) == used
            group.call(limit_memory, None)
            if left:
                group.load(path)
            assert torch.equal(group.forward(Split(rows)), expected)
            assert list(group.call(allocated)) == used
        group.set_optimizer(LimitedAdamW, lr=0.01)
        with pytest.raises(GroupError, match="OutOfMemoryError"):
            group.train_step(Split(rows), **step)
        assert group.state.value == "broken"
        report = group.restart()
        assert list(group.call(allocated)) == used, report
        group.set_optimizer(torch.optim.AdamW, lr=1e-4)
        losses = [group.train_step(Split(rows), **step)["loss"] for _ in range(3)]
        assert losses[2] < losses[0], losses


def check_offload(path: Path) -> None:
    """Under offload a load takes what the plan counts, and a restart brings the optimizer's state to host memory."""
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    folder = path.parent / "offloaded"
    rows = torch.randn(8, 512)
    step: dict[str, Any] = {"targets": Split(rows), "loss": square}
    with group_of(path, loading=LOADING, sharding=Sharding(cpu_offload=True)) as group:
        assert_as_planned(group, path, offload=True)
        group.set_optimizer(torch.optim.AdamW, lr=1e-4)
        group.train_step(Split(rows), **step)
        group.save(folder, optimizer=True)
        expected = group.train_step(Split(rows), **step)["loss"]
        group.restart(folder)
        found = group.train_step(Split(rows), **step)["loss"]
        assert found == expected, (found, expected)


def square(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum and count of the squares."""
    return (output - targets).square().sum(), output.numel()
