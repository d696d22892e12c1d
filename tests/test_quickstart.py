"""The quickstart as a job on a cluster that was started as a user starts one: `ray start`, `ray job submit`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.group.standing import ROOT, standing_cluster


def submit(address: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python *words` as a job."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "job", "submit", "--address", address, "--", "python", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_quickstart_as_a_job() -> None:
    """On a cluster of its own, token authentication on; without the token a job is refused."""
    with standing_cluster(num_cpus=2, dashboard=True) as cluster:
        environment = {name: value for name, value in cluster.environment.items() if name != "RAY_ADDRESS"}
        path = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        environment |= {"PATH": path, "PYTHONPATH": str(ROOT)}
        done = submit(cluster.dashboard, environment, "examples/quickstart.py")
        stranger = environment | {"RAY_AUTH_TOKEN_PATH": os.devnull, "RAY_AUTH_TOKEN": "wrong" * 10}
        refused = submit(cluster.dashboard, stranger, "-c", "print(1)")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    differences = [float(found) for found in re.findall(r"Max abs difference to .*: (\S+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    losses = [float(found) for found in re.findall(r"step +\d+ +loss (\S+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert len(re.findall(r"^ +rank \d", done.stdout, re.MULTILINE)) == 2
    assert "succeeded" in done.stdout
    assert refused.returncode != 0
    assert "token" in (refused.stdout + refused.stderr).lower()
