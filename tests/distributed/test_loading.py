"""`load_checkpoint` and `save_checkpoint` on 4 ranks: odd shapes, dtypes, errors that reach everybody, counters."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import gather_state_dict, init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.layout import local_tensor, module_tensors
from raysharding.errors import CheckpointError, PlanError
from raysharding.models import build_module
from tests.distributed.models import Odd, filled
from tests.spawn import run_ranks


def sharded(path: str | Path, sharding: Sharding | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """An `Odd` on meta, cut over all ranks."""
    module = build_module(Odd, open_checkpoint(path), dtype)
    return shard_module(module, init_mesh("cpu", sharding), sharding)


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, on rank 0."""
    return {name: tensor for part in gather_state_dict(module) for name, tensor in part.items()}


def raised_everywhere(fn: Callable[[], Any]) -> list[str]:
    """Run `fn` on every rank; rank → what it raised."""
    try:
        fn()
        outcome = ""
    except (CheckpointError, PlanError) as error:
        outcome = f"{type(error).__name__}: {error}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcomes


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(world_size, fn, *args, timeout_s=60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "model.safetensors"
    state = {name: tensor for name, tensor in filled().state_dict().items() if name != "head.weight"}
    save_file(state, path)
    return path


def check_odd_shapes(path: str) -> None:
    expected = filled().state_dict()
    reports = []
    for transport, bucket_bytes in (("scatter", 64 << 10), ("broadcast", 64 << 10), ("auto", 32 << 20)):
        module = sharded(path)
        reports.append(load_checkpoint(module, path, loading=Loading(transport=transport, bucket_bytes=bucket_bytes)))
        assert module.head.weight is module.embed.weight
        assert module.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
        state = full_state(module)
        if dist.get_rank() == 0:
            assert set(state) == set(expected)
            for name, tensor in expected.items():
                assert state[name].dtype == tensor.dtype, name
                assert torch.equal(state[name], tensor), name
        ids = torch.arange(8).view(2, 4)
        with torch.no_grad():
            torch.testing.assert_close(module.eval()(ids), filled()(ids), rtol=0, atol=1e-6)
    assert [report.transport for report in reports] == ["scatter", "broadcast", "scatter"]
    assert reports[0].num_buckets > 1
    assert reports[2].num_buckets == 1


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 4])
def test_odd_shapes_ties_and_buffers(world_size: int, checkpoint: Path) -> None:
    on_ranks(world_size, check_odd_shapes, str(checkpoint))


def check_replicas(path: str) -> None:
    sharding = Sharding(replicate_size=2)
    module = sharded(path, sharding)
    load_checkpoint(module, path)
    state = full_state(module)
    if dist.get_rank() == 0:
        for name, tensor in filled().state_dict().items():
            assert torch.equal(state[name], tensor), name
    for name, tensor in module_tensors(module).items():
        mine = local_tensor(tensor).contiguous()
        parts = [torch.empty_like(mine) for _ in range(2)]
        mesh = module.embed.weight.device_mesh
        dist.all_gather(parts, mine, group=mesh.get_group("replicate"))
        assert torch.equal(parts[0], parts[1]), name


@pytest.mark.timeout(90)
def test_replicas_hold_the_same(checkpoint: Path) -> None:
    on_ranks(4, check_replicas, str(checkpoint))


def check_dtypes(root: str) -> None:
    for file_dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for target in (torch.float32, torch.bfloat16, torch.float16):
            path = f"{root}/{str(file_dtype).removeprefix('torch.')}.safetensors"
            module = sharded(path, dtype=target)
            report = load_checkpoint(module, path, loading=Loading(bucket_bytes=64 << 10))
            narrower = min(file_dtype.itemsize, target.itemsize)
            floats = sum(value.numel() for value in load_file(path).values() if value.is_floating_point())
            if dist.get_rank() == 0:
                # All but rank 0's own quarter of the big tensors leaves rank 0, in the narrower dtype.
                assert report.wire_bytes <= 3 * floats * narrower + 40_000
            state = full_state(module)
            for name, tensor in (load_file(path) if dist.get_rank() == 0 else {}).items():
                want = tensor.to(target) if tensor.is_floating_point() else tensor
                assert state[name].dtype == want.dtype, name
                assert torch.equal(state[name], want), (name, file_dtype, target)


