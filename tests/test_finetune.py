"""The example of training over data, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_finetune(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "examples/finetune.py", "--steps", "36", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    losses = re.search(r"Loss (\S+) to (\S+);", done.stdout)
    assert losses is not None, done.stdout
    assert float(losses[2]) < float(losses[1]) - 1
    assert re.search(r"2 rank\(s\): step 18, .*\n1 rank\(s\): step 36, ", done.stdout), done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["step-30", "step-36"]
    assert f"transformers opens {tmp_path / 'saves' / 'step-36'}" in done.stdout
