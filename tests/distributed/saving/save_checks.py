"""What is checked on the ranks of `test_loading.py`: saves."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from raysharding import distributed as rs
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.saving import save
from raysharding.distributed.saving.async_save import AsyncSaver
from raysharding.distributed.saving.save import Destination
from raysharding.errors import RayshardingError
from raysharding.models import build_module
from tests.distributed.loading.load_checks import (
    ODD,
    full_state,
    raised_everywhere,
    require_filled,
    sharded,
)
from tests.spawn import device_type

SMALL_DISK = "small"
"""A file system of 3 MiB."""


def check_a_save_that_fails_late(root: Path) -> None:
    """An error of rank 0 alone, after the tensors were written, is everybody's and leaves nothing."""
    import transformers

    module: Any = build_module(None, open_checkpoint(root / "llama"), torch.bfloat16)
    shard_module(module, init_mesh(device_type()))
    rs.load_checkpoint(module, root / "llama", loading=Loading(dtype=torch.bfloat16))
    module.config.max_length = 12
    try:
        rs.save_checkpoint(module, root / "saves" / "late")
        outcome = ""
    except (ValueError, RayshardingError) as error:
        outcome = str(error)
    assert all("eneration parameters" in said for said in all_gather_json(outcome)), outcome
    # Rank 0 removes what was written; the others learn of the error before it is done.
    assert dist.get_rank() != 0 or not any("late" in name for name in os.listdir(root / "saves"))
    del module.config.max_length
    rs.save_checkpoint(module, root / "saves" / "late")
    if dist.get_rank() == 0:
        reopened = transformers.AutoModelForCausalLM.from_pretrained(root / "saves" / "late")
        assert reopened.dtype == torch.bfloat16


def check_saves(root: Path) -> None:
    """A save loads again, refuses to overwrite unasked, and leaves nothing beside it."""
    path = root / ODD
    module = sharded(path)
    rs.load_checkpoint(module, path)
    target = root / "runs" / "step-1"
    report = rs.save_checkpoint(module, target)
    assert report.num_bytes == sum(t.numel() * t.itemsize for t in load_file(path).values())
    assert all("exists already" in error for error in raised_everywhere(rs.save_checkpoint, module, target))
    if dist.get_rank() == 0:
        (target / "README.md").write_text("a model card")
    refused = raised_everywhere(rs.save_checkpoint, module, target, overwrite=True)
    assert all("holds what no save wrote: README.md" in error for error in refused)
    if dist.get_rank() == 0:
        (target / "README.md").unlink()
    rs.save_checkpoint(module, target, overwrite=True)
    again = sharded(path)
    rs.load_checkpoint(again, target)
    require_filled(again)
    if dist.get_rank() == 0:
        assert os.listdir(root / "runs") == ["step-1"]


def check_small_files(root: Path) -> None:
    """They are copied, and go with their save, unless somebody has changed them."""
    module = sharded(root / ODD)
    rs.load_checkpoint(module, root / ODD)
    if dist.get_rank() == 0:
        (root / "source").mkdir()
        shutil.copy(root / ODD, root / "source" / "model.safetensors")
        for name in ("tokenizer.json", "vocab.txt"):
            (root / "source" / name).write_text("{}")
    dist.barrier()
    source = open_checkpoint(root / "source")
    rs.save_checkpoint(module, root / "row" / "step-1", source=source)
    rs.save_checkpoint(module, root / "row" / "step-2", source=source)
    rs.save_checkpoint(module, root / "row" / "step-2", source=source, overwrite=True)
    if dist.get_rank() == 0:
        (root / "row" / "step-2" / "vocab.txt").write_text("mine")
    dist.barrier()
    rs.save_checkpoint(module, root / "row" / "step-3", source=source, keep_last=1)
    if dist.get_rank() == 0:
        assert sorted(os.listdir(root / "row")) == ["step-2", "step-3"]
        assert {path.name: path.read_text() for path in (root / "row" / "step-2").iterdir()} == {"vocab.txt": "mine"}
        assert (root / "row" / "step-3" / "vocab.txt").read_text() == "{}"


def check_a_save_in_the_background(root: Path) -> None:
    """It holds weights and optimizer state as they were when it began, while steps change all of them."""
    module = sharded(root / ODD)
    rs.load_checkpoint(module, root / ODD)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    ids = torch.arange(20).view(5, 4)

    def step() -> None:
        optimizer.zero_grad()
        module.eval()(ids).square().mean().backward()
        optimizer.step()

    def contents() -> tuple[Any, Any]:
        held = rs.full_optim_state_dict(module, optimizer)
        return {name: value.clone() for name, value in full_state(module).items()}, held and held["state"]

    step()
    before = contents()
    saver, target = AsyncSaver(), root / "background"
    saver.save(module, Destination(str(target)), optimizer=optimizer)
    for _ in range(3):
        step()
    saver.wait()
    assert saver.last_committed == str(target)
    after = contents()
    rs.load_checkpoint(module, target)
    rs.load_optimizer_state(module, optimizer, target)
    loaded = contents()
    for now, then, later in zip(loaded, before, after, strict=True) if dist.get_rank() == 0 else ():
        torch.testing.assert_close(now, then, rtol=0, atol=0)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(later, then)


def check_no_memory_for_a_copy(root: Path) -> None:
    """One rank has none: all say so at once, nothing is left, and later saves are written."""

    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    module = sharded(root / ODD)
    rs.load_checkpoint(module, root / ODD)
    saver, target = AsyncSaver(), root / "saves" / "no-memory"
    with pytest.MonkeyPatch.context() as changed:
        if dist.get_rank() == 1:
            changed.setattr(save, "back", fails)
        errors = raised_everywhere(saver.save, module, Destination(str(target)), stall_s=20)
    assert all("no memory for the copy" in error and "async_save=False" in error for error in errors), errors
    assert dist.get_rank() != 0 or not any("no-memory" in name for name in os.listdir(root / "saves"))
    saver.save(module, Destination(str(target)))
    saver.wait()
    assert saver.last_committed == str(target)


def check_full_disk(root: Path) -> None:
    """A full disk is everybody's error; the old checkpoint still loads, and nothing is left."""
    path, small = root / ODD, root / SMALL_DISK
    module = sharded(path)
    rs.load_checkpoint(module, path)
    target = small / "saved"
    rs.save_checkpoint(module, target)
    wide = sharded(path, dtype=torch.float64)
    rs.load_checkpoint(wide, path)
    with (small / "filler").open("wb") as filler:
        if dist.get_rank() == 0:
            filler.write(b"0" * max(0, os.statvfs(small).f_bavail * 4096 - 8192))
    errors = raised_everywhere(rs.save_checkpoint, wide, target, overwrite=True)
    assert all("No space left" in error for error in errors), errors
    saver = AsyncSaver()
    number = saver.save(wide, Destination(str(target), overwrite=True))
    saver.wait()
    status: Any = saver.status(number)
    assert "No space left" in str(status.error)
    # The error, which stays, keeps no connection open: a rank that waited for this one would wait on.
    group = weakref.ref(saver._group)
    dist.destroy_process_group(saver._group)
    saver._group = None
    assert group() is None
    if dist.get_rank() == 0:
        assert sorted(os.listdir(small)) == ["filler", "saved"]
        (small / "filler").unlink()
    again = sharded(path)
    rs.load_checkpoint(again, target)
