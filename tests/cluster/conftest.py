"""Three hosts with Ray on them and one without for all tests here, wrong as hosts are: what names and paths mean."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cluster.local.hosts import Host, Hosts, why_unavailable
from cluster.local.ray_hosts import CLIENT_PORT, RayHosts
from tests.clock import wait_until
from tests.cluster import jobs
from tests.cluster.driver import Driver
from tests.conftest import rank_processes

RELEASE_S = 10.0
# As docs/pages/cluster.md has it: Ray's default of 1000 makes it 2.2 s until a lost node is known, at worst.
# A node whose processes are gone is given up after 3 s instead of 15, a silent one after 33 s instead of 65.
QUICK = {"RAY_timeout_ms_task_wait_for_death_info": "200", "RAY_health_check_period_ms": "1000"}
QUICK["RAY_health_check_failure_threshold"] = "3"
"""Variables for Ray."""


def require_hosts(*programs: str) -> None:
    """Skip the test where there can be no hosts, or where programs are missing."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"not found: {', '.join(missing)}; tests/install_debian.sh installs them")


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts for `rays`, and one for `laptop`."""
    require_hosts()
    with Hosts(4) as hosts:
        for host in hosts:
            _mislead(host)
        yield hosts


@pytest.fixture(scope="session")
def rays(hosts: Hosts, worker_python: Path) -> Iterator[RayHosts]:
    """A cluster with its head on host 0; its driver sees no checkpoint, see `checkpoint`."""
    with RayHosts(list(hosts)[:3], cpus_per_host=2, logs_to_driver=False, environment=QUICK) as rays:
        yield rays


@pytest.fixture(scope="session")
def laptop(hosts: Hosts, rays: RayHosts) -> Host:
    """A host without Ray, and without its /tmp/ray and /dev/shm; it reaches the others at Ray Client's port alone."""
    require_hosts("nft")
    host = hosts[3]
    for place in ("/tmp/ray", "/dev/shm"):
        host.hide(place)
    drop_connections(host, "output", f"tcp dport != {CLIENT_PORT}")
    return host


def _mislead(host: Host) -> None:
    """Give a host a second interface that leads nowhere, and let its name resolve to that one, or to the loopback."""
    host.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
    host.run("ip", "address", "add", f"172.31.{host.index}.1/24", "dev", "other0")
    for interface in ("other0", "other1"):
        host.run("ip", "link", "set", interface, "up")
    own = "127.0.0.1" if host.index < 2 else f"172.31.{host.index}.1"
    host.run("sh", "-c", f"printf '127.0.0.1 localhost\\n{own} {host.name}\\n' > /etc/hosts")


@pytest.fixture(scope="session")
def driver(rays: RayHosts) -> Iterator[Driver]:
    """A program on host 0 that has joined the cluster."""
    with joined(rays, rays.hosts[0]) as driver:
        yield driver


def joined(rays: RayHosts, host: Host, **environment: str) -> closing[Driver]:
    """A program on a host that has joined the cluster."""
    driver = Driver(rays, host, **environment)
    driver.run(jobs.join)
    return closing(driver)


@pytest.fixture(scope="session")
def reference() -> nn.Module:
    """The model of `checkpoint`, whole, in this process."""
    torch.manual_seed(0)
    return jobs.make_mlp()()


@pytest.fixture(scope="session")
def checkpoint(rays: RayHosts, reference: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that holds `reference` for host 1, and nothing for anybody else."""
    return save_for(rays.hosts[1], reference, tmp_path_factory.mktemp("checkpoint"))


def save_for(host: Host, module: nn.Module, folder: Path) -> str:
    """Save a module where one host alone sees it; returns the path."""
    files, seen = folder / "files", folder / f"seen-{host.index}"
    for place in (files, seen):
        place.mkdir()
    save_file(module.state_dict(), files / "model.safetensors")
    host.show_alone(files, seen)
    return str(seen)


def rank_pids(host: Host) -> list[int]:
    """Processes of ranks on a host."""
    ranks = rank_processes()
    return [pid for pid in host.pids() if pid in ranks]


def assert_released(*hosts: Host, within_s: float = RELEASE_S) -> None:
    """Wait until the hosts have no ranks."""
    wait_until(lambda: not any(rank_pids(host) for host in hosts), within_s, "no ranks are left")


def drop_connections(host: Host, hook: str, which: str) -> None:
    """Drop what asks for a connection over the host's link, and is `which`; others that are open stay."""
    chain = f"type filter hook {hook} priority 0; policy accept; meta {hook[0]}if eth0 tcp flags & (syn | ack) == syn"
    host.run("nft", f"table inet drops_{hook} {{ chain drops {{ {chain} {which} drop; }}; }}")
