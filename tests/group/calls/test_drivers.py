"""Several drivers use one named group beside each other: who may change the model, and what the others are told."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharding import GroupBrokenError, GroupError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.clock import now
from tests.group.calls.conftest import ask
from tests.group.conftest import make_group
from tests.group.fit.runs import slow_writes
from tests.group.standing import Driver, StandingCluster, seconds_until_gone

pytestmark = pytest.mark.timeout(180)

ROWS = torch.ones(3, 8)
KNOWN_S = 5.0
"""Ray tells an owner's end by its closed connection, at once; this is for a busy machine."""
RUNNING_S = KNOWN_S + 1.0
"""The call that runs when its driver dies: those behind it are dropped meanwhile."""


def loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.usefixtures("nothing_left")
def test_attach_takes_nothing_and_the_end_of_its_block_detaches(
    checkpoint: Path, reference: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = "this driver has left group 'both', .* attach again"
    with make_group(checkpoint, name="both") as first:
        with ShardedModelGroup.attach("both") as second:
            assert second.ranks == first.ranks
            for group in (first, second, first):
                assert torch.allclose(group.forward(Split(ROWS)), reference(ROWS), atol=1e-6)
                assert group.state is GroupState.READY
            running, queued = second.call.remote(time.sleep, 0.5), second.call.remote(int)
        assert first.call(int) == [0, 0], "the group lives on"
        for call in (running, queued):
            with pytest.raises(GroupBrokenError, match=left):
                call.result()
        with pytest.raises(GroupBrokenError, match=left):
            second.call(int)

        third = ShardedModelGroup.attach("both")
        connection = third._client.connection
        send = connection.send

        def send_late(*args: Any) -> None:
            third._client.detach()  # as another thread may do
            send(*args)

        monkeypatch.setattr(connection, "send", send_late)
        with pytest.raises(GroupBrokenError, match=left):
            third.call.remote(int).result(timeout_s=10)


@pytest.mark.usefixtures("nothing_left")
def test_shutdown_ends_the_group_for_all_drivers(checkpoint: Path, tmp_path: Path) -> None:
    first = make_group(checkpoint, name="both")
    second = ShardedModelGroup.attach("both")
    first.call(slow_writes(0.5))
    first.save(tmp_path / "saved", async_save=True)
    waiting = first.call.remote(time.sleep, 60)
    second.shutdown()
    with pytest.raises(GroupError, match="shut down"):
        waiting.result()
    with pytest.raises(GroupBrokenError, match="shut down"):
        first.call(int)
    assert os.listdir(tmp_path) == ["saved"], "a save in the background, of whatever driver, is waited for"
    with pytest.raises(ValueError, match="no group of that name"):
        ShardedModelGroup.attach("both")


@pytest.mark.usefixtures("nothing_left")
def test_what_one_driver_sets_and_restarts_is_so_for_the_others(checkpoint: Path) -> None:
    """The optimizer; and the ranks that a copy goes to."""
    with make_group(checkpoint, world_size=1) as source, make_group(checkpoint, world_size=1, name="both") as first:
        with pytest.raises(ValueError, match="needs an optimizer"):
            first.train_step(Split(ROWS), loss=loss)
        second = ShardedModelGroup.attach("both")
        second.set_optimizer(torch.optim.SGD, lr=0.5)
        first.set_scheduler(partial(torch.optim.lr_scheduler.StepLR, step_size=10))
        assert first.train_step(Split(ROWS), loss=loss)["lr"] == 0.5
        assert [source.copy_to(first).is_planned for _ in range(2)] == [True, False]
        second.restart(world_size=2)
        with pytest.raises(GroupError, match="was restarted by"):
            source.copy_to(first)
        assert source.copy_to(first).is_planned, "with the new ranks"
        assert first.train_step(Split(ROWS), loss=loss)["lr"] == 0.5


HOLDS = """
def square(output):
    import time
    time.sleep(0.02)
    return output.square().mean()

def loss(output, rows):
    return output.square().mean()

def note(step):
    if step.num_steps == 3:
        tell(begun=True)

group = ShardedModelGroup.attach("shared")
rows, ROWS = [{"input": [1.0] * 8}] * 100_000, torch.ones(3, 8)
if sys.argv[3] == "fit":
    group.fit(rows, batch_size=2, loss=square, callbacks=[note], progress=False)
elif sys.argv[3] == "predict":
    threading = __import__("threading")
    threading.Timer(2.0, tell, kwargs={"begun": True}).start()
    group.predict(rows, batch_size=2, fn=lambda outputs, batch: (time.sleep(0.02), {"logits": outputs})[1],
                  output=sys.argv[2] + ".predicted", progress=False)
else:
    group.forward_backward(Split(ROWS), loss=loss)
    tell(begun=True)
    time.sleep(100)
"""


def until_allowed(driver: Driver, what: str) -> float:
    """Ask again and again until it is not refused; returns how long that took."""
    begun = now()
    while ask(driver, what) != "True":
        assert now() - begun < KNOWN_S
        time.sleep(0.05)
    return now() - begun


@pytest.mark.parametrize("what", ["fit", *(pytest.param(one, marks=pytest.mark.full) for one in ("predict", "sum"))])
def test_what_changes_the_model_is_refused_beside_a_claim_until_its_holder_is_killed(
    what: str, mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    """`sum` is an open accumulation."""
    with Driver(standing, checkpoint, HOLDS, what) as holder:
        assert holder.hear()["begun"]
        for method in ("train_step", "load", "fit"):
            said = ask(mine, method)
            assert f"{method} is refused" in said or "fit already runs" in said
            assert f"pid {holder.process.pid}" in said, "the holder"
        assert ask(mine, "forward") == "[3, 4]", "what changes nothing is not refused"
        holder.kill()
        print(f"released after {until_allowed(mine, 'train_step'):.2f} s")
    assert ask(mine, "fit") == "2"


@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=pytest.mark.full)])
def test_a_driver_that_is_lost_holds_nobody_up(
    how: str, mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    """The queued calls of a dead one are dropped; one that SIGSTOP holds is not dead: its calls run."""
    with Driver(standing, checkpoint, QUEUES.replace("60", "60" if how == "killed" else "0")) as other:
        assert other.hear()["queued"]
        other.kill(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        mine.say("forward")
        heard = mine.hear()
    assert heard["value"] == [3, 4]
    assert heard["seconds"] < RUNNING_S + KNOWN_S, "the call that was running, and none of 60 s behind it"


QUEUES = """
group = ShardedModelGroup.attach("shared")
calls = [group.call.remote(time.sleep, seconds) for seconds in (RUNNING_S, 60, 60)]
time.sleep(0.5)
tell(queued=True)
time.sleep(100)
""".replace("RUNNING_S", str(RUNNING_S))


def test_ctrl_c_cancels_the_calls_of_its_own_driver_alone(
    mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    with Driver(standing, checkpoint, PRESSES) as other:
        assert other.hear()["waits"]
        mine.say("sleep")
        time.sleep(0.5)
        other.kill(signal.SIGINT)
        assert other.hear() == {"interrupted": True, "cancelled": 2}
        assert mine.hear()["value"] == [None, None]
        assert ask(mine, "forward") == "[3, 4]"


PRESSES = """
from raysharding import CallCancelledError
group = ShardedModelGroup.attach("shared")
calls = [group.call.remote(time.sleep, seconds) for seconds in (2, 60, 60)]
tell(waits=True)
try:
    calls[2].result()
except KeyboardInterrupt:
    cancelled = 0
    for call in calls[1:]:
        try:
            call.result()
        except CallCancelledError:
            cancelled += 1
    tell(interrupted=True, cancelled=cancelled)
sys.stdin.readline()
"""


def test_ctrl_c_twice_stops_the_group_and_the_others_are_told_by_whom(
    mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    mine.say("pids")
    pids = mine.hear()["value"]
    with Driver(standing, checkpoint, PRESSES_TWICE) as other:
        assert other.hear()["waits"]
        mine.say("forward")
        time.sleep(0.5)
        other.kill(signal.SIGINT)
        time.sleep(0.5)
        since = other.kill(signal.SIGINT)
        assert other.hear() == {"state": "broken"}
        said = mine.hear()["error"]
        assert "Ctrl-C" in said
        assert f"pid {other.process.pid}" in said
        seconds_until_gone(pids, since, 10.0)
    assert ask(mine, "restart") == "2"


PRESSES_TWICE = """
group = ShardedModelGroup.attach("shared")
call = group.call.remote(time.sleep, 60)
while "call(sleep)" not in str(group.status()):  # it runs, before what the other driver says next
    time.sleep(0.05)
tell(waits=True)
try:
    call.result()
except KeyboardInterrupt:
    tell(state=group.state.value)
sys.stdin.readline()
"""


RESTARTS = """
group = ShardedModelGroup.attach("shared")
threading = __import__("threading")
threading.Timer(0.3, tell, kwargs={"restarts": True}).start()
group.restart(world_size=3)
"""


def test_a_driver_that_dies_while_it_restarts_leaves_the_group_to_the_others(
    mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    with Driver(standing, checkpoint, RESTARTS) as other:
        assert other.hear()["restarts"]
        other.kill()
        until = now() + KNOWN_S
        while (state := ask(mine, "state")) != "broken":
            assert state != "closed"
            assert now() < until
    assert ask(mine, "restart") == "2"
    assert ask(mine, "forward") == "[3, 4]"
