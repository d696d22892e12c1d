"""Rows 31 and 32: a group's controller that is killed or stopped, in each phase, with and without a name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import FitStep, GroupBrokenError, GroupError, RayshardingError, ShardedModelGroup, Split, Timeouts
from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.group import GroupState
from tests.clock import now, wait_until
from tests.conftest import RELEASE_S, make_group, make_mlp, placement_groups
from tests.controllers import await_state, controlled, controller_pids, new_controller
from tests.group.standing import Driver, StandingCluster, seconds_until_gone

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(180)]

How = Literal["kill", "stop"]
Strike = Callable[[], None]

DEATH_S = 2.0
IDLE_S = 20.0
CALL_S = 4.0
HANG_S = 2.0
TIMEOUTS = Timeouts(call_s=CALL_S, load_stall_s=CALL_S, drain_s=1.0)
ROWS = torch.ones(4, 8)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
NAMES = {"named": "doomed", "unnamed": None}
QUICK = {
    "kill": {("idle", "named"), ("call", "unnamed"), ("save", "named"), ("fit", "unnamed")},
    "stop": {("idle", "unnamed"), ("call", "named")},
}


def cases(how: How) -> list[Any]:
    """The grid of phases and names; all but `QUICK` are marked `full`."""
    grid = [(phase, name) for phase in PHASES for name in NAMES]
    return [pytest.param(*one, marks=() if one in QUICK[how] else pytest.mark.full, id="-".join(one)) for one in grid]


def square(output: Any) -> Any:
    return output.square().mean()


def loss(output: Any, rows: Any) -> Any:
    return output.square().mean()


def slow_files(seconds: float) -> None:
    """On a rank: let what commits a save take its time."""
    import os
    import time

    def slow(real: Any) -> Any:
        def later(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return real(*args, **kwargs)

        return later

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, slow(getattr(os, name)))


def add(step: float) -> None:
    """On a rank: change every parameter."""
    import torch

    from raysharding import current_worker

    with torch.no_grad():
        for parameter in current_worker().module.parameters():
            parameter.add_(step)


def while_idle(group: ShardedModelGroup, strike: Strike, folder: Path) -> tuple[GroupError, float]:
    strike()
    seen = await_state(group, GroupState.BROKEN, IDLE_S + 5.0)
    with pytest.raises(GroupBrokenError) as caught:
        group.forward(Split(ROWS))
    return caught.value, seen


def in_a_call(group: ShardedModelGroup, strike: Strike, folder: Path) -> tuple[GroupError, float]:
    call = group.call.remote(time.sleep, 60)
    time.sleep(0.5)
    strike()
    with pytest.raises(GroupError) as caught:
        call.result()
    return caught.value, now()


def in_a_save(group: ShardedModelGroup, strike: Strike, folder: Path) -> tuple[GroupError, float]:
    """The save overwrites an older one, which is there, or the new one is: whole (I4)."""
    target = folder / "saved"
    group.save(target)
    old = tensors_of(target)
    group.call(add, 1.0)
    group.call(slow_files, 0.3)
    call = group.save.remote(target, overwrite=True)
    wait_until(lambda: os.listdir(folder) != ["saved"], CALL_S, "the save has not begun", 0.002)
    strike()
    with pytest.raises(GroupError) as caught:
        call.result()
    seen = now()
    found = tensors_of(target)
    changed = {name: found[name] - old[name] for name in old}
    assert all(not one.any() for one in changed.values()) or all(
        torch.allclose(one, torch.ones(())) for one in changed.values()
    ), "a mix of two saves"
    return caught.value, seen


def in_a_fit(group: ShardedModelGroup, strike: Strike, folder: Path) -> tuple[GroupError, float]:
    def third(step: FitStep) -> None:
        if step.num_steps == 3:
            strike()

    rows = [{"input": [1.0] * 8}] * 40_000
    with pytest.raises(GroupError) as caught:
        group.fit(rows, batch_size=2, loss=square, callbacks=[third], progress=False)
    return caught.value, now()


PHASES: dict[str, Callable[[ShardedModelGroup, Strike, Path], tuple[GroupError, float]]] = {
    "idle": while_idle,
    "call": in_a_call,
    "save": in_a_save,
    "fit": in_a_fit,
}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    with FileReader(checkpoint.files) as reader:
        return {name: reader.read_tensor(info) for name, info in checkpoint.tensors.items()}


def struck(how: How, phase: str, name: str, checkpoint: Path, folder: Path) -> tuple[GroupError, float]:
    """Strike a group's controller; return the driver's error, and the seconds until it came. All is free afterwards."""
    folder = folder / "folder"
    folder.mkdir()
    held = placement_groups()
    options: dict[str, Any] = {"name": NAMES[name], "timeouts": TIMEOUTS, "optimizer": torch.optim.SGD}
    with controlled(checkpoint, **options) as (group, controller):
        pids = [controller, *(info.pid for info in group.ranks)]
        struck_at: list[float] = []

        def strike() -> None:
            struck_at.append(now())
            os.kill(controller, SIGNALS[how])

        error, seen = PHASES[phase](group, strike, folder)
        seconds_until_gone(pids, seen, RELEASE_S)
        while left := placement_groups() - held:
            assert now() - seen < RELEASE_S, left
            time.sleep(0.05)
        assert group.state is GroupState.BROKEN
        begun = now()
        with pytest.raises(GroupBrokenError, match="controller"):
            group.forward(Split(ROWS))
        assert now() - begun < 0.5, "refused at once (I5)"
    assert "controller" in str(error)
    assert str(controller) in str(error), "its process"
    return error, seen - struck_at[0]


@pytest.mark.parametrize(("phase", "name"), cases("kill"))
def test_a_controller_that_is_killed_is_known_within_2_s(
    phase: str, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    _, seconds = struck("kill", phase, name, checkpoint, tmp_path)
    assert seconds < DEATH_S


@pytest.mark.parametrize(("phase", "name"), cases("stop"))
def test_a_controller_that_is_stopped_is_ended_by_the_driver(
    phase: str, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    _, seconds = struck("stop", phase, name, checkpoint, tmp_path)
    assert seconds < (IDLE_S if phase == "idle" else CALL_S + HANG_S)


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_a_named_group_comes_back_broken_and_restarts_with_its_newest_save(
    how: How, checkpoint: Path, tmp_path: Path
) -> None:
    with controlled(checkpoint, name="doomed", timeouts=TIMEOUTS, optimizer=torch.optim.SGD) as (group, controller):
        group.train_step(Split(ROWS), loss=loss)
        group.save(tmp_path / "saved")
        saved = group.state_dict()
        group.train_step(Split(ROWS), loss=loss)
        os.kill(controller, SIGNALS[how])
        await_state(group, GroupState.BROKEN, DEATH_S if how == "kill" else IDLE_S)
        assert group.restart().checkpoint == str(tmp_path / "saved")
        found = group.state_dict()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        assert group.train_step(Split(ROWS), loss=loss)["loss"] > 0, "the optimizer's factory is kept, too"


def test_one_loss_ends_every_call_once_and_is_over_with_the_next_controller(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls in flight, of another driver too, and one that is sent when the loss is noted; a driver that attaches."""
    with controlled(checkpoint, name="doomed", timeouts=TIMEOUTS) as (group, controller):
        connection = group._client.connection
        lose, attach, send = connection._lose, connection.attach, connection.send
        losses: list[GroupError] = []

        def noted(error: GroupError) -> None:
            lose(error)
            losses.append(error)

        def attach_late() -> Any:
            monkeypatch.setattr(connection, "attach", attach)
            raise Exception("Ray Client raises such ones")

        def send_late(*args: Any) -> None:
            os.kill(controller, signal.SIGKILL)
            until = now() + IDLE_S
            while not losses and now() < until:
                time.sleep(0.001)
            send(*args)

        for name, replacement in (("_lose", noted), ("attach", attach_late)):
            monkeypatch.setattr(connection, name, replacement)
        lost = connection.registration
        calls = [group.call.remote(time.sleep, 60) for _ in range(100)]
        beside = ShardedModelGroup.attach("doomed").call.remote(time.sleep, 60)
        with monkeypatch.context() as changed:
            changed.setattr(connection, "send", send_late)
            calls.append(group.call.remote(int))
        for call in (*calls, beside):
            with pytest.raises(GroupError, match=f"its controller .*{controller}.* died"):
                call.result(timeout_s=IDLE_S)

        with ShardedModelGroup.attach("doomed") as other:
            assert other.ranks == (), "the controller that knew them is gone"
            assert repr(other).startswith(f"<ShardedModelGroup {checkpoint}, 2 ranks on cpu, broken>")
            assert "2 ranks on cpu, broken" in other._repr_html_()
            assert other.device == torch.device("cpu")
            for rows in (ROWS, Split(ROWS)):
                with pytest.raises(GroupBrokenError, match="its controller died"):
                    other.forward(rows)
            with pytest.raises(GroupBrokenError, match="its controller died"):
                other.call(int)
            with pytest.raises(GroupError, match="not known where the ranks ran"):
                other.logs(1)
        group.restart()
        late: Future[Any] = Future()
        late.set_exception(ray.exceptions.ActorDiedError())
        connection._on_outcome(calls[0], lost, late)  # as Ray may still report
        assert group.call.remote(int).result(timeout_s=IDLE_S) == [0, 0]
        assert len(losses) == 1
        unknown = ray.exceptions.RayTaskError("submit", "", GroupError("does not know this driver"))
        assert "died, and the ranks with it: Ray has started another" in connection.controller_died(unknown).message


