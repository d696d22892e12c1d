"""The driver dies, or is frozen: its ranks, placement group, ports and shared memory are free within 10 s."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from raysharding import Timeouts
from raysharding.group import GroupState
from tests.clock import now, wait_until
from tests.group.conftest import make_group
from tests.group.standing import (
    PROLOGUE,
    ROOT,
    Driver,
    StandingCluster,
    seconds_until_gone,
    standing_cluster,
)

RELEASE_S = 10.0


WATCH = """
from ray.util.placement_group import placement_group_table
for _ in sys.stdin:
    begun, is_free = now(), False
    while not is_free and now() - begun < 20:
        time.sleep(0.05)
        held = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
        free, total = ray.available_resources().get("CPU", 0), ray.cluster_resources()["CPU"]
        named = ray.util.list_named_actors(all_namespaces=True)
        is_free = not held and not named and free == total
    tell(free=is_free, named=named, held=held)
"""


@pytest.fixture(scope="module")
def watch(standing: StandingCluster, checkpoint: Path) -> Iterator[Driver]:
    """A driver that says, when asked, whether all of the cluster is free again."""
    with Driver(standing, checkpoint, WATCH) as driver:
        yield driver


FREE = {"free": True, "named": [], "held": []}


def shared_memory() -> set[str]:
    """What lies in shared memory, but for semaphores of multiprocessing: tests beside these make them, no rank does."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def listening(pids: list[int]) -> set[int]:
    """TCP ports that processes listen on."""
    ports: set[int] = set()
    for pid in pids:
        ports |= {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}
    return ports


STUCK = """
def stuck(what):
    import ctypes, os, signal, time
    import torch.distributed as dist
    if what == "gil":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL: holds the interpreter lock
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()  # the other two never come

group = make(world_size=3)
call = group.call.remote(stuck, PerRank(["collective", "gil", "stopped"]))
time.sleep(2)
tell(stuck=True)
time.sleep(1000)
"""


def test_a_driver_that_is_killed_leaves_nothing(standing: StandingCluster, watch: Driver, checkpoint: Path) -> None:
    """Whatever its ranks do: one waits in a collective, one holds the GIL, one is stopped."""
    before = shared_memory()
    with Driver(standing, checkpoint, STUCK) as driver:
        pids = driver.hear()["pids"]
        driver.hear()
        ports = listening(pids)
        assert ports, "the store's, at least"
        since = driver.kill()
        gone = seconds_until_gone(pids, since, RELEASE_S)
        print("seconds until the ranks were gone: collective, GIL, stopped:", [round(gone[pid], 2) for pid in pids])
        watch.say("go")
        assert watch.hear()["free"]
        assert now() - since < RELEASE_S
    for port in ports:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    assert shared_memory() <= before


PREDICT = """
def slow(outputs, batch):
    time.sleep(0.05)
    return {"logits": outputs}

group = make()
rows = [{"input": [float(number)] * 8, "id": number} for number in range(100)]
report = group.predict(rows, batch_size=4, fn=slow, keys=["id"], rows_per_file=5, output=sys.argv[3], resume=True)
tell(rows=report.num_rows, found=report.num_found)
group.shutdown()
"""


