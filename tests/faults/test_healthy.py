"""The control: a healthy group with short deadlines on a busy machine raises no alarm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import Loading, Split, Timeouts
from raysharding.group import GroupState
from tests.clock import now
from tests.conftest import make_group
from tests.faults.trap import BUCKET_BYTES, WIDTH, plain_model, slow_reads

NUM_SPINNING = 3
DEADLINES = Timeouts(load_stall_s=5, call_s=10, drain_s=1)


@pytest.fixture
def busy() -> Iterator[None]:
    """More spinning processes than the machine has cores."""
    # At the priority of Ray's workers (nice 15): at this process's own they would leave the ranks 4 % of a core each.
    spin = "import os\nos.nice(15)\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(NUM_SPINNING)]
    yield
    for process in spinning:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.usefixtures("nothing_left", "busy")
@pytest.mark.timeout(240)
def test_a_healthy_run_on_a_busy_machine_raises_no_alarm(many_buckets: Path, tmp_path: Path) -> None:
    loading = Loading("scatter", bucket_bytes=BUCKET_BYTES)
    options: dict[str, Any] = {
        "model": slow_reads(0.1),
        "loading": loading,
        "timeouts": DEADLINES,
        "optimizer": torch.optim.SGD,
    }
    twin = plain_model()()
    rows = torch.randn(5, WIDTH)
    with make_group(many_buckets, **options) as group:
        begun = now()
        for _ in range(20):
            group.forward(Split(rows))
            group.train_step(Split(rows), loss=lambda output, rows: output.square().mean())
        group.save(tmp_path / "saved")
        twin.load_state_dict(group.state_dict())
        assert torch.allclose(group.forward(Split(rows)), twin(rows), atol=1e-6)
        status = group.status()
        assert all(rank["answers"] for rank in status["ranks"])
        assert (group.state, status["cause"]) == (GroupState.READY, None)
        assert now() - begun < 60
