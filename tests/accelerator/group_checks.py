"""A driver of its own, on a cluster with four of Ray's GPUs, whose ranks compute on the simulated device.

Run as `python -m tests.accelerator.group_checks FOLDER`; prints check → traceback as JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding import GroupError, Placement, ShardedModelGroup, Sharding, Split
from tests import forking
from tests.accelerator.device import register
from tests.distributed.checks import outcome_of

RUNTIME_ENV = {"env_vars": {forking.DEVICE: "sim"}}


def make_model() -> nn.Module:
    """The model of the checkpoint."""
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.GELU(), nn.Linear(16, 4))


def square(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum and count of the squares."""
    return (output - targets).square().sum(), output.numel()


def touched() -> list[int]:
    """Devices that this rank's process has used."""
    from tests.accelerator.build import load_extension

    return sorted(load_extension().touched())


def group_of(path: Path, **options: Any) -> ShardedModelGroup:
    """A group on the simulated device."""
    options.setdefault("placement", Placement(runtime_env=RUNTIME_ENV))
    return ShardedModelGroup.from_checkpoint(path, model=make_model, device="sim", **options)


def check_placement_and_training(path: Path) -> None:
    """One rank per GPU by default, each on its own device, with the loss curve of one process."""
    reference = make_model()
    reference.load_state_dict(load_file(path))
    rows, targets = torch.randn(8, 8), torch.randn(8, 4)
    with group_of(path) as group:
        assert [rank.device for rank in group.ranks] == [f"sim:{index}" for index in range(4)]
        output = group.forward(Split(rows))
        torch.testing.assert_close(output, reference(rows))
        group.set_optimizer(torch.optim.AdamW, lr=0.01)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
        for _ in range(3):
            metrics = group.train_step(Split(rows), targets=Split(targets), loss=square)
            loss = nn.functional.mse_loss(reference(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert abs(metrics["loss"] - loss.item()) < 1e-5
        assert list(group.call(touched)) == [[0], [1], [2], [3]], "a rank has used another's device"
        assert len(group.memory_summary().splitlines()) == 5


def check_offload_and_restart(path: Path) -> None:
    """Under offload the optimizer's state is in host memory after a restart, too, and training goes on."""
    rows, targets = torch.randn(8, 8), torch.randn(8, 4)
    folder = path.parent / "offloaded"
    with group_of(path, world_size=2, sharding=Sharding(cpu_offload=True)) as group:
        group.set_optimizer(torch.optim.AdamW, lr=0.01)
        group.train_step(Split(rows), targets=Split(targets), loss=square)
        group.save(folder, optimizer=True)
        expected = group.train_step(Split(rows), targets=Split(targets), loss=square)["loss"]
        group.restart(folder)
        found = group.train_step(Split(rows), targets=Split(targets), loss=square)["loss"]
        assert found == expected, (found, expected)


def check_out_of_memory(path: Path) -> None:
    """Out of memory on one rank is told as such, and the memory is back."""
    with group_of(path, world_size=2) as group:
        rows = torch.randn(8, 8)
        expected = group.forward(Split(rows))
        used = group.call(allocated)
        group.call(limit_to_what_is_used)
        with pytest.raises(GroupError, match="OutOfMemoryError"):
            group.forward(Split(rows))
        assert group.state.value == "ready", group.state
        group.call(no_limit)
        assert torch.equal(group.forward(Split(rows)), expected)
        assert list(group.call(allocated)) == list(used)


def allocated() -> int:
    """Bytes of the rank's device."""
    return int(torch.get_device_module("sim").memory_allocated())


def limit_to_what_is_used() -> None:
    """No further allocation succeeds."""
    from tests.accelerator.build import load_extension

    load_extension().set_limit(torch.get_device_module("sim").current_device(), allocated())


def no_limit() -> None:
    """Undo it."""
    from tests.accelerator.build import load_extension

    load_extension().set_limit(torch.get_device_module("sim").current_device(), None)


CHECKS = (check_placement_and_training, check_offload_and_restart, check_out_of_memory)


def main(folder: Path) -> None:
    """Run all checks on one cluster."""
    register()
    torch.manual_seed(0)
    path = folder / "model.safetensors"
    save_file(make_model().state_dict(), path)
    with forking.worker_python() as program:
        with forking.ray_starts_with(program):
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            ray.init("local", num_cpus=8, num_gpus=4, runtime_env=forking.runtime_env(), **options)
        outcomes = {check.__name__: outcome_of(partial(check, path)) for check in CHECKS}
        ray.shutdown()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
