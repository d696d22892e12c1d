"""Groups through Ray whose ranks compute on the simulated device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding import (
    CallTimeoutError,
    FitStep,
    GroupError,
    Loading,
    Placement,
    PlacementError,
    PreflightError,
    ShardedModelGroup,
    Sharding,
    Split,
    Timeouts,
    current_worker,
)
from raysharding.group.cluster import accelerator_names, rank_need
from raysharding.group.launch import copy_weights
from raysharding.group.launch.memory_plan import CONTEXT_BYTES
from tests import forking
from tests.accelerator.build import load_extension
from tests.accelerator.device import register, sim
from tests.accelerator.fault_checks import hang_on_rank_1, kill_device, lost_loss, read_beside_rank_1
from tests.distributed.checks import outcome_of

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


def memory_group(path: Path, **options: Any) -> ShardedModelGroup:
    """Two ranks on the simulated device."""
    options = {"model": make_layers, "placement": PLACEMENT, "world_size": 2, **options}
    return ShardedModelGroup.from_checkpoint(path, device="sim", **options)


def assert_as_planned(group: ShardedModelGroup, path: Path, offload: bool) -> None:
    """Assert that the load has taken what a plan counts, and that the preflight shows the GPUs of the group."""
    sharding = Sharding(cpu_offload=offload)
    options: dict[str, Any] = {"device": "sim", "loading": LOADING, "sharding": sharding}
    plan = ShardedModelGroup.plan(path, model=make_layers, world_size=2, **options)
    peaks = [report["peak_device_bytes"] for report in group.status()["ranks"]]
    assert peaks == pytest.approx([rank.device_bytes - CONTEXT_BYTES for rank in plan.ranks], rel=0.02)
    report: Any = group.preflight_report
    assert [len(node.gpu_free_bytes) for node in report.nodes] == [2]


def check_out_of_memory(path: Path) -> None:
    """What does not fit is refused by the preflight. A load and a forward without memory leave the weights, and give
    back what they took; a step may have changed weights on some ranks: the group is broken, until a restart.
    """
    path = path.with_name("layers.safetensors")
    save_file(make_layers().state_dict(), path)
    small = partial(limited, make_layers, 1 << 20)
    with pytest.raises(PreflightError, match=r"GPU memory of rank 0 \(sim:0 .* needed for shards and load"):
        memory_group(path, model=small)
    with pytest.raises(GroupError, match=r"raised in plan: torch\.OutOfMemoryError"):
        memory_group(path, model=small, preflight=False)
    rows = torch.randn(8, 512)
    step: dict[str, Any] = {"targets": Split(rows), "loss": square}
    with memory_group(path, loading=LOADING) as group:
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
    with memory_group(path, loading=LOADING, sharding=Sharding(cpu_offload=True)) as group:
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


def make_model() -> nn.Module:
    """The model of the checkpoint."""
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.GELU(), nn.Linear(16, 4))


def mse(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of the squares."""
    return (output - targets).square().mean()


def touched() -> list[int]:
    """Devices that this rank's process has used."""
    from tests.accelerator.build import load_extension

    return sorted(load_extension().touched())


def group_of(path: Path, **options: Any) -> ShardedModelGroup:
    """A group on the simulated device."""
    options.setdefault("placement", PLACEMENT)
    return ShardedModelGroup.from_checkpoint(path, model=make_model, device="sim", **options)


def check_placement_and_training(path: Path) -> None:
    """One rank per GPU by default, each on its own device, with the loss curve of one process."""
    with group_of(path) as group:
        assert [rank.device for rank in group.ranks] == [f"sim:{index}" for index in range(4)]
        assert_trains(group, path)
        assert list(group.call(touched)) == [[0], [1], [2], [3]], "a rank has used another's device"
        assert len(group.memory_summary().splitlines()) == 5


