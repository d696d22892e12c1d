"""Groups through Ray on accelerators, in a driver of its own, which uses none.

Run as `python -m tests.gpu.group_checks FOLDER KIND WORLD_SIZE CHECK...`; prints check → traceback as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from raysharding import CallTimeoutError, GroupError, Placement, ShardedModelGroup, Split, Timeouts
from tests import forking
from tests.accelerator.build import load_extension
from tests.accelerator.fault_checks import hang_on_rank_1, kill_device
from tests.accelerator.group_checks import make_model
from tests.distributed.checks import outcome_of
from tests.gpu.checks import contexts

CALL_S = 5.0


def group_of(path: Path, kind: str, world_size: int) -> ShardedModelGroup:
    """A group with one rank on each device, or several where there are fewer devices."""
    runtime_env = {"env_vars": {forking.DEVICE: "sim"}} if kind == "sim" else None
    gpus_per_rank = min(1.0, ray.cluster_resources()["GPU"] / world_size)
    return ShardedModelGroup.from_checkpoint(
        path,
        model=make_model,
        device=kind,
        world_size=world_size,
        placement=Placement(runtime_env=runtime_env, gpus_per_rank=gpus_per_rank),
        timeouts=Timeouts(call_s=CALL_S),
    )


def assert_forward(group: ShardedModelGroup, path: Path) -> None:
    """The group computes what the CPU does."""
    reference = make_model().eval().requires_grad_(False)
    reference.load_state_dict(load_file(path))
    batch = torch.linspace(-1, 1, 64).view(8, 8)
    torch.testing.assert_close(group.forward(Split(batch)), reference(batch), rtol=1e-3, atol=1e-4)


def check_contexts_of_a_group(path: Path, kind: str, world_size: int) -> None:
    """Ranks have contexts on their own devices, and the driver has none."""
    with group_of(path, kind, world_size) as group:
        assert_forward(group, path)
        if kind == "cuda":
            found = contexts({rank.pid for rank in group.ranks})
            assert len(found) == world_size, found
            assert not torch.cuda.is_initialized()
        else:
            assert not load_extension().touched()


def check_dead_devices(path: Path, kind: str, world_size: int) -> None:
    """After a device-side assert the group is broken, and a restart on new processes makes it whole."""
    with group_of(path, kind, world_size) as group:
        with pytest.raises(GroupError, match="device-side assert"):
            group.call(kill_device)
        assert group.state.value == "broken", group.state
        group.restart()
        assert_forward(group, path)


def check_hang(path: Path, kind: str, world_size: int) -> None:
    """A hang is ended, names the rank that hangs, and the group restarts."""
    with group_of(path, kind, world_size) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.0)
        begun = time.monotonic()
        with pytest.raises(CallTimeoutError) as caught:
            group.train_step(Split(torch.ones(8, 8)), targets=Split(torch.zeros(8, 4)), loss=hang_on_rank_1)
        assert time.monotonic() - begun < CALL_S + 10
        waits = {rank: "waits in a collective" in one.message for rank, one in caught.value.failures.items()}
        assert waits == {rank: rank != 1 for rank in range(world_size)}
        assert caught.value.primary == caught.value.failures[1]
        group.restart()
        assert_forward(group, path)


CHECKS = (check_contexts_of_a_group, check_dead_devices)
SEVERAL = (check_hang,)
"""Checks of two ranks or more."""


def main(folder: Path, kind: str, world_size: int, names: list[str]) -> None:
    """Run checks on one cluster."""
    if kind == "sim":
        from tests.accelerator.device import register

        register()
    path = folder / "model.safetensors"
    save_file(make_model().state_dict(), path)
    with forking.worker_python() as program:
        with forking.ray_starts_with(program):
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            options |= {"num_gpus": 4} if kind == "sim" else {}
            ray.init("local", num_cpus=8, runtime_env=forking.runtime_env(), **options)
        outcomes = {name: outcome_of(partial(globals()[name], path, kind, world_size)) for name in names}
        ray.shutdown()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
