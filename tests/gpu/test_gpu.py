"""What only real GPUs can show of ranks: NCCL, page-locked memory, CUDA contexts.

`pytest -m gpu tests/gpu` on a machine with one GPU or more; ratios of times are printed with `-s`. The full suite runs
the same checks on four simulated devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raysharding.distributed.comm.device import nccl_version
from tests.gpu import checks
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


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Every rank's check → traceback."""
    kind, world_size = request.param
    root = tmp_path_factory.mktemp(f"{kind}-{world_size}") / "root"
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
