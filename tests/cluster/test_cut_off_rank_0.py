"""Rank 0's host is cut off while a bucket of `state_dict` is on its way: the other ranks are judged meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.local.hosts import Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import GroupError, Timeouts
from raysharding.units import MIB
from tests.clock import now, wait_until
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, rank_pids, save_for
from tests.cluster.driver import Driver

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

WIDE = 2_000_000
"""26 million parameters: buckets that take seconds at `RATE_MBIT`."""
RATE_MBIT = 64.0


@pytest.fixture
def wide(hosts: Hosts, rays: RayHosts, driver: Driver, tmp_path: Path) -> Iterator[None]:
    """Two ranks on each of the hosts 1 and 2, rank 0 on host 1, of a model that takes long to reach the driver."""
    seen = save_for(rays.hosts[1], jobs.make_mlp(WIDE)(), tmp_path)
    spread: dict[str, Any] = {"world_size": 4, "strategy": "PACK", "labels": {"role": "worker"}}
    ranks = driver.run(jobs.start, seen, width=WIDE, **spread, timeouts=Timeouts(call_s=40.0, drain_s=1.0))
    assert [rank.node_ip for rank in ranks] == [rays.hosts[number].address for number in (1, 1, 2, 2)]
    hosts.set_rate(RATE_MBIT)
    yield
    hosts.set_rate(None)
    rays.hosts[1].mend()
    driver.run(jobs.stop)
    driver.run(jobs.await_nodes, 3)


def begin_state_dict() -> None:
    """Begin to gather the whole model to this driver."""
    jobs._call = jobs.group().state_dict.remote()


@pytest.mark.usefixtures("wide")
def test_a_bucket_that_never_arrives_keeps_nobody_from_judging_the_other_ranks(rays: RayHosts, driver: Driver) -> None:
    here, of_rank_0, other = rays.hosts
    before = here.link_bytes()
    driver.run(begin_state_dict)
    wait_until(lambda: (here.link_bytes() - before).received > 3 * MIB, 60, "a bucket is on its way", every_s=0.01)
    of_rank_0.cut()
    time.sleep(0.5)
    killed = now()
    os.kill(rank_pids(other)[1], signal.SIGKILL)
    seen, _ = driver.run(jobs.state_within, "broken", 30.0)
    assert seen - killed < 2.0
    ended, error = driver.run(jobs.failure)
    assert isinstance(error, GroupError)
    assert "died" in str(error)
    assert ended - killed < 10.0
    driver.run(jobs.stop)
    assert_released(here, other)
    of_rank_0.mend()
    assert_released(of_rank_0)
