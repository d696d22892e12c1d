"""Rows A1 to A8 on real groups: `DistModule` and the distribution of rank 0's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.checks import run_checks
from tests.grid import device_grid
from tests.spawn import run_ranks

CHECKS = (
    "fully_shard.sharding_checks.check_a_module_and_its_wrapper",
    "fully_shard.sharding_checks.check_load_state_dict",
    "fully_shard.sharding_checks.check_assign",
    "fully_shard.sharding_checks.check_mismatches",
    "fully_shard.sharding_checks.check_extra_state",
    "fully_shard.sharding_checks.check_an_item_that_fails",
    "fully_shard.sharding_checks.check_halves",
    "fully_shard.sharding_checks.check_files",
    "fully_shard.sharding_checks.check_that_the_same_engine_moves_it",
    "comm.fault_checks.check_assign_that_differs",
    "comm.fault_checks.check_hooks_see_values",
    "comm.fault_checks.check_apply_that_changes_a_shape",
    "comm.fault_checks.check_a_parameter_that_is_trained_later",
    "comm.fault_checks.check_state_dict_forms_after_a_forward",
    "comm.fault_checks.check_ties_of_distributed_state_dicts",
)
SIM_CHECKS = [name for name in CHECKS if name.startswith("fully_shard")]
"""What also runs on two ranks on the simulated device."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "world_size"), device_grid(3, full=(1, 2, 4)))
def test_distribution(device: str, world_size: int, tmp_path: Path) -> None:
    checks = CHECKS if device == "cpu" else SIM_CHECKS
    for outcomes in run_ranks(world_size, run_checks, checks, tmp_path, timeout_s=110, device=device):
        failed = "\n".join(f"{name}\n{text}" for name, text in outcomes.items() if text)
        assert not failed, failed
