"""`load_checkpoint` and `save_checkpoint` on real gloo groups, one group for each number of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import open_checkpoint
from raysharding.distributed import load_checkpoint, save_checkpoint
from tests.distributed.checks import checks_of, run_checks
from tests.distributed.loading import load_checks, verify_checks
from tests.distributed.models import filled, saved
from tests.distributed.saving import save_checks
from tests.distributed.transfer import reader_checks
from tests.grid import needs_sim
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

LOADS, VERIFIES = checks_of("loading.load_checks"), checks_of("loading.verify_checks")
READS, STALLS, SAVES = (checks_of(f"{name}_checks") for name in ("transfer.reader", "transfer.stall", "saving.save"))
CHECKS = {
    1: (
        *LOADS("odd_shapes dtypes"),
        *VERIFIES("mapping digests"),
        *LOADS("training"),
        *STALLS("threads_end_after_a_stall"),
    ),
    3: (
        *LOADS("odd_shapes plan_errors a_model_that_differs options_that_differ a_reload"),
        *VERIFIES("mapping checksums finite_values a_failed_read_is_told_as_such"),
        *STALLS("a_slow_disk no_memory_for_a_ring"),
        *READS("broken_stream a_rank_that_cannot_map readers"),
        *SAVES("saves small_files a_save_that_fails_late full_disk a_save_in_the_background no_memory_for_a_copy"),
        *LOADS("training"),
    ),
    4: (*READS("replicas"), *VERIFIES("mapping digests"), *LOADS("dtypes training")),
}
ON_SIM = {
    "alone": (
        *(*LOADS("odd_shapes dtypes"), *VERIFIES("digests"), *READS("broken_stream")),
        *(*SAVES("saves small_files a_save_in_the_background"), *LOADS("training a_reload")),
    ),
    "beside gloo": (*LOADS("odd_shapes"), *SAVES("saves a_save_in_the_background")),
}
"""What also runs on three ranks on the simulated device, by how it has its collectives: directories of its own, too."""


def write_checkpoints(root: Path) -> None:
    state = saved(filled())
    for name in (load_checks.ODD, *map(reader_checks.shrinking, reader_checks.SHRINKING)):
        save_file(state, root / name)
    for dtype in load_checks.FILE_DTYPES:
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        save_file(cast, root / f"{dtype}.safetensors")
    infinite = {name: value.clone() for name, value in state.items()}
    infinite["blocks.0.weight"][-1, -1] = torch.inf
    save_file(infinite, root / verify_checks.INFINITE)
    run_ranks(1, save_with_manifest, root, timeout_s=60)
    del state["blocks.0.weight"]
    bad = {"narrow": torch.zeros(3, 64), "extra": torch.zeros(1), "table": torch.zeros(3, 4)}
    save_file(state | bad, root / "bad.safetensors")
    (root / "saves").mkdir()
    (root / reader_checks.APART).mkdir()
    save_file(saved(filled()), root / reader_checks.APART / load_checks.ODD)
    ARCHITECTURES["llama"].make().save_pretrained(root / "llama")


def save_with_manifest(root: Path) -> None:
    """On one rank: a save of our own, and a copy of it with one byte changed."""
    module = load_checks.sharded(root / load_checks.ODD)
    load_checkpoint(module, root / load_checks.ODD)
    save_checkpoint(module, root / verify_checks.SAVED)
    shutil.copytree(root / verify_checks.SAVED, root / verify_checks.FLIPPED)
    path = root / verify_checks.FLIPPED / "model.safetensors"
    info = open_checkpoint(path).tensors["blocks.1.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + info.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(info.offset + info.num_bytes // 2)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoints, and a small file system where this machine lets us mount one."""
    path = tmp_path_factory.mktemp("loading")
    write_checkpoints(path)
    for name in ON_SIM:
        shutil.copytree(path, path.with_name(name))  # some checks write beside the checkpoints
    small = path / save_checks.SMALL_DISK
    small.mkdir()
    mounts = os.geteuid() == 0 and not subprocess.call(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)])
    yield path
    if mounts:
        subprocess.check_call(["umount", str(small)])


@cache
def outcomes(world_size: int, checks: tuple[str, ...], root: Path, **options: Any) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    return run_ranks(world_size, run_checks, checks, root, timeout_s=100, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in CHECKS.items() for name in names])
def test_on_ranks(world_size: int, name: str, root: Path) -> None:
    if name == "saving.save_checks.check_full_disk" and not os.path.ismount(root / save_checks.SMALL_DISK):
        pytest.skip("this machine does not let us mount a small file system")
    if name == "transfer.reader_checks.check_readers" and os.geteuid() != 0:
        pytest.skip("hiding a directory from some ranks takes root")
    for rank, outcome in enumerate(outcomes(world_size, CHECKS[world_size], root)):
        assert not outcome[name], f"rank {rank} of {world_size}:\n{outcome[name]}"


@needs_sim
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "name"), [(how, name) for how, names in ON_SIM.items() for name in names])
def test_on_the_simulated_device(how: str, name: str, root: Path) -> None:
    found = outcomes(3, ON_SIM[how], root.with_name(how), device="sim", gloo=how == "beside gloo")
    for rank, outcome in enumerate(found):
        assert not outcome[name], f"rank {rank} of 3:\n{outcome[name]}"
