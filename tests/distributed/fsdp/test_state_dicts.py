"""`state_dict_type` on real gloo groups, beside FSDP1; saved by one world size and loaded by others."""

from __future__ import annotations

import pytest

from tests.distributed.checks import run_checks
from tests.spawn import run_ranks

CHECKS = {
    3: (
        "full",
        "full_load",
        "full_mismatches",
        "sharded",
        "local",
        "inner_modules",
        "a_wrapped_root",
        "extra_state",
        "settings",
        "save",
    ),
    4: ("load", "sharded", "save"),
    1: ("load", "full", "full_load", "sharded", "local", "save"),
    2: ("load",),
}
"""Ranks → checks. In this order: each number of ranks loads what those before it saved, 4 what 3 did, 1 what 4 did."""

Outcomes = dict[tuple[int, str], list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """(ranks, check) → every rank's traceback."""
    root = tmp_path_factory.mktemp("states")
    found: Outcomes = {}
    for size, names in CHECKS.items():
        by_rank = run_ranks(
            size, run_checks, [f"fsdp.state_dict_checks.check_{name}" for name in names], root, timeout_s=150
        )
        for name in names:
            found[size, name] = [outcome[f"fsdp.state_dict_checks.check_{name}"] for outcome in by_rank]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in CHECKS.items() for name in names])
def test_on_ranks(world_size: int, name: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes[world_size, name]):
        assert not outcome, f"rank {rank} of {world_size}:\n{outcome}"
