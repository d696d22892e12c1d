"""A host dies, or is cut off: time to the error, what it says, and what is left on either side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local.ray_hosts import RayHosts
from raysharding import CallTimeoutError, GroupError, Timeouts
from raysharding.group.controller.members import LEASE_S
from tests.clock import now
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, rank_pids
from tests.cluster.driver import Driver

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def lost(rays: RayHosts, driver: Driver, checkpoint: Path) -> Iterator[int]:
    """Number of a host that the test may lose, with one rank of a group on each host; it comes back after the test."""
    driver.run(jobs.start, str(checkpoint), timeouts=Timeouts(call_s=5.0))
    yield 2
    driver.run(jobs.stop)
    host = rays.hosts[2]
    host.mend()
    host.kill()
    driver.run(jobs.await_nodes, 2)
    rays.start(host)
    driver.run(jobs.await_nodes, 3)


@pytest.mark.parametrize(
    "in_collective", [pytest.param(False, id="own work", marks=pytest.mark.full), pytest.param(True, id="collective")]
)
def test_a_node_that_dies_in_a_call_is_named_at_once(
    rays: RayHosts, driver: Driver, lost: int, in_collective: bool
) -> None:
    host = rays.hosts[lost]
    driver.run(jobs.begin_waiting, in_collective)
    time.sleep(0.5)
    killed = now()
    host.kill()
    ended, error = driver.run(jobs.failure)
    assert isinstance(error, GroupError)
    assert error.primary is not None
    assert (error.primary.kind, error.primary.node_ip) == ("died", host.address)
    assert host.address in str(error)
    assert {failure.kind for rank, failure in error.failures.items() if rank != error.primary.rank} == {"collateral"}
    assert ended - killed < 2.0
    assert_released(*rays.hosts)


@pytest.mark.full
def test_a_node_that_dies_breaks_an_idle_group(rays: RayHosts, driver: Driver, lost: int) -> None:
    killed = now()
    rays.hosts[lost].kill()
    seen, why = driver.run(jobs.state_within, "broken", 5.0)
    assert seen - killed < 2.0
    assert rays.hosts[lost].address in why
    assert_released(*rays.hosts)


@pytest.mark.full
def test_a_node_that_is_back_at_its_address_gets_ranks(
    rays: RayHosts, driver: Driver, lost: int, checkpoint: Path
) -> None:
    host = rays.hosts[lost]
    host.kill()
    driver.run(jobs.state_within, "broken", 5.0)
    # The GCS asks the dead node for its bundles until 5 s after this, at an ever slower pace, and on this connection...
    time.sleep(1.5)
    driver.run(jobs.stop)
    driver.run(jobs.await_nodes, 2)
    # ...which it takes for dead still when the node is back.
    time.sleep(2.0)
    rays.start(host)
    driver.run(jobs.await_nodes, 3)
    ranks = driver.run(jobs.start, str(checkpoint), cpus_per_rank=2.0, timeouts=Timeouts(place_s=30.0))
    assert host.address in [rank.node_ip for rank in ranks]


def test_a_host_that_is_cut_off_is_a_hang(rays: RayHosts, driver: Driver, lost: int) -> None:
    host = rays.hosts[lost]
    driver.run(jobs.begin_waiting, True)
    begun = now()
    host.cut()
    ended, error = driver.run(jobs.failure)
    assert isinstance(error, CallTimeoutError)
    assert ended - begun < 5.0 + 2.0
    silent = {failure.node_ip for failure in error.failures.values() if "answers no questions" in failure.message}
    assert silent == {host.address}
    assert error.primary is not None
    assert error.primary.node_ip == host.address
    assert_released(*list(rays.hosts)[:2])
    assert rank_pids(host), "nobody can reach it"
    host.mend()
    assert_released(host)


@pytest.mark.full
def test_ranks_that_are_cut_off_for_good_end_themselves(rays: RayHosts, driver: Driver, lost: int) -> None:
    host = rays.hosts[lost]
    host.cut()
    cut, cut_clock = now(), time.monotonic()
    while rank_pids(host):
        assert now() - cut < LEASE_S + 15.0
        time.sleep(0.5)
    assert time.monotonic() - cut_clock > LEASE_S - 20.0, "a GCS may be away for a minute"
