"""The quickstart as a job on a cluster that was started as a user starts one: `ray start`, `ray job submit`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]


def free_ports(number: int) -> list[int]:
    """Ports that nothing listens on now; another process may still take one before Ray does."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def ray_command(*arguments: str) -> list[str]:
    """Command line of this environment's Ray."""
    return [str(Path(sys.executable).parent / "ray"), *arguments]


def wait_for_jobs_server(head: subprocess.Popen[bytes], address: str, environment: Mapping[str, str]) -> None:
    """Return when `ray job list` answers, which is when jobs can be submitted."""
    deadline = time.monotonic() + 60
    while True:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        command = ray_command("job", "list", "--address", address)
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        if asked.returncode == 0:
            return
        assert time.monotonic() < deadline, f"no jobs server after 60 s: {asked.stderr}"
        time.sleep(0.5)


def stop(head: subprocess.Popen[bytes]) -> None:
    """End `ray start --block`, which ends what it started, and see that nothing of it is left."""
    family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(timeout=30)
    except subprocess.TimeoutExpired:
        head.kill()
    _, left = psutil.wait_procs(family, timeout=10)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster of its own, token authentication on: (address of the jobs server, environment of its clients)."""
    # A short path: the sockets below it may have names of 107 characters at most.
    scratch = Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    environment |= {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH")))),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(scratch / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    (scratch / "token").write_text("a-token-for-this-test-only-0123456789abcdef")
    port, dashboard_port, agent_port, client_port = free_ports(4)
    options = ["--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2", f"--temp-dir={scratch / 'ray'}"]
    options += [f"--port={port}", f"--dashboard-port={dashboard_port}", "--object-store-memory=100000000"]
    options += [f"--dashboard-agent-listen-port={agent_port}", f"--ray-client-server-port={client_port}"]
    log = (scratch / "start.log").open("wb")
    head = subprocess.Popen(ray_command("start", *options), cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{dashboard_port}"
        wait_for_jobs_server(head, address, environment)
        yield address, environment
    finally:
        stop(head)
        log.close()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_quickstart_as_a_job(cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    command = ray_command("job", "submit", "--address", address, "--", "python", "examples/quickstart.py")
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
    command = ray_command("job", "submit", "--address", address, "--", "python", "-c", "print(1)")
    stranger = environment | {"RAY_AUTH_TOKEN_PATH": os.devnull, "RAY_AUTH_TOKEN": "wrong" * 10}
    done = subprocess.run(command, cwd=ROOT, env=stranger, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
