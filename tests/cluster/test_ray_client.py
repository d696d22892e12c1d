"""A driver behind `ray://` on a host that is no node, as a laptop is: what works, and errors where ports are closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cluster.local.hosts import Host
from cluster.local.ray_hosts import RayHosts
from raysharding import GroupError, Placement, PlacementError, ShardedModelGroup, Timeouts
from tests.clock import now
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, drop_connections, joined, rank_pids
from tests.cluster.driver import Driver

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

OPTIONS: dict[str, Any] = {"model": jobs.make_mlp(), "world_size": 3, "device": "cpu"}
ROWS = torch.linspace(-1, 1, 32).reshape(4, 8)
SILENT_S = 15.0
"""The driver takes a GCS that does not answer for so long for gone."""
NAT = "192.168.77.2"
"""An address of the laptop that the head alone has a route to."""


def make(checkpoint: str, world_size: int, timeouts: Timeouts | None = None) -> None:
    """Make a group beside the driver's own, and let go of it."""
    options = OPTIONS | {"world_size": world_size, "placement": Placement(strategy="SPREAD")}
    ShardedModelGroup.from_checkpoint(checkpoint, **options, timeouts=timeouts).shutdown()


def fit(save_to: str) -> tuple[int, list[str]]:
    """Train the driver's group; returns the number of steps, and the saves that the driver sees."""

    def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
        import torch

        return torch.tensor([row["x"] for row in rows])

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    jobs.group().set_optimizer(torch.optim.SGD, lr=0.1)
    data = [{"x": [float(number)] * 8} for number in range(8)]
    report = jobs.group().fit(data, batch_size=4, epochs=1, collate_fn=collate, loss=loss, save_to=save_to)
    return report.num_steps, os.listdir(save_to)


@pytest.fixture(scope="module")
def driver(rays: RayHosts, laptop: Host) -> Iterator[Driver]:
    """A program on the laptop that has connected to the cluster."""
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{SILENT_S + 10.0:g}"}
    with joined(rays, laptop, RAY_ADDRESS=rays.client_address, **soon) as driver:
        yield driver


@pytest.fixture(scope="module")
def made(driver: Driver, checkpoint: str) -> Iterator[float]:
    """When the driver's group was ready, which has a rank on each host; rank 0 on host 1, which sees the checkpoint."""
    driver.run(jobs.start, checkpoint, name="llama")
    yield now()
    if driver.process.poll() is None:
        driver.run(jobs.stop)


@pytest.fixture(scope="module")
def trained(driver: Driver, made: float) -> torch.Tensor:
    """What the driver's group gives for `ROWS` when its driver ends."""
    output = driver.run(jobs.forward, ROWS)
    assert isinstance(output, torch.Tensor)
    return output


@pytest.fixture(scope="module")
def next_driver(rays: RayHosts, laptop: Host, driver: Driver) -> Iterator[Driver]:
    """Another program on the laptop, which has connected to the cluster after the end of the first.

    Not beside it: Ray 2.60 forks a server for each client, which fails at times while another client is served.
    """
    driver.close()
    driver.process.wait(30)
    with joined(rays, laptop, RAY_ADDRESS=rays.client_address) as following:
        yield following
        following.run(jobs.stop)


def test_a_plan_has_the_cluster_s_nodes(driver: Driver, rays: RayHosts, checkpoint: str) -> None:
    said = driver.run(lambda: str(ShardedModelGroup.plan(checkpoint, **OPTIONS)))
    assert "3 ranks on cpu" in said
    assert all(host.address in said for host in rays.hosts)


def test_forward_equals_one_process(driver: Driver, made: float, reference: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(driver.run(jobs.forward, ROWS), reference(ROWS))


def test_the_log_of_a_rank_on_the_head_is_read_there(driver: Driver, made: float, rays: RayHosts) -> None:
    (pid,) = rank_pids(rays.hosts[0])
    rank = driver.run(lambda: next(info.rank for info in jobs.group().ranks if info.pid == pid))
    assert f"rank {rank} (group 'llama')" in driver.run(lambda: jobs.group().logs(rank))


def test_a_fit_saves_where_the_nodes_see_it_and_a_restart_finds_it(
    driver: Driver, made: float, rays: RayHosts, laptop: Host, tmp_path: Path
) -> None:
    laptop.hide(tmp_path)
    assert driver.run(fit, str(tmp_path)) == (2, [])
    assert os.listdir(tmp_path) == ["step-2"]
    trained = driver.run(jobs.forward, ROWS)
    os.kill(rank_pids(rays.hosts[2])[0], signal.SIGKILL)
    with pytest.raises(GroupError, match="died") as caught:
        driver.run(jobs.forward, ROWS)
    assert caught.value.primary is not None
    assert caught.value.primary.node_ip == rays.hosts[2].address
    driver.run(lambda: jobs.group().restart().checkpoint)
    assert torch.equal(driver.run(jobs.forward, ROWS), trained)


def test_a_placement_error_says_what_the_cluster_has(driver: Driver, rays: RayHosts, checkpoint: str) -> None:
    with pytest.raises(PlacementError, match="infeasible: even when idle, the cluster has space for 6 ranks") as caught:
        driver.run(make, checkpoint, 9, Timeouts(place_s=1.0))
    assert all(f"node {host.address}: free " in str(caught.value) for host in rays.hosts)


def test_nobody_connects_to_the_driver(driver: Driver, rays: RayHosts, laptop: Host, checkpoint: str) -> None:
    """A firewall lets nobody in, and the head alone has a route to the laptop's address."""
    drop_connections(laptop, "input", "tcp dport >= 20000")  # which ranks need and Ray does not
    laptop.run("ip", "address", "add", f"{NAT}/32", "dev", "eth0")
    rays.hosts[0].run("ip", "route", "add", NAT, "dev", "eth0")
    laptop.run("ip", "route", "change", "10.77.0.0/24", "dev", "eth0", "src", NAT)
    try:
        driver.run(make, checkpoint, 3, timeout_s=60.0)
    finally:
        laptop.run("ip", "route", "change", "10.77.0.0/24", "dev", "eth0", "src", laptop.address)
        laptop.run("nft", "delete table inet drops_input")


def test_a_driver_that_reaches_ray_client_s_port_alone_keeps_its_group(driver: Driver, made: float) -> None:
    time.sleep(max(0.0, made + SILENT_S + 2.0 - now()))
    driver.run(jobs.forward, ROWS)


def test_the_next_program_attaches(driver: Driver, made: float, trained: torch.Tensor, next_driver: Driver) -> None:
    next_driver.run(jobs.attach, "llama")
    assert torch.equal(next_driver.run(jobs.forward, ROWS), trained)


def test_a_driver_that_is_cut_off_is_told(next_driver: Driver, rays: RayHosts, laptop: Host, checkpoint: str) -> None:
    next_driver.run(jobs.start, checkpoint, timeouts=Timeouts(lease_s=2.0))
    laptop.cut()
    try:
        _, why = next_driver.run(jobs.state_within, "broken", 30.0)
        assert "or Ray Client lost its connection to the head" in why
        assert_released(*rays.hosts, within_s=60.0)
    finally:
        laptop.mend()
