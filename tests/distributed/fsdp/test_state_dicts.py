"""`state_dict_type` on real groups, beside FSDP1 on the CPU; saved by one world size and loaded by others."""

from __future__ import annotations

import pytest

from tests.accelerator.build import why_unavailable
from tests.distributed.checks import run_checks
from tests.grid import grid_of
from tests.spawn import run_ranks

CHECKS = {
    ("cpu", 3): (
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
    ("cpu", 4): ("load", "sharded", "save"),
    ("cpu", 1): ("load", "full", "full_load", "sharded", "local", "save"),
    ("cpu", 2): ("load",),
    ("sim", 2): ("load", "full", "full_load", "sharded", "inner_modules"),
}
"""(device, ranks) → checks, in this order: each loads what those before it saved, 4 ranks what 3 did, 1 what 4 did."""

Outcomes = dict[tuple[str, int, str], list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """(device, ranks, check) → every rank's traceback."""
    root = tmp_path_factory.mktemp("states")
    found: Outcomes = {}
    for (device, size), names in CHECKS.items():
        if device == "sim" and why_unavailable() is not None:
            continue
        checks = [f"fsdp.state_dict_checks.check_{name}" for name in names]
        by_rank = run_ranks(size, run_checks, checks, root, timeout_s=150, device=device)
        for name, check in zip(names, checks, strict=True):
            found[device, size, name] = [outcome[check] for outcome in by_rank]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("device", "world_size", "name"), grid_of(CHECKS, full=()))
def test_on_ranks(device: str, world_size: int, name: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes[device, world_size, name]):
        assert not outcome, f"rank {rank} of {world_size}:\n{outcome}"
