"""docs/pages/network.md on three hosts: its firewall stands before Ray starts, and lets through what its table lists.

The page has the numbers: its table says which ports `cluster/firewall.nft` opens, and its commands are those that ran.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.local.hosts import Host, Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import CallTimeoutError, GroupError, Placement, RendezvousError, Timeouts
from tests.cluster import jobs
from tests.cluster.conftest import QUICK, assert_released, joined, rank_pids, require_hosts, save_for
from tests.cluster.driver import ROOT, Driver
from tests.cluster.test_ray_client import ROWS, fit
from tests.docs.blocks import texts_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

PAGE = (ROOT / "docs/pages/network.md").read_text()
PLACEMENT = Placement(strategy="STRICT_SPREAD", port_range=(29500, 29599))
"""The page's: a rank on each host."""
FIREWALL = ROOT / "cluster/firewall.nft"


def commands(begin: str) -> str:
    """Return the block of commands of the page that has this."""
    (found,) = texts_of("docs/pages/network.md", begin)
    return found


def table() -> dict[str, list[str]]:
    """Return the page's ports → the other cells of their rows."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows if re.match(r"`\d", row[0])}


def spans(ports: Any) -> list[range]:
    """Return ports such as `6379` and `11000-11999` as ranges."""
    ends = [list(map(int, one.split("-"))) for one in ports]
    return [range(first, last + 1) for first, *_, last in (end * 2 if len(end) == 1 else end for end in ends)]


def options(command: str) -> set[str]:
    """Return what a command sets about ports."""
    return set(re.findall(r"--[a-z-]*port[= ]\d+", command))


def send_much() -> None:
    """Call with an argument that goes through Ray's object store."""
    jobs.group().call(len, torch.ones(3_000_000))


def diagnose() -> str:
    """Return what `raysharding doctor --port-range 29500-29599` prints, with a shorter deadline."""
    from raysharding.group.launch import doctor

    doctor._TIMEOUTS = Timeouts(start_s=60.0, rendezvous_s=6.0)
    return str(doctor.diagnose(port_range=(29500, 29599)))


@pytest.fixture(scope="module")
def rays(worker_python: Path) -> Iterator[RayHosts]:
    """Three hosts that are set up by the page's commands, the head on the first."""
    require_hosts("nft")
    with Hosts(3) as hosts:
        for host in hosts:
            host.run("bash", "-ec", commands("sysctl -w"))
        with RayHosts(list(hosts), cpus_per_host=2, logs_to_driver=False, environment=QUICK) as rays:
            yield rays


