"""A GCS with external storage (KubeRay's fault tolerance) goes away for a while and comes back: nothing breaks."""

from __future__ import annotations

import shutil
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
from raysharding import FitStep, Placement, ShardedModelGroup
from tests.clock import now
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, rank_pids, require_hosts
from tests.cluster.driver import Driver

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.usefixtures("worker_python")]

REDIS_PORT = 6390
NEW_ADDRESS = "10.77.0.77"
AWAY_S = 20.0
STEP_S = 0.1
NUM_STEPS = 450
"""More than 50 s of steps: the GCS goes and comes back in them."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """The head, two hosts for the ranks and the driver, and one for Redis alone."""
    require_hosts()
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here: bash tests/install_debian.sh")
    with Hosts(4) as hosts:
        yield hosts


@pytest.fixture
def rays(hosts: Hosts) -> Iterator[RayHosts]:
    """A cluster whose head keeps its state in Redis."""
    address = start_redis(hosts[3])
    with RayHosts(
        list(hosts)[:3], cpus_per_host=1, logs_to_driver=False, environment={"RAY_REDIS_ADDRESS": address}
    ) as rays:
        yield rays


def start_redis(host: Host) -> str:
    """Start a Redis that keeps nothing on disk; returns its address."""
    options = {"bind": host.address, "port": str(REDIS_PORT), "save": "", "protected-mode": "no"}
    host.popen(["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))])
    until = now() + 30
    while "PONG" not in host.run("sh", "-c", f"redis-cli -h {host.address} -p {REDIS_PORT} ping || true"):
        assert now() < until, "Redis does not answer"
        time.sleep(0.1)
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
    options: dict[str, Any] = {"model": jobs.make_mlp(), "world_size": 2, "device": "cpu", "max_restarts": 3}
    placement = Placement(strategy="STRICT_SPREAD", labels={"role": "worker"})
    jobs._group = ShardedModelGroup.from_checkpoint(
        checkpoint, **options, placement=placement, optimizer=torch.optim.SGD
    )
    rows = [{"input": [1.0] * 8}] * 2 * NUM_STEPS
    report = jobs.group().fit(rows, batch_size=2, loss=loss, callbacks=[note])
    return times, report.num_restarts, report.num_steps


@pytest.mark.parametrize("pod", ["the same address", "another address"])
def test_a_fit_goes_on_while_a_gcs_with_external_storage_is_away(pod: str, rays: RayHosts, tmp_path: Path) -> None:
    """A new pod has another address than the one before, behind the service whose address the nodes were given."""
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    head, *workers = rays.hosts
    driver = Driver(rays, workers[0])
    driver.run(jobs.join)
    begun = tmp_path / "begun"
    driver.begin(fit, str(tmp_path / "model.safetensors"), begun)
    until = now() + 60
    while not begun.exists():
        assert now() < until
        time.sleep(0.1)
    pids = [rank_pids(host) for host in workers]
    went = now()
    head.kill()
    time.sleep(AWAY_S)
    head.run(
        "rm", "/tmp/ray/ray_current_cluster"
    )  # a new pod has none, and `ray start` would take it for a running one
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
    driver.close()
