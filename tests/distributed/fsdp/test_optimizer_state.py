"""Optimizer state on real groups: FSDP1's four functions (rows C5 to C8), and what saves hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.checks import run_checks
from tests.distributed.fsdp import optimizer_checks
from tests.grid import device_grid, needs_sim
from tests.spawn import run_ranks

CHECKS = (
    "fsdp.optimizer_checks.check_full_against_one_process",
    "fsdp.optimizer_checks.check_shards_continue",
    "fsdp.optimizer_checks.check_against_fsdp1",
    "fsdp.optimizer_checks.check_forms",
    "fsdp.optimizer_checks.check_mistakes",
    "fsdp.optimizer_checks.check_file_mistakes",
    "fsdp.optimizer_checks.check_offloaded",
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("device", "world_size"), device_grid(3, full=(1, 2, 4)))
def test_state_dicts(device: str, world_size: int, tmp_path: Path) -> None:
    for outcomes in run_ranks(world_size, run_checks, CHECKS, tmp_path, timeout_s=140, device=device):
        failed = "\n".join(f"{name}\n{text}" for name, text in outcomes.items() if text)
        assert not failed, failed


@pytest.mark.full
@pytest.mark.timeout(200)
def test_saved_at_four_ranks_loads_at_any_and_back(tmp_path: Path) -> None:
    run_ranks(4, optimizer_checks.save_all, tmp_path, "4")
    for world_size in (1, 2, 3):
        run_ranks(world_size, optimizer_checks.load_all, tmp_path, ("4",), str(world_size))
    run_ranks(4, optimizer_checks.load_all, tmp_path, ("1", "2", "3"), None)


@needs_sim
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("saves", "loads"), [("cpu", "sim"), ("sim", "cpu")])
def test_saved_on_one_device_loads_on_another(saves: str, loads: str, tmp_path: Path) -> None:
    run_ranks(2, optimizer_checks.save_all, tmp_path, "2", device=saves)
    run_ranks(2, optimizer_checks.load_all, tmp_path, ("2",), None, device=loads)
