"""The head of the cluster dies under a driver on another host: a clear message, and nobody waits for Ray's minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from cluster.local.hosts import Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import GroupError
from raysharding.group.cluster.gcs_monitor import GCS_GONE_S
from tests.clock import now
from tests.cluster import jobs
from tests.cluster.conftest import assert_released, ended, rank_pids, require_hosts
from tests.cluster.driver import Driver

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("worker_python")]


@pytest.mark.parametrize(
    "with_rank",
    [pytest.param(True, marks=pytest.mark.full, id="a rank with it"), pytest.param(False, id="the head alone")],
)
def test_the_head_dies(tmp_path: Path, with_rank: bool) -> None:
    require_hosts()
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    with Hosts(3) as hosts, RayHosts(list(hosts), cpus_per_host=1 if with_rank else 2, logs_to_driver=False) as rays:
        driver = Driver(rays, hosts[1])
        driver.run(jobs.join)
        size = 3 if with_rank else 2
        ranks = driver.run(
            jobs.start,
            str(tmp_path / "model.safetensors"),
            world_size=size,
            labels=None if with_rank else {"role": "worker"},
        )
        assert (hosts[0].address in {info.node_ip for info in ranks}) == with_rank
        driver.run(jobs.begin_waiting, True)
        killed = now()
        hosts[0].kill()
        when, error = driver.run(jobs.failure)
        assert isinstance(error, GroupError)
        if with_rank:
            assert error.primary is not None
            assert error.primary.node_ip == hosts[0].address
            assert when - killed < 3.0
        else:
            assert f"the GCS (Ray's head process) at {rays.address} has not answered for" in str(error)
            assert "ray.shutdown()" in str(error)
            assert when - killed < GCS_GONE_S + 3.0
        assert_released(*hosts)
        driver.close()
        assert ended(driver.process, within_s=30.0) < 20.0
        assert driver.process.returncode == 0
        assert not any(rank_pids(host) for host in hosts)
