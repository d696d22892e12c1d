"""The torch-level layer as users start it: the example under torchrun, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import world_sizes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", world_sizes(2, full=(1, 3)))
def test_example_under_torchrun(world_size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "torchrun_train.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<All keys matched successfully>" in done.stdout
    assert "the same: True" in done.stdout
    assert "ray was imported: False" in done.stdout
