"""Weights bit for bit, forward and a loss curve, on 1 to 3 ranks, for every architecture of the grid."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.fidelity import CASES, make_checkpoint, run_grid
from tests.grid import device_grid
from tests.spawn import run_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for each case."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, case in CASES.items():
        make_checkpoint(root / name, case)
    return root


@cache
def outcomes(device: str, world_size: int, root: Path) -> list[dict[str, str]]:
    """The whole grid in one process group: starting processes costs more than the checks."""
    return run_ranks(world_size, run_grid, str(root), timeout_s=240, device=device)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("device", "world_size"), device_grid(2, full=(1, 3)))
def test_equals_one_process(device: str, world_size: int, name: str, checkpoints: Path) -> None:
    for rank, outcome in enumerate(outcomes(device, world_size, checkpoints)):
        assert not outcome[name], f"rank {rank} of {world_size}:\n{outcome[name]}"
