"""accelerate's functions that communicate, and the patch, beside accelerate's own, in the same process groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.accelerate_compat import accelerate_loading_checks
from tests.distributed.checks import checks_of, run_checks
from tests.models.architectures import ARCHITECTURES
from tests.spawn import run_ranks

PREPARES = checks_of("accelerate_compat.accelerate_prepare_checks")
LOADS = checks_of("accelerate_compat.accelerate_loading_checks")(
    "full_state_dict bad_state_dict beside_accelerate rank_0_values patched_accelerate "
    "patched_accelerate_on_other_modules"
)
SWITCHES = checks_of("accelerate_compat.accelerate_checks")(
    "ram_efficient_loading optimizer_switch optimizer_switch_beside_accelerate optimizer_without_partner "
    "optimizer_bad_state optimizer_dtype"
)
PREPARED = PREPARES("same_sharding checkpointed mixed_precision real_accelerator settings accelerate_on_other_models")
CASES = (
    (2, (*SWITCHES, *LOADS, *PREPARED)),
    (4, PREPARES("hsdp values_and_gradients")),
    *(pytest.param(size, LOADS, marks=pytest.mark.full) for size in (1, 3, 4)),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "names"), CASES)
def test_on_ranks(world_size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make().save_pretrained(tmp_path / "llama")
    outcomes = run_ranks(world_size, run_checks, names, tmp_path, timeout_s=100)
    for rank, found in enumerate(outcomes):
        assert not (failed := {name: said for name, said in found.items() if said}), f"rank {rank}: {failed}"


@pytest.mark.all_ranks
@pytest.mark.timeout(60)
def test_where_accelerate_is_wrong_or_waits(tmp_path: Path) -> None:
    """Values of another dtype than the model's, and a key that is missing on rank 0."""
    run_ranks(2, accelerate_loading_checks.show_where_accelerate_waits, tmp_path, timeout_s=50)
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
