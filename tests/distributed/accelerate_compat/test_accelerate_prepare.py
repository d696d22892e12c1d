"""`fsdp2_prepare_model` beside accelerate's, in the same process groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.checks import run_checks
from tests.spawn import run_ranks

CASES = (
    (
        2,
        (
            "check_same_sharding",
            "check_checkpointed",
            "check_mixed_precision",
            "check_real_accelerator",
            "check_settings",
            "check_accelerate_on_other_models",
        ),
    ),
    (4, ("check_hsdp", "check_values_and_gradients")),
)
"""What needs no transformers model runs on 1 to 4 ranks in test_accelerate_loading.py."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "names"), CASES)
def test_on_ranks(world_size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    checks = [f"accelerate_compat.accelerate_prepare_checks.{name}" for name in names]
    for rank, outcomes in enumerate(run_ranks(world_size, run_checks, checks, tmp_path, timeout_s=100)):
        for name, outcome in outcomes.items():
            assert outcome == "", f"{name} on rank {rank}"
