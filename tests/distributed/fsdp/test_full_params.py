"""`summon_full_params`, `apply`, `fsdp_modules`, `params_with_grad` and names on real groups, beside FSDP1."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.checks import run_checks
from tests.grid import grid_of
from tests.spawn import run_ranks

EVERYWHERE = (
    "fsdp.full_params_checks.check_values",
    "fsdp.full_params_checks.check_write_back",
    "fsdp.full_params_checks.check_rank_0_only",
    "fsdp.full_params_checks.check_gradients",
    "fsdp.full_params_checks.check_replicas",
    "fsdp.fsdp_checks.check_apply",
)
ONCE = (
    "fsdp.full_params_checks.check_a_gradient_that_some_ranks_lack",
    "fsdp.full_params_checks.check_one_group",
    "fsdp.full_params_checks.check_several_roots",
    "fsdp.full_params_checks.check_parts_of_several_strategies",
    "fsdp.full_params_checks.check_what_the_body_does_to_parameters",
    "fsdp.full_params_checks.check_load_inside",
    "fsdp.full_params_checks.check_refusals",
    "fsdp.full_params_checks.check_inside_a_forward",
    "fsdp.full_params_checks.check_ranks_that_differ",
    "fsdp.full_params_checks.check_a_group_of_several_modules",
    "fsdp.full_params_checks.check_after_a_part_of_a_group",
    "fsdp.fsdp_checks.check_visits",
    "fsdp.fsdp_checks.check_an_apply_that_fails",
    "fsdp.fsdp_checks.check_modules",
    "fsdp.fsdp_checks.check_names",
    "fsdp.fsdp_checks.check_params_with_grad",
)
CHECKS = {
    ("cpu", 1): (*EVERYWHERE, "fsdp.full_params_checks.check_refusals"),
    ("cpu", 2): (
        "fsdp.full_params_checks.check_write_back",
        "fsdp.full_params_checks.check_rank_0_only",
        "fsdp.full_params_checks.check_gradients",
        "fsdp.full_params_checks.check_replicas",
    ),
    ("cpu", 3): (*EVERYWHERE, *ONCE),
    ("cpu", 4): (*EVERYWHERE, "fsdp.full_params_checks.check_exceptions"),
    ("sim", 2): (*EVERYWHERE, "fsdp.full_params_checks.check_refusals", "fsdp.fsdp_checks.check_params_with_grad"),
    ("sim", 4): EVERYWHERE,
}


@cache
def outcomes(device: str, world_size: int) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    return run_ranks(world_size, run_checks, CHECKS[device, world_size], Path(), timeout_s=100, device=device)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "world_size", "name"), grid_of(CHECKS, full=(4,)))
def test_on_ranks(device: str, world_size: int, name: str) -> None:
    for rank, outcome in enumerate(outcomes(device, world_size)):
        assert not outcome[name], f"rank {rank} of {world_size}:\n{outcome[name]}"
