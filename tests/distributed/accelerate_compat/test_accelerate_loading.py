"""`fsdp2_load_full_state_dict` beside accelerate's, rank 0's values through `fsdp2_prepare_model`, and the patch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.accelerate_compat.accelerate_loading_checks import show_where_accelerate_waits
from tests.distributed.checks import run_checks
from tests.grid import world_sizes
from tests.spawn import run_ranks

CHECKS = (
    "check_full_state_dict",
    "check_bad_state_dict",
    "check_beside_accelerate",
    "check_rank_0_values",
    "check_patched_accelerate",
    "check_patched_accelerate_on_other_modules",
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, full=(1, 4)))
def test_on_ranks(world_size: int, tmp_path: Path) -> None:
    checks = [f"accelerate_compat.accelerate_loading_checks.{name}" for name in CHECKS]
    for rank, outcomes in enumerate(run_ranks(world_size, run_checks, checks, tmp_path, timeout_s=100)):
        for name, outcome in outcomes.items():
            assert outcome == "", f"{name} on rank {rank}"


@pytest.mark.all_ranks
@pytest.mark.timeout(60)
def test_where_accelerate_is_wrong_or_waits(tmp_path: Path) -> None:
    """Values of another dtype than the model's, and a key that is missing on rank 0."""
    run_ranks(2, show_where_accelerate_waits, tmp_path, timeout_s=50)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    said = [[what for what, _ in outcomes] for outcomes in ranks]
    assert [what[0] for what in said] == ["right", "right"]
    assert "wrong" in [what[1] for what in said], said
    for what in said:
        assert what[2].startswith("PlanError")
        assert "0.weight" in what[2]
    assert said[0][3].startswith("KeyError")
    assert said[1][3].startswith("RuntimeError")
    assert ranks[1][3][1] > 2.5, "it waited until the deadline"
