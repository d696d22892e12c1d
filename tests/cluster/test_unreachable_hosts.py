"""A host dies, or is cut off: time to the error, what it says, and what is left on either side.

The last file here that uses `rays`: its last test takes the head away.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.local.hosts import Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import CallTimeoutError, FitStep, GroupError, Placement, Timeouts
from raysharding.group.controller.members import LEASE_S
from raysharding.units import MIB
from tests.clock import now, wait_until
from tests.cluster import jobs
from tests.cluster.conftest import QUICK, assert_released, joined, rank_pids, require_hosts, save_for
from tests.cluster.driver import Driver
from tests.controllers import controller_pids
from tests.faults.test_controller import slow_files, square

pytestmark = pytest.mark.timeout(240)

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


@pytest.mark.full
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


GIVE_UP_S = 10.0
"""Ray gives a node up after 3 s without its processes here (`conftest.QUICK`); the driver's own look is shorter."""
FULL_PLACE: dict[str, Any] = {"placement": Placement(strategy="STRICT_SPREAD", cpus_per_rank=2.0)}
FULL_PLACE["timeouts"] = Timeouts(place_s=30.0)
"""All CPUs of the nodes that have ranks."""


@pytest.fixture
def whole(rays: RayHosts, driver: Driver) -> Iterator[None]:
    """Ray on all hosts: again on those that the test before has lost."""
    alive = driver.run(jobs.nodes)
    lost = [host for host in rays.hosts if not host.pids() or host.address not in alive]
    for host in lost:
        host.kill()
    driver.run(jobs.await_nodes, len(rays.hosts) - len(lost))
    rays.start(*lost)
    driver.run(jobs.await_nodes, len(rays.hosts))
    yield
    if driver.process.poll() is None:
        driver.run(jobs.stop)
    rays.hosts[2].mend()


@pytest.fixture
def site(request: pytest.FixtureRequest, worker_python: Path) -> Iterator[tuple[RayHosts, Driver]]:
    """`rays` and `driver`; of its own where a test is `full`: no driver joins Ray on a host that was lost before."""
    if request.node.get_closest_marker("full") is None:
        request.getfixturevalue("whole")
        yield request.getfixturevalue("rays"), request.getfixturevalue("driver")
        return
    require_hosts()
    with (
        Hosts(3) as hosts,
        RayHosts(list(hosts), cpus_per_host=2, logs_to_driver=False, environment=QUICK) as rays,
        joined(rays, hosts[0]) as driver,
    ):
        yield rays, driver


@pytest.fixture
def group(whole: None, driver: Driver, checkpoint: str) -> None:
    """A group with a rank on each host; the tests lose host 2."""
    driver.run(jobs.start, checkpoint, timeouts=Timeouts(call_s=5.0))


@pytest.mark.usefixtures("group")
def test_a_host_that_is_cut_off_is_a_hang(rays: RayHosts, driver: Driver) -> None:
    *others, host = rays.hosts
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
    assert_released(*others)
    assert rank_pids(host), "nobody can reach it"
    host.mend()
    assert_released(host)


def while_idle(begun: Path) -> tuple[float, str]:
    begun.touch()
    return jobs.state_within("broken", 60.0)


def in_a_call(begun: Path) -> tuple[float, str]:
    jobs.begin_waiting(in_collective=True)
    time.sleep(0.5)
    begun.touch()
    ended, error = jobs.failure()
    assert isinstance(error, GroupError)
    return ended, str(error)


def in_a_save(begun: Path) -> tuple[float, str]:
    jobs.group().call(slow_files, 2.0)
    call = jobs.group().save.remote(begun.parent / "second")
    time.sleep(0.5)
    begun.touch()
    with pytest.raises(GroupError) as caught:
        call.result()
    return now(), str(caught.value)


def in_a_fit(begun: Path) -> tuple[float, str]:
    def note(step: FitStep) -> None:
        if step.num_steps == 3:
            begun.touch()

    jobs.group().set_optimizer(torch.optim.SGD, lr=0.1)
    rows = [{"input": [1.0] * 8}] * 40_000
    with pytest.raises(GroupError) as caught:
        jobs.group().fit(rows, batch_size=3, loss=square, callbacks=[note], progress=False)
    return now(), str(caught.value)


