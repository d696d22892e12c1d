"""A GCS with external storage (KubeRay's fault tolerance) goes away for a while and comes back: nothing breaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.local.hosts import INTERFACE, Host, Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import FitStep
from tests.clock import now, wait_until
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, joined, rank_pids, require_hosts

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.usefixtures("worker_python")]

REDIS_PORT = 6390
NEW_ADDRESS = "10.77.0.77"
AWAY_S = 20.0
STEP_S = 0.1
NUM_STEPS = 450
"""More than 50 s of steps: the GCS goes and comes back in them."""


@pytest.fixture
def rays() -> Iterator[RayHosts]:
    """A cluster whose head keeps its state in Redis, which has a host for itself."""
    require_hosts("redis-server")
    with Hosts(4) as hosts:
        variables = {"RAY_REDIS_ADDRESS": start_redis(hosts[3])}
        with RayHosts(list(hosts)[:3], cpus_per_host=1, logs_to_driver=False, environment=variables) as rays:
            yield rays


def start_redis(host: Host) -> str:
    """Start a Redis that keeps nothing on disk; returns its address."""
    options = {"bind": host.address, "port": str(REDIS_PORT), "save": "", "protected-mode": "no"}
    host.popen(["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))])
    ping = ("sh", "-c", f"redis-cli -h {host.address} -p {REDIS_PORT} ping || true")
    wait_until(lambda: "PONG" in host.run(*ping), 30, "Redis answers")
    return f"{host.address}:{REDIS_PORT}"


def fit(checkpoint: str, begun: Path) -> tuple[list[float], int, int]:
    """Train for a minute and say when that has begun; returns when steps ended, and how many restarts and steps."""

    def loss(output: Any) -> Any:
        import time

        time.sleep(STEP_S)
        return output.square().mean()

    def note(step: FitStep) -> None:
        begun.touch()
        times.append(now())

    times: list[float] = []
    options: dict[str, Any] = {"world_size": 2, "labels": {"role": "worker"}, "max_restarts": 3}
    jobs.start(checkpoint, optimizer=torch.optim.SGD, **options)
    rows = [{"input": [1.0] * 8}] * 2 * NUM_STEPS
    report = jobs.group().fit(rows, batch_size=2, loss=loss, callbacks=[note])
    return times, report.num_restarts, report.num_steps


@pytest.mark.parametrize("pod", ["the same address", "another address"])
def test_a_fit_goes_on_while_a_gcs_with_external_storage_is_away(pod: str, rays: RayHosts, tmp_path: Path) -> None:
    """A new pod has another address than the one before, behind the service whose address the nodes were given."""
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    head, *workers = rays.hosts
    begun = tmp_path / "begun"
    with joined(rays, workers[0]) as driver:
        driver.begin(fit, str(tmp_path / "model.safetensors"), begun)
        wait_until(begun.exists, 60, "the run has begun")
        pids = [rank_pids(host) for host in workers]
        went = now()
        head.kill()
        time.sleep(AWAY_S)
        # A new pod has none, and `ray start` would take it for a running one.
        head.run("rm", "/tmp/ray/ray_current_cluster")
        if pod == "another address":
            head.run("ip", "address", "add", f"{NEW_ADDRESS}/24", "dev", INTERFACE)
            head = replace(head, address=NEW_ADDRESS)
        rays.start(head)
        came = now()
        times, num_restarts, num_steps = driver.end()
        assert (num_restarts, num_steps) == (0, NUM_STEPS)
        assert any(went + AWAY_S / 2 < one < came for one in times), "steps while it was away"
        assert times[-1] > came, "and after it came back"
        assert [rank_pids(host) for host in workers] == pids, "no rank has ended itself"
        assert driver.run(jobs.forward, torch.ones(4, 8)).shape == (4, 4)
        driver.run(jobs.stop)
        assert_released(*workers)
