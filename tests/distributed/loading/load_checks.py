"""What is checked on the ranks of `test_loading.py`: odd shapes, dtypes, errors that reach everybody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from raysharding import distributed as rs
from raysharding.batch import Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding
from raysharding.distributed import init_mesh, shard_module, train_step
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.errors import CheckpointError, PlanError
from raysharding.models import build_module
from tests.distributed.models import Odd, filled
from tests.spawn import device_type

ODD = "odd.safetensors"
SOCKETS = Loading("scatter", 64 << 10, shared_memory=False)
"""A checkpoint of `Odd`."""
FILE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def sharded(path: str | Path, sharding: Sharding | None = None, dtype: torch.dtype | None = None) -> Any:
    """An `Odd` on meta, cut over all ranks."""
    module = build_module(Odd, open_checkpoint(path), dtype)
    return shard_module(module, init_mesh(device_type(), sharding), sharding)


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, on rank 0."""
    return {name: tensor for part in rs.gather_state_dict(module) for name, tensor in part.items()}


def raised_everywhere(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Run `fn` on every rank; rank → what it raised."""
    try:
        fn(*args, **kwargs)
        outcome = ""
    except (CheckpointError, PlanError) as error:
        outcome = f"{type(error).__name__}: {error}"
    return all_gather_json(outcome)


def check_odd_shapes(root: Path) -> None:
    """Every kind of tensor, bit for bit, by every transport; ties stay, buffers stay."""
    path = root / ODD
    expected = filled().state_dict()
    reports = []
    for loading in (SOCKETS, Loading("broadcast", 64 << 10), Loading("scatter", 64 << 10), Loading()):
        module = sharded(path)
        reports.append(rs.load_checkpoint(module, path, loading=loading))
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
            torch.testing.assert_close(module.eval()(ids).cpu(), filled()(ids), rtol=0, atol=1e-6)
    assert [report.transport for report in reports] == ["scatter", "broadcast", "scatter", "local"]
    # Ranks of one host share memory, not that of devices.
    several = dist.get_world_size() > 1 and device_type() == "cpu"
    assert [report.shared_bytes > 0 for report in reports] == [False, False, several, several]
    assert reports[0].num_buckets > 1
    assert reports[3].num_buckets == 2  # what is cut over the ranks, and what every rank holds whole


def token_loss(logits: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_training(root: Path) -> None:
    """Ten steps of a plain module with a callable loss give the loss curve of one process."""
    module, reference = sharded(root / ODD), filled()
    rs.load_checkpoint(module, root / ODD)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    oracle = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ids, targets = torch.arange(20).view(5, 4), torch.arange(5, 25).view(5, 4)
    batch = deal((Split(ids),), {"targets": Split(targets)}, dist.get_world_size())[dist.get_rank()]
    for step in range(10):
        # In eval mode: BatchNorm's batch statistics differ between one process and several.
        metrics = train_step(module, optimizer, batch, loss=token_loss, training=False)
        oracle.zero_grad()
        loss = token_loss(reference(ids), ids, targets)
        loss.backward()
        oracle.step()
        assert abs(metrics["loss"] - loss.item()) < 2e-6 * loss.item(), step
    state = full_state(module)
    for name, tensor in reference.state_dict().items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-4)


def require_filled(module: nn.Module) -> None:
    """Every value is the checkpoint's."""
    state = full_state(module)
    for name, tensor in filled().state_dict().items() if dist.get_rank() == 0 else ():
        assert torch.equal(state[name], tensor), name


DTYPE_LOADS = (Loading("scatter", 64 << 10), Loading("local", 64 << 10))


def check_dtypes(root: Path) -> None:
    """Files of four dtypes into models of three, in the narrower dtype on the wire."""
    targets = (torch.float32, torch.bfloat16, torch.float16)
    for file_dtype, target, loading in product(FILE_DTYPES, targets, DTYPE_LOADS):
        path = root / f"{file_dtype}.safetensors"
        module = sharded(path, dtype=target)
        report = rs.load_checkpoint(module, path, loading=loading)
        narrower = min(file_dtype.itemsize, target.itemsize)
        floats = sum(value.numel() for value in load_file(path).values() if value.is_floating_point())
        if dist.get_rank() == 0:
            # All but rank 0's own part of the sharded tensors leaves rank 0, in the narrower dtype.
            share = (dist.get_world_size() - 1) / dist.get_world_size()
            assert report.wire_bytes + report.shared_bytes <= share * floats * narrower + 10_000
        saved = root / "saves" / f"{dist.get_world_size()}-{file_dtype}-{target}"
        rs.save_checkpoint(module, saved, overwrite=True)
        state = full_state(module)
        for name, tensor in load_file(saved / "model.safetensors").items() if dist.get_rank() == 0 else ():
            assert torch.equal(state[name], tensor), name
        for name, tensor in load_file(path).items() if dist.get_rank() == 0 else ():
            want = tensor.to(target) if tensor.is_floating_point() else tensor
            assert state[name].dtype == want.dtype, name
            assert torch.equal(state[name], want), (name, file_dtype, target)


def check_plan_errors(root: Path) -> None:
    """All mismatches in one error, on every rank; a missing file too."""
    path = root / "bad.safetensors"
    for loading in (Loading("scatter"), Loading("broadcast")):
        errors = raised_everywhere(rs.load_checkpoint, sharded(path), path, loading=loading)
        for error in errors:
            assert error.startswith("PlanError")
            for name in ("blocks.0.weight", "narrow", "extra", "table"):
                assert name in error, error
    missing = raised_everywhere(rs.load_checkpoint, sharded(path), root / "nowhere.safetensors")
    assert all(error.startswith("CheckpointError") and "nowhere" in error for error in missing), missing


def check_a_model_that_differs(root: Path) -> None:
    """Ranks that built different models are told before data moves."""
    path = root / ODD
    module = build_module(Odd, open_checkpoint(path), torch.float32 if dist.get_rank() == 0 else torch.bfloat16)
    shard_module(module, init_mesh(device_type()))
    errors = raised_everywhere(rs.load_checkpoint, module, path)
    assert all("ranks 1, 2 built another model" in error for error in errors), errors


def check_options_that_differ(root: Path) -> None:
    """So are ranks that were given different options."""
    rank = dist.get_rank()
    for loading in (Loading("scatter" if rank else "broadcast"), Loading(strict=False, seed=rank)):
        errors = raised_everywhere(rs.load_checkpoint, sharded(root / ODD), root / ODD, loading=loading)
        assert all("were given other options" in error for error in errors), errors


def check_a_reload(root: Path) -> None:
    """A module that has run a forward, whose root holds its full parameters, is loaded again."""
    module = sharded(root / ODD)
    rs.load_checkpoint(module, root / ODD)
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        before = module.eval()(ids)
        for parameter in module.parameters():
            local_tensor(parameter).zero_()
    rs.load_checkpoint(module, root / ODD)
    with torch.no_grad():
        assert torch.equal(module(ids), before)
