"""Faults that show on an accelerator only, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.accelerator.fault_checks import (
    CHECKS,
    HANGS,
    LOSSES,
    make_model,
    run_all,
    run_hangs,
)
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("faults")
    save_file(make_model().state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def outcomes(root: Path) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    return run_ranks(2, run_all, root, timeout_s=100, device="sim")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS] + list(LOSSES))
def test_fault(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[name], f"rank {rank}:\n{outcome[name]}"


@pytest.fixture(scope="module", params=["cpu", "sim"])
def shares(request: pytest.FixtureRequest, root: Path) -> list[dict[str, float]]:
    """Every rank's hang → how often it was seen to wait for others."""
    return run_ranks(2, run_hangs, root, device=request.param)


@pytest.mark.parametrize("name", HANGS)
def test_of_two_ranks_the_one_that_hangs_is_known(name: str, shares: list[dict[str, float]]) -> None:
    waits, hangs = (share[name] for share in shares)
    assert hangs == 0
    assert waits > 0.8