def check_ranks_that_share_gpus(path: Path) -> None:
    """Two ranks of a group on each device compute what one process does, and see each device once.

    The one that had no memory left is named as the cause; the group is broken, since others waited in a collective.
    """
    with group_of(path, world_size=4, placement=replace(PLACEMENT, gpus_per_rank=0.5)) as group:
        assert [rank.device for rank in group.ranks] == ["sim:0", "sim:0", "sim:1", "sim:1"]
        assert [rank.local_rank for rank in group.ranks] == [0, 1, 2, 3]
        given, variables = zip(*group.call(gpus_and_variables), strict=True)
        assert given[0] == given[1] != given[2] == given[3], given
        assert {one["CUDA_VISIBLE_DEVICES"] for one in variables} == {",".join((*given[0], *given[2]))}
        group.call(limit_rank_1)
        with pytest.raises(GroupError, match="OutOfMemoryError") as caught:
            group.forward(Split(torch.randn(8, 8)))
        assert {rank for rank, one in caught.value.failures.items() if one.kind == "raised"} == {1}
        assert {one.kind for rank, one in caught.value.failures.items() if rank != 1} == {"collateral"}
        assert caught.value.primary == caught.value.failures[1]
        assert group.state.value == "broken"
        group.restart()
        assert [rank.device for rank in group.ranks] == ["sim:0", "sim:0", "sim:1", "sim:1"]
        assert_trains(group, path)
        assert list(group.call(touched)) == [[0], [0], [1], [1]]
        *table, first, second = group.memory_summary().splitlines()
        assert len(table) == 5
        assert "is shared by ranks 0, 1: " in first, first
        assert "is shared by ranks 2, 3: " in second, second
        report: Any = group.preflight_report
        assert [len(node.gpu_free_bytes) for node in report.nodes] == [2]


def check_groups_that_share_gpus(path: Path) -> None:
    """Two groups have a rank each on the same devices; a copy between them goes through host memory and says so."""
    parts = (replace(PLACEMENT, gpus_per_rank=part) for part in (0.6, 0.4))
    with (
        group_of(path, world_size=2, placement=next(parts)) as trainer,
        group_of(path, world_size=2, placement=next(parts)) as generator,
    ):
        for group in (trainer, generator):
            assert [rank.device for rank in group.ranks] == ["sim:0", "sim:1"]
        assert list(trainer.call(gpus_and_variables)) == list(generator.call(gpus_and_variables))
        assert_trains(trainer, path)
        report = trainer.copy_to(generator)
        assert not report.is_through_device
        assert (report.wire_bytes, report.shared_bytes) == (0, report.num_bytes)
        assert "through shared memory" in str(report)
        wanted, found = trainer.state_dict(), generator.state_dict()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def limit_rank_1() -> None:
    """Leave one rank no memory."""
    if current_worker().rank == 1:
        limit_memory(0)


def assert_trains(group: ShardedModelGroup, path: Path) -> None:
    """Assert that a group computes what one process does, forward and in training."""
    reference = make_model()
    reference.load_state_dict(load_file(path))
    rows, targets = torch.randn(8, 8), torch.randn(8, 4)
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


def check_copies_between_groups(path: Path) -> None:
    """Weights go from device to device through the devices' backend, and to a group on CPUs through host memory.

    Code on a CPU rank that asks for a GPU gets none, so that it makes no context on one.
    """
    with (
        group_of(path, world_size=2) as source,
        group_of(path, world_size=1) as target,
        ShardedModelGroup.from_checkpoint(path, model=make_model, device="cpu", world_size=2) as on_cpus,
    ):
        assert_masks(source)
        assert list(on_cpus.call(gpus_and_variables)) == [([], {"CUDA_VISIBLE_DEVICES": ""})] * 2, "makes a context"
        source.call(add, 1.0)
        for bucket_bytes in (16 << 20, 256):
            copy_weights._BUCKET_BYTES = bucket_bytes
            for other in (target, on_cpus):
                source.call(delay)
                for staged in (False, True):
                    source.call(add, 0.5)
                    report = source.copy_to(other, staged=staged)
                    assert bool(report.wire_bytes) == report.is_through_device == (other is target), report
                    assert bool(report.shared_bytes) == (other is on_cpus), report
                    wanted, found = source.state_dict(), other.state_dict()
                    assert all(torch.equal(wanted[name], found[name]) for name in wanted), other
            on_cpus.call(add, 2.0)
            on_cpus.copy_to(target)
            wanted, found = on_cpus.state_dict(), target.state_dict()
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def add(step: float) -> None:
    """Change the weights."""
    with torch.no_grad():
        for parameter in current_worker().module.parameters():
            parameter.add_(step)


def delay() -> None:
    """Make asynchronous copies late: whoever forgets to wait reads old bytes."""
    from tests.accelerator.build import load_extension

    load_extension().set_copy_delay_us(2000)
    load_extension().set_collective_delay_us(6000)