@pytest.mark.parametrize(
    "phase", [in_a_call, *(pytest.param(one, marks=pytest.mark.full) for one in (while_idle, in_a_save, in_a_fit))]
)
def test_a_controller_whose_node_is_lost_names_the_node(
    phase: Callable[[Path], tuple[float, str]], site: tuple[RayHosts, Driver], tmp_path: Path
) -> None:
    """And the named group comes back on another node, from its newest save, by the driver that has attached."""
    rays, driver = site
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    options: dict[str, Any] = {"world_size": 2, "name": "doomed", "labels": {"role": "worker"}}
    timeouts = Timeouts(call_s=60.0, load_stall_s=30.0, drain_s=1.0)
    before = controller_pids()
    with joined(rays, rays.hosts[2]) as maker:
        maker.run(jobs.start, str(tmp_path / "model.safetensors"), timeouts=timeouts, **options)
    maker.process.wait(30)
    (pid,) = controller_pids() - before
    (lost,) = (host for host in rays.hosts if pid in host.pids())
    assert lost is not rays.hosts[0], "it is where the group was made, or where ranks are"
    driver.run(jobs.attach, "doomed")
    driver.run(jobs.change)
    driver.run(lambda path: jobs.group().save(path), tmp_path / "saved")
    saved = driver.run(lambda: jobs.group().state_dict())
    driver.begin(phase, tmp_path / "begun")
    wait_until((tmp_path / "begun").exists, 60, "the phase has begun", every_s=0.01)
    killed = now()
    lost.kill()
    ended, said = driver.end(60.0)
    assert ended - killed < GIVE_UP_S
    assert "controller" in said
    assert lost.address in said
    assert_released(*rays.hosts)
    assert driver.run(lambda: jobs.group().state.value) == "broken"
    assert driver.run(lambda: jobs.group().restart(world_size=1).checkpoint) == str(tmp_path / "saved")
    weights = driver.run(lambda: jobs.group().state_dict())
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    driver.run(jobs.stop)
    assert_released(*rays.hosts)


@pytest.mark.full
def test_a_driver_lost_with_its_node_takes_its_unnamed_group_with_it(
    site: tuple[RayHosts, Driver], tmp_path: Path
) -> None:
    """An unnamed group's controller is on its driver's node: nobody is left to be told, and nothing stays."""
    rays, driver = site
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    with joined(rays, rays.hosts[2]) as other:
        other.run(jobs.start, str(tmp_path / "model.safetensors"))
        rays.hosts[2].kill()
    assert_released(*rays.hosts, within_s=GIVE_UP_S)
    driver.run(jobs.await_nodes, 2)
    driver.run(jobs.start, str(tmp_path / "model.safetensors"), world_size=2, **FULL_PLACE)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "in_collective", [pytest.param(False, id="own work", marks=pytest.mark.full), pytest.param(True, id="collective")]
)
def test_a_node_that_dies_in_a_call_is_named_at_once(rays: RayHosts, driver: Driver, in_collective: bool) -> None:
    host = rays.hosts[2]
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
@pytest.mark.usefixtures("group")
def test_a_node_that_dies_breaks_an_idle_group_and_gets_ranks_when_it_is_back(
    rays: RayHosts, driver: Driver, checkpoint: str
) -> None:
    host = rays.hosts[2]
    killed = now()
    host.kill()
    seen, why = driver.run(jobs.state_within, "broken", 5.0)
    assert seen - killed < 2.0
    assert host.address in why
    assert_released(*rays.hosts)
    # The GCS asks the dead node for its bundles until 5 s after this, at an ever slower pace, and on this connection...
    time.sleep(1.5)
    driver.run(jobs.stop)
    driver.run(jobs.await_nodes, 2)
    # ...which it takes for dead still when the node is back.
    time.sleep(2.0)
    rays.start(host)
    driver.run(jobs.await_nodes, 3)
    ranks = driver.run(jobs.start, checkpoint, **FULL_PLACE)
    assert host.address in [rank.node_ip for rank in ranks]


@pytest.mark.full
@pytest.mark.usefixtures("group")
def test_ranks_that_are_cut_off_for_good_end_themselves(rays: RayHosts) -> None:
    host = rays.hosts[2]
    host.cut()
    cut = time.monotonic()
    wait_until(lambda: not rank_pids(host), LEASE_S + 15.0, "they have ended")
    assert time.monotonic() - cut > LEASE_S - 20.0, "a GCS may be away for a minute"


@pytest.mark.usefixtures("whole")
def test_the_head_dies_under_two_drivers_on_another_host(rays: RayHosts, checkpoint: str) -> None:
    """A rank that dies with it is named at once; else its silence is told, and nobody waits for Ray's minute."""
    head, host, _ = rays.hosts
    with joined(rays, host) as first, joined(rays, host, RAY_gcs_rpc_server_reconnect_timeout_s="20") as second:
        first.begin(jobs.start, checkpoint)
        ranks = second.run(jobs.start, checkpoint, world_size=2, labels={"role": "worker"})
        assert head.address not in {info.node_ip for info in ranks}
        assert head.address in {info.node_ip for info in first.end()}
        assert set() < controller_pids() <= set(host.pids()), "where their drivers are"
        for driver in (first, second):
            driver.run(jobs.begin_waiting, True)
        killed = now()
        head.kill()
        when, error = first.run(jobs.failure)
        assert isinstance(error, GroupError)
        assert error.primary is not None
        assert error.primary.node_ip == head.address
        assert when - killed < 3.0
        when, error = second.run(jobs.failure)
        assert isinstance(error, GroupError)
        assert f"the GCS (Ray's head process) at {rays.address} has not answered for 10 s" in str(error)
        assert "ray.shutdown()" in str(error)
        assert when - killed < 10.0 + 3.0
        assert_released(*rays.hosts)
    closed = now()
    for driver in (first, second):
        driver.process.wait(30)
        assert driver.process.returncode == 0
    assert now() - closed < 20.0
    assert not any(rank_pids(host) for host in rays.hosts)
