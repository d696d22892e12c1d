"""A driver behind `ray://` on another host than Ray's server: the ranks connect to the driver's own address."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cluster.local.ray_hosts import RayHosts
from tests.cluster import jobs
from tests.cluster.driver import Driver


@pytest.mark.full
@pytest.mark.timeout(240)
def test_forward_from_another_host_than_the_servers(rays: RayHosts, checkpoint: Path, reference: nn.Module) -> None:
    driver, rows = Driver(rays, rays.hosts[2]), torch.randn(4, 8)
    try:
        driver.run(jobs.join_by_client, rays.hosts[0].address)
        driver.run(jobs.start, str(checkpoint), world_size=2, strategy="SPREAD")
        with torch.no_grad():
            torch.testing.assert_close(driver.run(jobs.forward, rows), reference(rows))
        driver.run(jobs.stop)
    finally:
        driver.close()