@pytest.mark.full
def test_a_predict_goes_on_after_its_driver_was_killed(
    standing: StandingCluster, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with Driver(standing, checkpoint, PREDICT, str(output)) as driver:
        driver.hear()
        wait_until(lambda: len(list(output.glob("*.parquet"))) >= 4, 30, "four files are written", 0.01)
        driver.kill()
    before = {path: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    with Driver(standing, checkpoint, PREDICT, str(output)) as driver:
        driver.hear()
        told = driver.hear()
    # Ranks that have not heard of the driver's end yet may have finished some more.
    assert told["rows"] == 100
    assert 5 * len(before) <= told["found"] < 100
    assert pq.read_table(output)["id"].to_pylist() == list(range(100))
    assert {path: path.stat().st_mtime_ns for path in before} == before


FROZEN = """
import os
group = make(timeouts=Timeouts(lease_s=2.0))
tell(ready=True)
call = group.call.remote(time.sleep, 1000)
try:
    call.result()
except GroupError as error:
    tell(error=str(error), state=group.state.value)
group.shutdown()
"""


def test_a_frozen_driver_frees_its_ranks_when_the_lease_runs_out(
    standing: StandingCluster, watch: Driver, checkpoint: Path
) -> None:
    with Driver(standing, checkpoint, FROZEN) as driver:
        pids = driver.hear()["pids"]
        driver.hear()
        time.sleep(3.0)
        assert all(psutil.pid_exists(pid) for pid in pids), "a driver that runs renews the lease while ranks work"
        since = driver.kill(signal.SIGSTOP)
        gone = seconds_until_gone(pids, since, 2.0 + 2.0)
        print("seconds until the ranks were gone:", gone)
        assert min(gone.values()) > 2.0 * 2 / 3, "not before: the last renewal was a third of the lease ago at most"
        watch.say("go")
        assert watch.hear()["free"], "the placement group, too, while the driver is frozen"
        assert now() - since < 4.0 + RELEASE_S
        time.sleep(1.0)
        driver.kill(signal.SIGCONT)
        heard = driver.hear()
        # It hears first what the controller has said, or that the controller has ended.
        said = r"^no driver has renewed the lease of 2 s of group \w+|; this driver had not run for \d s: did its lease"
        assert re.search(said, heard["error"])
        assert heard["state"] in ("closed", "broken")


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_a_lease_raises_no_alarm(checkpoint: Path) -> None:
    """Calls much longer than the lease, a driver whose main thread computes, a rank that was stopped for a while."""

    def hold_the_gil(seconds: float) -> int:
        import ctypes

        return ctypes.PyDLL(None).sleep(int(seconds))

    with make_group(checkpoint, timeouts=Timeouts(lease_s=1.0)) as group:
        call = group.call.remote(time.sleep, 4.0)
        until = now() + 3.0
        while now() < until:
            pass
        call.result()
        assert group.call(hold_the_gil, 3.0) == [0, 0]
        os.kill(group.ranks[1].pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(group.ranks[1].pid, signal.SIGCONT)
        time.sleep(1.5)
        assert group.call(lambda: 1) == [1, 1]
        assert group.state is GroupState.READY


TRAINED = """
group = make(name="llama")
group.set_optimizer(torch.optim.SGD, lr=0.1)
group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
torch.save(group.state_dict(), sys.argv[2] + ".trained")
tell(seconds=group.load_report.seconds)
time.sleep(1000)
"""

ATTACHED = """
begun = now()
group = ShardedModelGroup.attach("llama")
attach_s = now() - begun
trained, state = torch.load(sys.argv[2] + ".trained"), group.state_dict()
tell(
    pids=[one.pid for one in group.ranks],
    same=state.keys() == trained.keys() and all(torch.equal(state[name], trained[name]) for name in trained),
    seconds=group.load_report.seconds,
    shape=list(group.forward(Split(torch.ones(3, 8))).shape),
    state=group.state.value,
    attach_s=attach_s,
)
group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
group.shutdown()
tell(shut=True)
sys.stdin.readline()
"""


@pytest.mark.full
def test_a_restarted_kernel_finds_its_group_again(standing: StandingCluster, watch: Driver, checkpoint: Path) -> None:
    with Driver(standing, checkpoint, TRAINED) as first:
        pids = first.hear()["pids"]
        report = first.hear()
        first.kill()
        first.process.wait(10)
    with Driver(standing, checkpoint, ATTACHED) as second:
        heard = second.hear()
        print(f"attached in {heard['attach_s']:.2f} s")
        assert heard["pids"] == pids
        assert heard["same"], "the trained weights"
        assert heard["seconds"] == report["seconds"], "the report of the only load there was"
        assert heard["shape"] == [3, 4]
        assert heard["state"] == "ready"
        assert second.hear()["shut"]
        since = now()
        seconds_until_gone(pids, since, RELEASE_S)
        watch.say("go")
        assert watch.hear() == FREE
        assert now() - since < RELEASE_S


EXITS = """
group = make(name="llama", timeouts=Timeouts(lease_s=6.0))
tell(ready=True)
"""


@pytest.mark.full
def test_a_lease_ends_a_named_group_whose_driver_has_gone(
    standing: StandingCluster, watch: Driver, checkpoint: Path
) -> None:
    with Driver(standing, checkpoint, EXITS) as driver:
        pids = driver.hear()["pids"]
        driver.hear()
        assert driver.process.wait(30) == 0
        since = now()  # it renews until it begins to exit, which takes a while
        gone = seconds_until_gone(pids, since, 6.0 + 2.0)
        print("seconds until the ranks were gone:", gone)
        assert min(gone.values()) > 0.5, "the end of its driver alone does not end it"
        watch.say("go")
        assert watch.hear() == FREE


BUILDS = """
import threading
begun = sys.argv[3]
def build():
    import pathlib, time
    pathlib.Path(begun).touch()
    time.sleep(1000)

threading.Thread(target=make, kwargs={"model": build, "name": "llama"}, daemon=True).start()
while not os.path.exists(begun):
    time.sleep(0.02)
tell(building=True)
time.sleep(1000)
"""


@pytest.mark.full
def test_a_named_group_that_was_being_made_does_not_outlive_its_driver(
    standing: StandingCluster, watch: Driver, checkpoint: Path, tmp_path: Path
) -> None:
    with Driver(standing, checkpoint, BUILDS, str(tmp_path / "begun")) as driver:
        driver.hear()
        since = driver.kill()
        watch.say("go")
        assert watch.hear() == FREE
        took_s = now() - since
        print(f"free after {took_s:.2f} s")
        assert took_s < RELEASE_S


WAITS_FOR_ROOM = """
import threading
options = {"placement": Placement(strategy="STRICT_SPREAD"), "name": "llama"}
threading.Thread(target=make, kwargs=options, daemon=True).start()
from ray.util.placement_group import placement_group_table
while not [one for one in placement_group_table().values() if one["state"] == "PENDING"]:
    time.sleep(0.02)
actors = [one for one in ray._private.state.actors().values() if one["State"] == "ALIVE"]
tell(controllers=[one["Pid"] for one in actors if one["ActorClassName"].endswith("GroupController")])
time.sleep(1000)
"""


@pytest.mark.full
def test_a_named_group_that_waited_for_room_is_gone_with_driver_and_controller(
    standing: StandingCluster, watch: Driver, checkpoint: Path
) -> None:
    """As with the host of both: Ray starts another controller, which nobody can use, and nobody need end."""
    with Driver(standing, checkpoint, WAITS_FOR_ROOM) as driver:
        (controller,) = driver.hear()["controllers"]
        os.kill(controller, signal.SIGKILL)
        since = driver.kill()
        watch.say("go")
        assert watch.hear() == FREE
        assert now() - since < RELEASE_S


ENDS = """
kept, named = make(), make(name="llama")
named.shutdown()
large = kept.call.remote(torch.zeros, 100_000)
large.wait(60)
ray.shutdown()
for ask in (lambda: kept.logs(0), large.result):
    try:
        ask()
    except GroupError as error:
        tell(error=str(error), is_initialized=ray.is_initialized())
"""


@pytest.mark.full
def test_nothing_starts_another_ray_once_ray_is_shut_down(standing: StandingCluster, checkpoint: Path) -> None:
    """Neither what is asked of a group then, nor what a named one does when the program ends."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as scratch:
        apart = replace(standing, environment=standing.environment | {"RAY_TMPDIR": scratch})
        with Driver(apart, checkpoint, ENDS) as driver:
            assert len(driver.hear()["pids"]) == len(driver.hear()["pids"])
            asked = [driver.hear(), driver.hear()]
            assert driver.process.wait(60) == 0
        assert not list(Path(scratch).glob("ray/session_*"))
        assert asked[0] == {"error": "Ray was shut down, which knows where the logs are", "is_initialized": False}
        assert re.search("^the result of call on rank 0 is lost: .*Ray was shut down", asked[1]["error"])
        assert not asked[1]["is_initialized"]


JOB = """
group = make()
time.sleep(1000)
"""


@pytest.mark.full
def test_a_stopped_job_leaves_nothing(worker_python: Path, checkpoint: Path) -> None:
    with standing_cluster(dashboard=True) as cluster, Driver(cluster, checkpoint, WATCH) as watch:
        ray_cli = str(Path(sys.executable).with_name("ray"))
        environment = cluster.environment | {"RAY_ADDRESS": cluster.dashboard, "PYTHONPATH": str(ROOT)}

        def job(*arguments: str) -> str:
            command = [ray_cli, "job", *arguments]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        program = shlex.join([sys.executable, "-c", PROLOGUE + JOB, cluster.address, str(checkpoint)])
        job("submit", "--no-wait", "--submission-id", "tested", "--", *shlex.split(program))
        until = now() + 60
        while '"pids":' not in (said := job("logs", "tested")):
            assert now() < until, said
            time.sleep(0.5)
        found = re.search(r'"pids": \[(.*?)\]', said)
        assert found is not None, said
        pids = [int(pid) for pid in found[1].split(",")]
        since = now()
        job("stop", "--no-wait", "tested")
        gone = seconds_until_gone(pids, since, RELEASE_S)
        print("seconds until the ranks were gone:", gone)
        watch.say("go")
        assert watch.hear()["free"]
        assert now() - since < RELEASE_S


IN_A_FIT = """
import math
pause_s = 0.02

def loss(output, *, target):
    import time
    time.sleep(pause_s)
    return output.square().sum(), output.numel()

def run(group, **more):
    seen = []
    def hear(step):
        seen.append(step.num_steps)
        if len(seen) == 30:
            tell(begun=True)
    try:
        group.fit(rows, batch_size=2, epochs=100_000, loss=loss, callbacks=[hear], progress=False, **more)
    except KeyboardInterrupt:
        last = group.last_fit
        losses = last.history.get("loss", ())
        told = {"losses": len(losses), "finite": sum(map(math.isfinite, losses)), "loss": last.loss}
        told |= {"saved": last.saved, "seen": [*seen[:1], *seen[-1:], len(seen)]}
        tell(state=group.state.value, first=last.first_step, last=last.num_steps, **told)

rows = {"input": torch.ones(4, 8), "target": torch.ones(4)}
with make(optimizer=torch.optim.AdamW) as group:
    run(group, save_to=sys.argv[2] + "-interrupted")
    run(group, save_to=sys.argv[2] + "-interrupted", save_on_signal=True, resume=True)
    pause_s = 600.0
    group.set_optimizer(torch.optim.AdamW)
    run(group)
"""


@pytest.mark.timeout(180)
def test_ctrl_c_in_a_fit_collects_what_ran(standing: StandingCluster, checkpoint: Path) -> None:
    """Once: history and callbacks have every step, and `save_on_signal` saves. Twice: at once, without waiting."""
    saves = Path(f"{checkpoint}-interrupted")
    with Driver(standing, checkpoint, IN_A_FIT) as driver:
        pids = driver.hear()["pids"]
        first = 0
        for saved in (False, True):
            assert driver.hear()["begun"]
            time.sleep(0.1)  # into the steps in progress
            driver.kill(signal.SIGINT)
            heard = driver.hear()
            last = heard["last"]
            assert last >= first + 30
            assert heard["seen"] == [first + 1, last, last - first], "callbacks saw every step that ran"
            assert heard["losses"] == heard["finite"] == last - first
            assert heard["loss"] == heard["loss"], "the last loss is a number"
            assert (heard["state"], heard["first"]) == ("ready", first)
            assert heard["saved"] == (str(saves / f"step-{last}") if saved else None)
            first = last
        assert [one.name for one in saves.iterdir()] == [f"step-{last}"]
        time.sleep(3.0)  # into a step of 600 s
        driver.kill(signal.SIGINT)
        time.sleep(0.5)
        sent = driver.kill(signal.SIGINT)
        assert driver.hear()["state"] == "broken"
        seconds_until_gone(pids, sent, RELEASE_S)
        assert driver.process.wait(60) == 0
        assert driver.process.stderr is not None
        said = driver.process.stderr.read()
    assert said.count("raysharding: Ctrl-C: fit ends after the steps in progress; once more stops the ranks") == 3
    assert f"fit: Ctrl-C ended the run after step {last}, saved in {saves}/step-{last}; resume=True continues" in said


SAVES = """
import time
if ahead := float(sys.argv[4]):
    clock, time.time = time.time, lambda: clock() + ahead  # of this program, as of a machine whose clock is wrong
group = make(name="llama") if sys.argv[5] == "makes" else ShardedModelGroup.attach("llama")
group.set_optimizer(torch.optim.SGD, lr=0.1)
group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
group.save(sys.argv[3])
tell(saved=True)
"""

RESTARTS = """
import signal
group = ShardedModelGroup.attach("llama")
before = group.state_dict()
os.kill(group.ranks[1].pid, signal.SIGKILL)
try:
    group.call(time.sleep, 60)
except GroupError:
    report = group.restart()
after = group.state_dict()
same = all(torch.equal(after[name], before[name]) for name in before)
group.shutdown()
tell(checkpoint=report.checkpoint, same=same)
"""


def test_a_driver_whose_clock_is_ahead_does_not_hide_the_saves_of_the_next(
    standing: StandingCluster, checkpoint: Path, tmp_path: Path
) -> None:
    saves = [str(tmp_path / f"step-{number}") for number in (1, 2)]
    for path, ahead, how in zip(saves, ("3600", "0"), ("makes", "attaches"), strict=True):
        with Driver(standing, checkpoint, SAVES, path, ahead, how) as driver:
            while "saved" not in driver.hear():
                pass
            assert driver.process.wait(60) == 0
    with Driver(standing, checkpoint, RESTARTS) as driver:
        assert driver.hear() == {"checkpoint": saves[1], "same": True}
