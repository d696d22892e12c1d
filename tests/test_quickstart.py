"""The quickstart as a job on a cluster that was started as a user starts one: `ray start`, `ray job submit`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.group.standing import ROOT, standing_cluster


@pytest.mark.full
@pytest.mark.timeout(240)
def test_quickstart_as_a_job_and_no_job_without_the_token() -> None:
    with standing_cluster(num_cpus=2, dashboard=True) as cluster:
        environment = {name: value for name, value in cluster.environment.items() if name != "RAY_ADDRESS"}
        programs = Path(sys.executable).parent
        environment |= {"PATH": os.pathsep.join((str(programs), environment["PATH"])), "PYTHONPATH": str(ROOT)}
        submit = [str(programs / "ray"), "job", "submit", "--address", cluster.dashboard, "--", "python"]
        options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run([*submit, "examples/quickstart.py"], env=environment, **options)
        stranger = environment | {"RAY_AUTH_TOKEN_PATH": os.devnull, "RAY_AUTH_TOKEN": "wrong" * 10}
        refused = subprocess.run([*submit, "-c", "print(1)"], env=stranger, **options)
    assert refused.returncode != 0
    assert "token" in (refused.stdout + refused.stderr).lower()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    differences = [float(found) for found in re.findall(r"Max abs difference to .*: (\S+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    losses = [float(found) for found in re.findall(r"step +\d+ +loss (\S+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert len(re.findall(r"^ +rank \d", done.stdout, re.MULTILINE)) == 2
    assert "succeeded" in done.stdout