def assert_masks(group: ShardedModelGroup) -> None:
    """Ray masks nothing, on ROCm neither: each rank of a node sees the group's GPUs on it, in the order of ranks."""
    given, variables = zip(*group.call(gpus_and_variables), strict=True)
    seen = ",".join(gpu for gpus in given for gpu in gpus)
    assert sorted(seen.split(",")) == sorted({*seen.split(",")} & set("0123")), seen
    noset = {f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES": "1" for kind in ("CUDA", "HIP")}
    assert variables == ({**noset, "CUDA_VISIBLE_DEVICES": seen},) * 2


def gpus_and_variables() -> tuple[list[str], dict[str, str]]:
    """The GPUs that Ray gave to this rank, and the variables of its process that say which it sees."""
    variables = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" in name}
    return ray.get_runtime_context().get_accelerator_ids()["GPU"], variables


def make_dropout_model() -> nn.Module:
    """A model with drop-out, whose masks come from the device's generator."""
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The model's inputs and targets."""
    columns = {name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in ("x", "y")}
    return {"input": columns["x"], "targets": columns["y"].unsqueeze(1)}


def check_fit(path: Path) -> None:
    """A fit that loses a rank goes on from its last save, in the background, with the losses of an undisturbed one."""
    path = path.with_name("dropout.safetensors")
    save_file(make_dropout_model().state_dict(), path)
    rows = torch.randn(64, 8)
    data = path.with_name("rows.parquet")
    pq.write_table(pa.table({"x": rows.tolist(), "y": rows.sum(1).tolist()}), data)
    options: dict[str, Any] = {"batch_size": 8, "collate_fn": collate, "loss": mse, "max_steps": 6, "epochs": 2}
    model: dict[str, Any] = {"model": make_dropout_model, "device": "sim", "placement": PLACEMENT, "world_size": 2}
    model["optimizer"] = torch.optim.AdamW
    with ShardedModelGroup.from_checkpoint(path, **model) as group:
        expected = group.fit(data, **options).history["loss"]
        evaluated = group.evaluate(data, batch_size=8, collate_fn=collate, loss=mse)

    def kill(step: FitStep) -> None:
        if step.num_steps == 5 and not killed:
            killed.append(group.ranks[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    with ShardedModelGroup.from_checkpoint(path, max_restarts=1, **model) as group:
        saves: dict[str, Any] = {"save_to": path.with_name("saves"), "save_every": 2, "async_save": True}
        report = group.fit(data, callbacks=[kill], **saves, **options)
        assert killed
        assert report.history["loss"] == expected
        assert group.evaluate(data, batch_size=8, collate_fn=collate, loss=mse) == evaluated


def check_streams(path: Path) -> None:
    """The thread of a stream computes on its rank's device, with ids of one process; the next call does, too."""
    from tests.models.architectures import ARCHITECTURES

    path = path.with_name("llama")
    ARCHITECTURES["llama"].make().save_pretrained(path)
    prompts, options = torch.randint(3, 60, (5, 4)), dict[str, Any](max_new_tokens=6, do_sample=False)
    with ShardedModelGroup.from_checkpoint(path, device="sim", placement=PLACEMENT, world_size=2) as group:
        expected = group.generate(Split(prompts), **options)
        for gathers in (None, False):
            call = group.generate.remote(Split(prompts), stream=True, summon_full_params=gathers, **options)
            assert list(call.stream(60))
            assert torch.equal(call.result(), expected), gathers
            assert list(group.call(touched)) == [[0], [1]], gathers
        assert torch.equal(group.generate(Split(prompts), **options), expected)


def check_too_few_gpus(path: Path) -> None:
    """More ranks than GPUs are refused at once; GPUs that are in use are waited for."""
    begun = time.monotonic()
    cures = r'infeasible: even when idle, the cluster has space for 4 ranks; use fewer, .*; with device="cpu"'
    with pytest.raises(PlacementError, match=cures) as refused:
        group_of(path, world_size=5, timeouts=Timeouts(place_s=30))
    assert time.monotonic() - begun < 30, "not waited for"
    assert refused.value.need == {"CPU": 1.0, "GPU": 1.0}
    assert [node["GPU"] for node in refused.value.have.values()] == [4.0]
    squatter = placement_group([{"GPU": 1}])
    assert squatter.wait(20)
    with pytest.raises(PlacementError, match=r'within 1 s; busy: .*device="cpu"'):
        group_of(path, world_size=4, timeouts=Timeouts(place_s=1))
    remove_placement_group(squatter)


def check_names_of_other_accelerators(path: Path) -> None:
    """A rank on an Ascend or Gaudi device asks Ray for that, and Ray leaves its mask alone."""
    for device_type in ("npu", "hpu"):
        names = accelerator_names(device_type)
        assert rank_need(device_type, Placement()) == {"CPU": 1.0, names.resource: 1.0}
        task = ray.remote(num_cpus=0, resources={names.resource: 1})(lambda name=names.visible_devices: os.getenv(name))
        assert ray.get(task.remote()) == "0"
        unmasked = task.options(runtime_env={"env_vars": dict.fromkeys(names.noset, "1")})
        assert ray.get(unmasked.remote()) is None
    assert accelerator_names("xpu").visible_devices == "ZE_AFFINITY_MASK"
    assert rank_need("sim", Placement()) == {"CPU": 1.0, "GPU": 1.0}


AS_A_PROGRAM = """
import runpy, sys
from tests.accelerator.device import register
register()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(path: Path, *arguments: str, ends_with: str) -> None:
    """An example runs to its end on the simulated device, by a driver that joins this cluster."""
    folder = path.parent / Path(arguments[0]).stem
    command = [sys.executable, "-c", AS_A_PROGRAM, *arguments, "--device", "sim", "--out", str(folder)]
    workers = json.dumps({"runtime_env": {**forking.runtime_env(), **(PLACEMENT.runtime_env or {})}})
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_JOB_CONFIG_JSON_ENV_VAR": workers}
    done = subprocess.run(command, env={**os.environ, **address}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert ends_with in done.stdout, done.stdout


def check_quickstart(path: Path) -> None:
    """The first example, on two of the four GPUs."""
    run_example(path, "examples/quickstart.py", ends_with="rank 1  sim:1")


def check_finetune(path: Path) -> None:
    """The second example, on all four GPUs, then on one."""
    run_example(path, "examples/finetune.py", "--steps", "6", ends_with="4 rank(s): step 3,")


def check_group_of_dead_devices(path: Path) -> None:
    """Every rank raised alike; the group is broken nevertheless."""
    with group_of(path, world_size=2) as group:
        with pytest.raises(GroupError, match="device-side assert") as caught:
            group.call(kill_device)
        assert group.state.value == "broken", group.state
        assert set(caught.value.failures) == {0, 1}


def check_group_that_hangs(path: Path) -> None:
    """The rank that hangs is named, and the other one is said to wait for it, also in a function of the user's."""
    with group_of(path, world_size=2, timeouts=Timeouts(call_s=3.0)) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.0)
        with pytest.raises(CallTimeoutError) as caught:
            group.train_step(Split(torch.ones(4, 8)), targets=Split(torch.zeros(4, 4)), loss=hang_on_rank_1)
        waits = {rank: "waits in a collective" in one.message for rank, one in caught.value.failures.items()}
        assert waits == {0: True, 1: False}
        assert caught.value.primary == caught.value.failures[1]
        group.restart()
        with pytest.raises(CallTimeoutError) as caught:
            group.call(read_beside_rank_1)
        assert caught.value.primary == caught.value.failures[1]
        waits = {rank: "computes, or waits for other" in one.message for rank, one in caught.value.failures.items()}
        assert waits == {0: True, 1: False}


def check_group_that_loses_a_rank_in_the_backward(path: Path) -> None:
    """The other rank's update was queued, and may have run: the group is broken, and its weights are those of files."""
    rows: dict[str, Any] = {"targets": Split(torch.zeros(4, 4))}
    with group_of(path, world_size=2, timeouts=Timeouts(call_s=5.0)) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        expected = group.forward(Split(torch.ones(4, 8)))
        for how in ("raises", "dies", "hangs"):
            with pytest.raises(GroupError) as caught:
                group.train_step(Split(torch.ones(4, 8)), loss=partial(lost_loss, how), **rows)
            primary: Any = caught.value.primary
            assert primary.rank == 1, how
            assert group.state.value == "broken", how
            assert group.restart().checkpoint == str(path), how
            torch.testing.assert_close(group.forward(Split(torch.ones(4, 8))), expected)


CHECKS = [name for name in list(globals()) if name.startswith("check_")]
FULL = {"check_quickstart", "check_finetune", "check_group_of_dead_devices", "check_group_that_hangs"}
FULL.add("check_group_that_loses_a_rank_in_the_backward")
"""Those of the whole grid."""


def main(folder: Path, names: list[str]) -> None:
    """Run checks on one cluster."""
    register()
    torch.manual_seed(0)
    path = folder / "model.safetensors"
    save_file(make_model().state_dict(), path)
    with forking.worker_python() as program:
        with forking.ray_starts_with(program):
            options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            options["resources"] = {"NPU": 1, "HPU": 1}
            ray.init("local", num_cpus=8, num_gpus=4, runtime_env=forking.runtime_env(), **options)
        outcomes = {name: outcome_of(partial(globals()[name], path)) for name in names}
        ray.shutdown()
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """Check → traceback, of one driver that ran all that this session asks for."""
    names = [item.name.partition("[")[2].rstrip("]") for item in request.session.items if item.path == request.path]
    folder = str(tmp_path_factory.mktemp("groups"))
    command = [sys.executable, "-m", "tests.accelerator.test_groups", folder, *names]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert driver.returncode == 0, driver.stderr
    return json.loads(driver.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in CHECKS])
def test_group(check: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[check], outcomes[check]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
