"""Groups of drivers behind `ray://` (Ray Client), with a head and drivers in processes of their own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.clock import now
from tests.group.supervision.standing import free_ports

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0

BEGIN = """
import os, signal, sys
import ray, torch
from torch import nn
from raysharding import GroupError, PlacementError, ShardedModelGroup, Split, Timeouts

def build():
    from torch import nn
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def collate(rows):
    import torch
    return torch.tensor([row["x"] for row in rows])

def loss(output):
    return output.square().mean()

address, checkpoint = sys.argv[1:]
ray.init(address, log_to_driver=False)
options = dict(model=build, world_size=2, device="cpu")
rows = torch.ones(3, 8)
"""

DRIVER = """
assert "2 ranks on cpu" in str(ShardedModelGroup.plan(checkpoint, **options))
group = ShardedModelGroup.from_checkpoint(checkpoint, **options, name="llama")
before = group.forward(Split(rows))
os.kill(group.ranks[1].pid, signal.SIGKILL)
try:
    group.forward(Split(rows))
except GroupError as error:
    print(error)
group.restart()
assert torch.equal(group.forward(Split(rows)), before)
group.set_optimizer(torch.optim.SGD, lr=0.1)
data = [{"x": [float(number)] * 8} for number in range(16)]
print(group.fit(data, batch_size=8, epochs=2, collate=collate, loss=loss))
assert not torch.equal(group.forward(Split(rows)), before)
try:
    ShardedModelGroup.from_checkpoint(checkpoint, **options | {"world_size": 9}, timeouts=Timeouts(place_s=1.0))
except PlacementError as error:
    print(error)
print("sum", group.forward(Split(rows)).sum().item())
"""

ATTACHING = """
group = ShardedModelGroup.attach("llama")
print("sum", group.forward(Split(rows)).sum().item())
group.shutdown()
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """Where Ray's server for clients listens, of a cluster with four CPUs."""
    port, client_port = free_ports(2)
    # Near the root: the sockets in it may have names of 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rsc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = ["ray", "start", "--head", "--block", f"--port={port}", f"--ray-client-server-port={client_port}"]
        command += [f"--temp-dir={folder}/ray", "--num-cpus=4", "--include-dashboard=false"]
        with Path(folder, "log").open("w") as log:
            head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            until = now() + START_S
            while "block forever" not in Path(folder, "log").read_text():
                assert head.poll() is None, Path(folder, "log").read_text()
                assert now() < until, Path(folder, "log").read_text()
                time.sleep(0.1)
            yield f"ray://127.0.0.1:{client_port}"
        finally:
            end(head)


def end(head: subprocess.Popen[bytes]) -> None:
    """End Ray and all that it has started."""
    started = psutil.Process(head.pid).children(recursive=True)
    head.terminate()
    try:
        head.wait(20)
    finally:
        for process in (psutil.Process(head.pid), *started) if head.poll() is None else started:
            if process.is_running():
                process.kill()
        psutil.wait_procs(started, 10)


def run(code: str, address: str, checkpoint: Path, environment: dict[str, str]) -> str:
    """What a driver says."""
    command = [sys.executable, "-c", BEGIN + code, address, str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_group_is_made_trained_restarted_and_attached_to(
    address: str, checkpoint: Path, environment: dict[str, str]
) -> None:
    said = run(DRIVER, address, checkpoint, environment)
    assert "rank 1 died" in said
    assert "4 steps in" in said
    assert "infeasible: even when idle, the cluster has space for 4 ranks" in said
    attached = run(ATTACHING, address, checkpoint, environment)
    assert attached.splitlines()[-1] == said.splitlines()[-1], "the trained weights, without a load"