@pytest.mark.parametrize("name", ["unnamed", pytest.param("named", marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_a_controller_struck_while_the_group_is_made_leaves_nothing(how: How, name: str, checkpoint: Path) -> None:
    def build() -> nn.Module:
        import time

        time.sleep(100)
        raise AssertionError("nobody waits for that")

    before = controller_pids()
    struck_at: list[float] = []

    def strike() -> None:
        pid = new_controller(before)
        time.sleep(1.0)
        struck_at.append(now())
        os.kill(pid, SIGNALS[how])

    thread = threading.Thread(target=strike)
    thread.start()
    timeouts = Timeouts(start_s=10.0, load_stall_s=CALL_S, drain_s=1.0)
    with pytest.raises(RayshardingError, match="controller"):
        make_group(checkpoint, model=build, name=NAMES[name], timeouts=timeouts)
    seen = now()
    thread.join()
    # What was placed is taken back before the error is raised.
    assert seen - struck_at[0] < (DEATH_S if how == "kill" else IDLE_S) + RELEASE_S
    wait_until(lambda: not (controller_pids() - before), RELEASE_S, "Ray has not brought the controller back")


@pytest.mark.full
def test_every_driver_that_waits_is_told(checkpoint: Path) -> None:
    with controlled(checkpoint, name="doomed", timeouts=TIMEOUTS) as (group, controller):
        calls = [one.call.remote(time.sleep, 60) for one in (group, ShardedModelGroup.attach("doomed"))]
        time.sleep(0.5)
        os.kill(controller, signal.SIGKILL)
        killed = now()
        for call in calls:
            with pytest.raises(GroupError, match="controller"):
                call.result()
        assert now() - killed < DEATH_S


@pytest.mark.full
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_controller_killed_in_a_copy_leaves_the_other_group_usable(
    side: str, tmp_path: Path, checkpoint: Path
) -> None:
    def slow_down() -> None:
        import time

        from raysharding.distributed.weights import links

        take = links.SharedLink.take

        def slow(self: Any, index: int, num_bytes: int) -> torch.Tensor:
            time.sleep(3.0)
            return take(self, index, num_bytes)

        links.SharedLink.take = slow  # type: ignore[method-assign]

    with (
        controlled(checkpoint, timeouts=TIMEOUTS) as (source, of_source),
        controlled(checkpoint, timeouts=TIMEOUTS) as (target, of_target),
    ):
        target.call(slow_down)
        copy = source.copy_to.remote(target)
        time.sleep(1.0)
        assert not copy.done()
        os.kill(of_source if side == "source" else of_target, signal.SIGKILL)
        killed = now()
        with pytest.raises(GroupError, match="controller"):
            copy.result()
        assert now() - killed < CALL_S + HANG_S
        ended, other = (source, target) if side == "source" else (target, source)
        assert ended.state is GroupState.BROKEN
        if other.state is GroupState.BROKEN:
            assert "mixed weights" in str(other.status()["cause"])
            other.restart()
        assert other.forward(Split(ROWS)).shape == (4, 4)


LEAVES = """
from tests.faults.test_controller import slow_files
group = make(name="llama", replace=True, optimizer=torch.optim.SGD)
group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
what, path = sys.argv[3:]
if what == "save":
    group.save(path)
elif what == "load":
    group.load(path)
else:
    group.call(slow_files, float(what))
    group.save(path, async_save=True)
torch.save(group.state_dict(), sys.argv[2] + ".expected")
tell(left=True)
sys.stdin.readline()
os._exit(0)
"""

RESTARTS = """
group = ShardedModelGroup.attach("llama")
state = group.state.value
report = group.restart()
expected, found = torch.load(sys.argv[2] + ".expected"), group.state_dict()
same = all(torch.equal(found[name], expected[name]) for name in expected)
metrics = group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
tell(state=state, checkpoint=report.checkpoint, same=same)
sys.stdin.readline()
group.shutdown()
tell(shut=True)
"""


@pytest.mark.parametrize("what", ["save", pytest.param("load", marks=pytest.mark.full)])
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_a_killed_controller_knew_is_there_without_any_driver(
    what: str, kills: int, standing: StandingCluster, checkpoint: Path, tmp_path: Path
) -> None:
    """The newest save or load, not what the group was made from; and again when the next controller is killed."""
    path = tmp_path / "files"
    if what == "load":
        path.mkdir()
        save_file(make_mlp()().state_dict(), path / "model.safetensors")
    before = controller_pids()
    leave(standing, checkpoint, what, path)
    killed: set[int] = set()
    for number in range(kills):
        killed.add(kill_controller(before | killed))
        with Driver(standing, checkpoint, RESTARTS) as driver:  # killed at the end of the block, if it waits still
            assert driver.hear() == {"state": "broken", "checkpoint": str(path), "same": True}
            if number == kills - 1:
                driver.say("go")
                assert driver.hear()["shut"]


@pytest.mark.full
@pytest.mark.parametrize("slow_s", ["0", "0.05", "2"])
def test_a_save_that_was_under_way_counts_if_its_files_are_whole(
    slow_s: str, standing: StandingCluster, checkpoint: Path, tmp_path: Path
) -> None:
    before = controller_pids()
    leave(standing, checkpoint, slow_s, tmp_path / "saved")
    kill_controller(before)
    with Driver(standing, checkpoint, RESTARTS) as driver:
        heard = driver.hear()
        driver.say("go")
        assert driver.hear()["shut"]
    is_whole = (tmp_path / "saved").exists()
    expected = str(tmp_path / "saved" if is_whole else checkpoint)
    assert heard == {"state": "broken", "checkpoint": expected, "same": is_whole}
    assert os.listdir(tmp_path) == (["saved"] if is_whole else []), "what a killed save left is removed"


def leave(standing: StandingCluster, checkpoint: Path, what: str, path: Path) -> None:
    """Have a driver make the group `llama`, train it, save or load, and end."""
    with Driver(standing, checkpoint, LEAVES, what, str(path)) as driver:
        while "left" not in driver.hear():
            pass
        driver.say("end")
        driver.process.wait(30)


def kill_controller(others: set[int]) -> int:
    """Kill the controller that is none of the others; returns its pid."""
    pid = new_controller(others)
    os.kill(pid, signal.SIGKILL)
    seconds_until_gone([pid], now(), RELEASE_S)
    return pid