@pytest.mark.timeout(90)
def test_every_dtype_into_every_dtype(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in filled().state_dict().items() if name != "head.weight"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        save_file(cast, tmp_path / f"{str(dtype).removeprefix('torch.')}.safetensors")
    on_ranks(4, check_dtypes, str(tmp_path))


def check_plan_errors(root: str) -> None:
    for transport in ("scatter", "broadcast"):
        loading = Loading(transport=transport)
        path = f"{root}/bad.safetensors"
        errors = raised_everywhere(lambda: load_checkpoint(sharded(path), path, loading=loading))
        for error in errors:
            assert error.startswith("PlanError")
            for name in ("blocks.0.weight", "narrow", "extra", "table"):
                assert name in error, error
    missing = raised_everywhere(lambda: load_checkpoint(sharded(path), f"{root}/nowhere.safetensors"))
    assert all(error.startswith("CheckpointError") and "nowhere" in error for error in missing), missing


@pytest.mark.timeout(90)
def test_every_mismatch_is_listed_once_on_every_rank(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in filled().state_dict().items() if name != "head.weight"}
    del state["blocks.0.weight"]
    state["narrow"] = torch.zeros(3, 64)
    state["extra"] = torch.zeros(1)
    state["table"] = torch.zeros(3, 4)
    save_file(state, tmp_path / "bad.safetensors")
    on_ranks(2, check_plan_errors, str(tmp_path))


def check_a_model_that_differs(path: str) -> None:
    module = build_module(Odd, open_checkpoint(path), torch.float32 if dist.get_rank() == 0 else torch.bfloat16)
    shard_module(module, init_mesh("cpu"))
    errors = raised_everywhere(lambda: load_checkpoint(module, path))
    assert all("ranks 1 built another model" in error for error in errors), errors


@pytest.mark.timeout(90)
def test_ranks_with_different_models_are_told_before_data_moves(checkpoint: Path) -> None:
    on_ranks(2, check_a_model_that_differs, str(checkpoint))


def check_broken_stream(root: str) -> None:
    for transport in ("scatter", "broadcast"):
        path = Path(root) / f"{transport}-{dist.get_world_size()}.safetensors"
        checkpoint = open_checkpoint(path)
        module = sharded(path)
        dist.barrier()
        if dist.get_rank() == 0:
            os.truncate(path, path.stat().st_size // 2)
        loading = Loading(transport=transport, bucket_bytes=64 << 10)
        errors = raised_everywhere(lambda: load_checkpoint(module, checkpoint, loading=loading, stall_s=20))  # noqa: B023
        assert all(error.startswith("CheckpointError") for error in errors), errors
        # The group is as good as before: nothing of the broken load is left in flight.
        good = Path(root) / "good.safetensors"
        load_checkpoint(module, good, loading=loading)
        state = full_state(module)
        if dist.get_rank() == 0:
            for name, tensor in filled().state_dict().items():
                assert torch.equal(state[name], tensor), name


@pytest.mark.timeout(90)
def test_a_file_that_shrinks_is_everybodys_error_and_the_group_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    for name in ("scatter-3", "broadcast-3", "good"):
        (tmp_path / f"{name}.safetensors").write_bytes(checkpoint.read_bytes())
    on_ranks(3, check_broken_stream, str(tmp_path))


def check_saves(path: str, root: str) -> None:
    module = sharded(path)
    load_checkpoint(module, path)
    target = f"{root}/saved"
    report = save_checkpoint(module, target)
    assert report.num_bytes == sum(t.numel() * t.itemsize for t in full_sizes(path).values())
    assert any("exists already" in e for e in raised_everywhere(lambda: save_checkpoint(module, target)))
    save_checkpoint(module, target, overwrite=True)
    again = sharded(path)
    load_checkpoint(again, target)
    state = full_state(again)
    if dist.get_rank() == 0:
        for name, tensor in filled().state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert os.listdir(root) == ["saved"]


def full_sizes(path: str) -> dict[str, torch.Tensor]:
    return load_file(path)


@pytest.mark.timeout(90)
def test_saves_load_again_and_leave_nothing_beside_them(checkpoint: Path, tmp_path: Path) -> None:
    on_ranks(3, check_saves, str(checkpoint), str(tmp_path))


def check_full_disk(path: str, small: str) -> None:
    module = sharded(path)
    load_checkpoint(module, path)
    target = f"{small}/saved"
    save_checkpoint(module, target)
    wide = sharded(path, dtype=torch.float64)
    load_checkpoint(wide, path)
    with open(f"{small}/filler", "wb") as filler:
        if dist.get_rank() == 0:
            filler.write(b"0" * max(0, os.statvfs(small).f_bavail * 4096 - 8192))
    errors = raised_everywhere(lambda: save_checkpoint(wide, target, overwrite=True))
    assert all("No space left" in error for error in errors), errors
    if dist.get_rank() == 0:
        assert sorted(os.listdir(small)) == ["filler", "saved"]
        os.unlink(f"{small}/filler")
    again = sharded(path)
    load_checkpoint(again, target)


@pytest.mark.timeout(90)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_keeps_the_old_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=3m tmpfs {small}"):
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        on_ranks(2, check_full_disk, str(checkpoint), str(small))
    finally:
        os.system(f"umount {small}")
