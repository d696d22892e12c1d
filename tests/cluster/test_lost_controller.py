"""Row 33: the node of a named group's controller is lost, in each phase: the driver on another node names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.local.hosts import Host, Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import FitStep, GroupError, ShardedModelGroup, Timeouts
from raysharding.group import GroupState
from tests.clock import now
from tests.cluster import jobs
from tests.cluster.conftest import QUICK, assert_released, require_hosts
from tests.cluster.driver import Driver
from tests.controllers import controller_pids
from tests.faults.test_controller import slow_files, square

pytestmark = pytest.mark.timeout(240)

GIVE_UP_S = 10.0
"""Ray gives a node up after 3 s without its processes here (`conftest.QUICK`); the driver's own look is shorter."""


def mark(path: Path) -> None:
    """Say to the test that the phase has begun."""
    path.touch()


def while_idle(begun: Path) -> tuple[float, str]:
    mark(begun)
    return jobs.state_within("broken", 60.0)


def in_a_call(begun: Path) -> tuple[float, str]:
    jobs.begin_waiting(in_collective=True)
    time.sleep(0.5)
    mark(begun)
    ended, error = jobs.failure()
    assert isinstance(error, GroupError)
    return ended, str(error)


def in_a_save(begun: Path) -> tuple[float, str]:
    jobs.group().call(slow_files, 2.0)
    call = jobs.group().save.remote(begun.parent / "second")
    time.sleep(0.5)
    mark(begun)
    try:
        call.result()
    except GroupError as error:
        return now(), str(error)
    raise AssertionError("the save has ended")


def in_a_fit(begun: Path) -> tuple[float, str]:
    def note(step: FitStep) -> None:
        if step.num_steps == 3:
            mark(begun)

    jobs.group().set_optimizer(torch.optim.SGD, lr=0.1)
    rows = [{"input": [1.0] * 8}] * 40_000
    try:
        jobs.group().fit(rows, batch_size=3, loss=square, callbacks=[note], progress=False)
    except GroupError as error:
        return now(), str(error)
    raise AssertionError("the run has ended")


PHASES: dict[str, Callable[[Path], tuple[float, str]]] = {
    "idle": while_idle,
    "call": in_a_call,
    "save": in_a_save,
    "fit": in_a_fit,
}


def save(path: Path) -> dict[str, torch.Tensor]:
    """Change the weights and save them; returns them."""
    jobs.group().call(jobs._change)
    jobs.group().save(path)
    return jobs.group().state_dict()


def restart() -> tuple[str, str | None, dict[str, torch.Tensor]]:
    """Restart on the node that is left for ranks; returns the state before, the loaded files, and the weights."""
    before: GroupState = jobs.group().state
    report: Any = jobs.group().restart(world_size=1)
    return before.value, report.checkpoint, jobs.group().state_dict()


def attach() -> None:
    """Use the group that another driver has made."""
    jobs._group = ShardedModelGroup.attach("doomed")


@pytest.fixture
def rays(worker_python: Path) -> Iterator[RayHosts]:
    """A cluster of its own for each test: no driver joins Ray on a host that was lost before."""
    require_hosts()
    with Hosts(3) as hosts, RayHosts(list(hosts), cpus_per_host=2, logs_to_driver=False, environment=QUICK) as rays:
        yield rays


@pytest.fixture
def driver(rays: RayHosts) -> Iterator[Driver]:
    """A program on the head."""
    with closing(Driver(rays, rays.hosts[0])) as driver:
        driver.run(jobs.join)
        yield driver


@pytest.fixture
def files(tmp_path: Path) -> str:
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def lost(rays: RayHosts, driver: Driver, files: str) -> Host:
    """The host of the controller of a named group with a rank on each host but that of `driver`, which has attached."""
    timeouts = Timeouts(call_s=60.0, load_stall_s=30.0, drain_s=1.0)
    maker = Driver(rays, rays.hosts[1])
    maker.run(jobs.join)
    maker.run(jobs.start, files, world_size=2, name="doomed", labels={"role": "worker"}, timeouts=timeouts)
    maker.close()
    maker.process.wait(30)
    (pid,) = controller_pids()
    (host,) = (host for host in rays.hosts if pid in host.pids())
    assert host is not rays.hosts[0], "it is where the group was made, or where ranks are"
    driver.run(attach)
    return host


@pytest.mark.parametrize(
    "phase", ["call", *(pytest.param(one, marks=pytest.mark.full) for one in ("idle", "save", "fit"))]
)
def test_a_controller_whose_node_is_lost_names_the_node(
    phase: str, rays: RayHosts, driver: Driver, lost: Host, tmp_path: Path
) -> None:
    """And the group comes back on another node, from its newest save."""
    saved = driver.run(save, tmp_path / "saved")
    begun = tmp_path / "begun"
    driver.begin(PHASES[phase], begun)
    until = now() + 60
    while not begun.exists():
        assert now() < until
        time.sleep(0.01)
    killed = now()
    lost.kill()
    ended, said = driver.end(60.0)
    assert ended - killed < GIVE_UP_S
    assert "controller" in said
    assert lost.address in said
    assert_released(*rays.hosts)
    before, checkpoint, weights = driver.run(restart)
    assert (before, checkpoint) == ("broken", str(tmp_path / "saved"))
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    driver.run(jobs.stop)
    assert_released(*rays.hosts)


@pytest.mark.full
def test_a_driver_lost_with_its_node_takes_its_unnamed_group_with_it(
    rays: RayHosts, driver: Driver, files: str
) -> None:
    """An unnamed group's controller is on its driver's node: nobody is left to be told, and nothing stays."""
    other = Driver(rays, rays.hosts[2])
    other.run(jobs.join)
    other.run(jobs.start, files)
    rays.hosts[2].kill()
    assert_released(*rays.hosts, within_s=GIVE_UP_S)
    driver.run(jobs.await_nodes, 2)
    driver.run(jobs.start, files, world_size=2, cpus_per_rank=2.0, timeouts=Timeouts(place_s=30.0))
    driver.run(jobs.stop)
