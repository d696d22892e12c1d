"""What only real GPUs can show: NCCL, page-locked memory, CUDA contexts, a device-side assert.

`pytest -m gpu tests/gpu` on a machine with one GPU or more; ratios of times are printed with `-s`. The full suite runs
the same checks on four simulated devices.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raysharding.distributed.comm.device import nccl_version
from tests.accelerator.fault_checks import HANGS, run_hangs
from tests.gpu import checks, group_checks
from tests.grid import needs_sim
from tests.spawn import run_ranks


def is_shareable() -> bool:
    """Return True if this machine's NCCL lets ranks share a GPU, once it is told to."""
    return COUNT > 0 and (nccl_version(torch.device("cuda")) or (0,)) >= (2, 30)


COUNT = torch.cuda.device_count()
ONE = (pytest.mark.gpu, pytest.mark.skipif(COUNT < 1, reason="torch sees no GPU here"))
SEVERAL = (pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="torch sees fewer than two GPUs here"))
# Ranks share GPUs where there are fewer.
SHARED = (*ONE, pytest.mark.skipif(not is_shareable(), reason="ranks share a GPU from NCCL 2.30 on"))
SIM = (pytest.mark.full, needs_sim)
KINDS = [
    pytest.param(("cuda", 1), marks=ONE),
    pytest.param(("cuda", 2), marks=SHARED if COUNT < 2 else SEVERAL),
    pytest.param(("cuda", max(COUNT, 4)), marks=SHARED if COUNT < 4 else SEVERAL),
    pytest.param(("sim", 4), marks=SIM),
]
pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def outcomes(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    kind, world_size = request.param
    root = folder / f"{kind}-{world_size}"
    checks.write_checkpoints(root, kind)
    if kind == "cuda":
        run_ranks(2, checks.check_ranks_on_cpus, root)
    return run_ranks(world_size, checks.run_all, root, timeout_s=200, device=kind)


@pytest.mark.parametrize("name", checks.NAMES)
def test_on_ranks(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[name], f"rank {rank}:\n{outcome[name]}"


def test_ranks_on_cpus_use_no_gpu(tmp_path: Path) -> None:
    checks.write_checkpoints(tmp_path / "x", "sim")
    run_ranks(2, checks.check_ranks_on_cpus, tmp_path / "x")


@pytest.fixture(scope="module")
def shares(folder: Path) -> list[dict[str, float]]:
    """Every rank's hang → how often it was seen to wait for others, on two GPUs."""
    root = folder / "hangs"
    checks.write_checkpoints(root, "cuda")
    return run_ranks(2, run_hangs, root / "faults", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(COUNT < 2 and not is_shareable(), reason="fewer than two GPUs, which ranks cannot share here")
@pytest.mark.parametrize("name", HANGS)
def test_of_two_ranks_the_one_that_hangs_is_known(name: str, shares: list[dict[str, float]]) -> None:
    waits, hangs = (share[name] for share in shares)
    assert hangs == 0
    assert waits > 0.8


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def groups(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    """Check → traceback, of one driver that ran them all."""
    kind, world_size = request.param
    several = group_checks.SEVERAL if world_size > 1 else ()
    names = [check.__name__ for check in (*group_checks.CHECKS, *several)]
    place = folder / f"groups-{kind}-{world_size}"
    place.mkdir()
    command = [sys.executable, "-m", "tests.gpu.group_checks", str(place), kind, str(world_size), *names]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert driver.returncode == 0, driver.stderr
    found: dict[str, str] = json.loads(driver.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [check.__name__ for check in (*group_checks.CHECKS, *group_checks.SEVERAL)])
def test_group(name: str, groups: dict[str, str]) -> None:
    if name not in groups:
        pytest.skip("for two ranks or more")
    assert not groups[name], groups[name]