@pytest.fixture(scope="module")
def checkpoint(rays: RayHosts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint for host 1 alone, which gets rank 0: its store is on another host than the driver."""
    return save_for(rays.hosts[1], jobs.make_mlp()(), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def driver(rays: RayHosts) -> Iterator[Driver]:
    """A program on the head."""
    with joined(rays, rays.hosts[0]) as driver:
        yield driver


@pytest.fixture
def closed(rays: RayHosts, request: pytest.FixtureRequest) -> Iterator[Host]:
    """The host whose firewall lets the ports of the test's parameters through no more."""
    ports, index = request.param
    host = rays.hosts[index]
    change_firewall(host, "delete", ports)
    yield host
    change_firewall(host, "add", ports)


def change_firewall(host: Host, verb: str, ports: str) -> None:
    host.run("nft", f"{verb} element inet raysharding ports {{ {ports} }}")


def left_out(ports: str, index: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("closed", [(ports, index)], indirect=True, ids=[f"{ports} on host {index}"])


def test_the_page_s_numbers_are_those_of_the_files_beside_it(rays: RayHosts) -> None:
    opened = [port for port, row in table().items() if row[-2] == "yes"]
    listed: Any = re.search(r"set ports \{.*?elements = \{(.*?)\n\t\t\}", FIREWALL.read_text(), re.DOTALL)
    assert sorted(re.findall(r"^\s*([\d-]+),", listed[1], re.MULTILINE)) == sorted(opened)
    assert '--8<-- "cluster/firewall.nft"' in PAGE
    started = [rays._ray_start(host) for host in rays.hosts[:2]]
    for shown, ran in zip((commands("ray start --head"), commands("ray start --address")), started, strict=True):
        assert options(shown) == options(" ".join(ran)) - {"--ray-client-server-port=10001"}


def test_load_train_save_fit_restart_and_attach_pass(
    rays: RayHosts, driver: Driver, checkpoint: str, tmp_path: Path
) -> None:
    driver.run(jobs.start, checkpoint, placement=PLACEMENT, name="llama", timeouts=Timeouts(call_s=60.0))
    driver.run(jobs.train, ROWS, torch.zeros(4, 4))
    driver.run(lambda path: jobs.group().save.remote(path, async_save=True).result(), tmp_path / "save")
    driver.run(send_much)
    check_listeners(rays)
    driver.run(fit, str(tmp_path / "fit"))
    trained = driver.run(jobs.forward, ROWS)
    os.kill(rank_pids(rays.hosts[2])[0], signal.SIGKILL)
    with pytest.raises(GroupError, match="died"):
        driver.run(jobs.forward, ROWS)
    driver.run(lambda: jobs.group().restart().checkpoint)
    assert torch.equal(driver.run(jobs.forward, ROWS), trained)
    with joined(rays, rays.hosts[2]) as following:
        following.run(jobs.attach, "llama", timeouts=Timeouts(call_s=5.0, drain_s=1.0))
        assert torch.equal(following.run(jobs.forward, ROWS), trained)
        # Host 1 has not taken anything from host 2 so far, so that there is no connection yet.
        change_firewall(rays.hosts[2], "delete", "6381")
        try:
            with pytest.raises(CallTimeoutError) as caught:
                following.run(send_much)
        finally:
            change_firewall(rays.hosts[2], "add", "6381")
        assert rays.hosts[1].address in {failure.node_ip for failure in caught.value.failures.values()}
        following.run(jobs.stop)
    assert_released(*rays.hosts)


def check_listeners(rays: RayHosts) -> None:
    """Compare where processes of the hosts listen with the table."""
    known = spans(table())
    for host in rays.hosts:
        for line in host.run("ss", "-Htlnp").splitlines():
            address, port = line.split()[3].rsplit(":", 1)
            assert address.startswith("127.") or any(int(port) in span for span in known), line


@left_out("29500-29599", 0)
def test_without_the_store_s_port_the_doctor_names_it(rays: RayHosts, driver: Driver, closed: Host) -> None:
    said = driver.run(diagnose)
    assert re.search(rf"rank \d on 10\.77\.0\.\d cannot reach rank 0's store at {closed.address}:295\d\d", said)


@left_out("29500-29599", 1)
def test_without_the_store_s_port_the_error_names_it(driver: Driver, checkpoint: str, closed: Host) -> None:
    what = rf"rank \d on 10\.77\.0\.\d cannot reach rank 0's store at {closed.address}:295\d\d within 6 s; let"
    with pytest.raises(RendezvousError, match=what):
        driver.run(jobs.start, checkpoint, placement=PLACEMENT, timeouts=Timeouts(rendezvous_s=6.0))


@left_out("40000-43999", 2)
def test_a_firewalled_host_is_named_within_the_deadline(
    rays: RayHosts, driver: Driver, checkpoint: str, closed: Host
) -> None:
    with pytest.raises(RendezvousError, match="cannot connect") as caught:
        driver.run(jobs.start, checkpoint, placement=PLACEMENT, timeouts=Timeouts(rendezvous_s=6.0))
    first, *lines = str(caught.value).splitlines()
    assert f"(suspect: {closed.address}); gloo and NCCL listen on TCP ports that the kernel chooses" in first
    assert "here 40000 to 43999 (net.ipv4.ip_local_port_range)" in first
    for host in rays.hosts[:2]:
        what = rf"  {host.address} cannot connect to {closed.address}:4[0-3]\d\d\d: no answer within 3 s"
        assert any(re.fullmatch(what, line) for line in lines), lines
    assert len(caught.value.missing_ranks) == 1
    assert_released(*rays.hosts)


@left_out("11000-11999", 2)
def test_without_the_workers_ports_ranks_do_not_start(driver: Driver, checkpoint: str, closed: Host) -> None:
    what = "let the nodes reach each other at the ports of Ray's workers"
    with pytest.raises(CallTimeoutError, match=what) as caught:
        driver.run(jobs.start, checkpoint, placement=PLACEMENT, timeouts=Timeouts(start_s=6.0))
    assert closed.address in {failure.node_ip for failure in caught.value.failures.values()}
