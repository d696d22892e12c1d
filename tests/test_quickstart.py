"""The quickstart as a job on a cluster that was started as a user starts one: `ray start`, `ray job submit`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group.standing import ROOT, standing_cluster


def submit(address: str, *arguments: str) -> list[str]:
    """Command line that runs `python *arguments` as a job."""
    ray = str(Path(sys.executable).with_name("ray"))
    return [ray, "job", "submit", "--address", address, "--", "python", *arguments]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster of its own, token authentication on: (address of the jobs server, environment of its clients)."""
    with standing_cluster(num_cpus=2, dashboard=True) as cluster:
        environment = {name: value for name, value in cluster.environment.items() if name != "RAY_ADDRESS"}
        path = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        yield cluster.dashboard, environment | {"PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.full
@pytest.mark.timeout(240)
def test_quickstart_as_a_job(cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    command = submit(address, "examples/quickstart.py")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    differences = [float(found) for found in re.findall(r"Max abs difference to .*: (\S+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    losses = [float(found) for found in re.findall(r"step +\d+ +loss (\S+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert len(re.findall(r"^ +rank \d", done.stdout, re.MULTILINE)) == 2
    assert "succeeded" in done.stdout


def test_job_without_the_token_is_refused(cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    command = submit(address, "-c", "print(1)")
    stranger = environment | {"RAY_AUTH_TOKEN_PATH": os.devnull, "RAY_AUTH_TOKEN": "wrong" * 10}
    done = subprocess.run(command, cwd=ROOT, env=stranger, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
