"""What may be asked of a group while `fit` runs on it: by another thread, and by a callback."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import CallCancelledError, FitStep, GroupBrokenError, GroupError, ShardedModelGroup, Split
from raysharding.group import GroupState
from tests.conftest import make_group
from tests.group.fit.runs import ADAMW, BATCH, alone, collate, fit, regression

pytestmark = pytest.mark.usefixtures("cluster")

WAIT_S = 60.0


def rows_of(seed: int) -> list[dict[str, Any]]:
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
    return [{"x": one.tolist(), "y": float(one.sum() / 8)} for one in inputs]


ROWS = rows_of(3)
BATCH_OF_ROWS = collate()(ROWS[:BATCH])
EVALUATION: dict[str, Any] = {"batch_size": BATCH, "loss": regression(), "collate_fn": collate()}

REFUSED: dict[str, Callable[[ShardedModelGroup], Any]] = {
    "fit": lambda group: fit(group, rows_of(4)),
    "train_step": lambda group: group.train_step(
        Split(BATCH_OF_ROWS["input"]), target=Split(BATCH_OF_ROWS["target"]), loss=regression()
    ),
    "forward_backward": lambda group: group.forward_backward(
        Split(BATCH_OF_ROWS["input"]), target=Split(BATCH_OF_ROWS["target"]), loss=regression()
    ),
    "optim_step": lambda group: group.optim_step(),
    "zero_grad": lambda group: group.zero_grad(),
    "set_optimizer": lambda group: group.set_optimizer(torch.optim.SGD, lr=0.5),
    "set_scheduler": lambda group: group.set_scheduler(torch.optim.lr_scheduler.ConstantLR, factor=0.5),
    "load": lambda group: group.load("absent.safetensors"),
    "restart": lambda group: group.restart(world_size=2),
}


class Once:
    """A callback that does something after the first step that it is told of, and keeps what came of it."""

    def __init__(self, *does: Callable[[], Any]) -> None:
        self._does = list(does)
        self.results: list[Any] = []

    def __call__(self, step: FitStep) -> None:
        while self._does:
            try:
                self.results.append(self._does.pop(0)())
            except GroupError as error:
                self.results.append(error)


def test_a_second_fit_of_another_thread_is_refused(fresh: ShardedModelGroup) -> None:
    """Both would take their steps on the rows of the one that began last."""
    expected = alone(fresh.state_dict(), ROWS, 3)
    has_begun, may_go_on = threading.Event(), threading.Event()
    reports: list[Any] = []

    def hold(step: FitStep) -> None:
        has_begun.set()
        assert may_go_on.wait(WAIT_S)

    first = threading.Thread(target=lambda: reports.append(fit(fresh, ROWS, epochs=3, callbacks=[hold])), daemon=True)
    first.start()
    assert has_begun.wait(WAIT_S)
    try:
        with pytest.raises(GroupError, match="fit already runs on it"):
            fit(fresh, rows_of(4))
    finally:
        may_go_on.set()
        first.join(WAIT_S)
    assert reports[0].history["loss"] == pytest.approx(expected, abs=1e-5)
    assert fit(fresh, rows_of(4)).num_steps == 8, "one after the other is fine"


def test_the_end_of_a_run_is_the_end_of_its_claim(fresh: ShardedModelGroup) -> None:
    """Ray may bring the controller what comes next before it brings the end: the run waits for the answer."""
    controller = int(fresh._client.connection.where.rpartition(" ")[2])
    later = threading.Timer(1.0, os.kill, (controller, signal.SIGCONT))
    with fresh._run_lock.running(fresh._client):
        os.kill(controller, signal.SIGSTOP)
        later.start()
    assert later.finished.is_set(), "the controller has answered"


def test_what_would_change_the_model_is_refused(fresh: ShardedModelGroup) -> None:
    expected = alone(fresh.state_dict(), ROWS, 2)
    ask = Once(*(lambda call=call: call(fresh) for call in REFUSED.values()))
    report = fit(fresh, ROWS, epochs=2, callbacks=[ask])
    for name, found in zip(REFUSED, ask.results, strict=True):
        assert isinstance(found, GroupError), f"{name} gave {found}"
        assert ("fit already runs on it" if name == "fit" else f"{name} is refused while fit runs") in str(found)
    assert report.history["loss"] == pytest.approx(expected, abs=1e-5)
    assert fresh.state is GroupState.READY
    assert REFUSED["train_step"](fresh)["loss"] > 0


def test_what_leaves_the_model_as_it_is_runs_between_the_steps(fresh: ShardedModelGroup, tmp_path: Path) -> None:
    weights = fresh.state_dict()
    expected = alone(weights, ROWS, 2)
    both = Once(
        lambda: fresh.forward(Split(BATCH_OF_ROWS["input"])),
        lambda: fresh.evaluate(ROWS, **EVALUATION),
        lambda: fresh.save(tmp_path / "step"),
        lambda: fresh.state_dict(["0.weight"]),
        lambda: fresh.call(os.getpid),
    )
    report = fit(fresh, ROWS, epochs=2, callbacks=[both])
    output, evaluated, saved, tensors, pids = both.results
    assert report.history["loss"] == pytest.approx(expected, abs=1e-5)
    assert saved.path == str(tmp_path / "step")
    assert pids == [one.pid for one in fresh.ranks]
    # All of them saw the model as it stood after one step, and so does who goes on from the save.
    fresh.load(tmp_path / "step")
    assert torch.equal(fresh.state_dict()["0.weight"], tensors["0.weight"])
    assert torch.allclose(fresh.forward(Split(BATCH_OF_ROWS["input"])), output)
    assert fresh.evaluate(ROWS, **EVALUATION) == pytest.approx(evaluated)
    later = fit(fresh, ROWS, epochs=2, resume=True)
    assert later.first_step == 1
    assert later.history["loss"] == pytest.approx(expected[1:], abs=1e-5)


@pytest.mark.full
def test_evaluations_of_several_threads_keep_their_own_data(fresh: ShardedModelGroup) -> None:
    """Beside a fit, too: each call runs to its end before the next begins."""
    expected = [fresh.evaluate(rows_of(seed), **EVALUATION) for seed in (5, 6)]
    losses = alone(fresh.state_dict(), ROWS, 20)
    found: list[list[Any]] = [[], []]

    def evaluate(index: int) -> None:
        found[index] = [fresh.evaluate(rows_of(5 + index), **EVALUATION) for _ in range(5)]

    def several(index: int) -> threading.Thread:
        thread = threading.Thread(target=evaluate, args=(index,), daemon=True)
        thread.start()
        return thread

    for thread in [several(0), several(1)]:
        thread.join(WAIT_S)
    assert found == [[one] * 5 for one in expected]
    beside = [several(0), several(1)]
    assert fit(fresh, ROWS, epochs=20).history["loss"] == pytest.approx(losses, abs=1e-4)
    for thread in beside:
        thread.join(WAIT_S)
    assert all(one["num_rows"] == 50 for some in found for one in some)


@pytest.mark.usefixtures("few_steps_a_call")
@pytest.mark.parametrize("who", ["callback", "thread"])
def test_an_interrupt_ends_the_run(fresh: ShardedModelGroup, who: str) -> None:
    expected = alone(fresh.state_dict(), ROWS, 10)

    def stop(step: FitStep) -> None:
        if step.num_steps != 20:
            return
        if who == "callback":
            fresh.interrupt()
        else:
            threading.Thread(target=fresh.interrupt, daemon=True).start()

    with pytest.raises(CallCancelledError):
        fit(fresh, ROWS, epochs=10, callbacks=[stop])
    assert fresh.state is GroupState.READY
    report = fit(fresh, ROWS, epochs=10, resume=True)
    assert 20 <= report.first_step < report.num_steps == 80
    assert report.history["loss"] == pytest.approx(expected[report.first_step :], abs=1e-4)


def test_a_callback_that_saves_weights_alone_and_one_that_shuts_down(checkpoint: Path, tmp_path: Path) -> None:
    """A restart goes back to a save from which the run can go on; there is none of a group that is shut down."""
    options: dict[str, Any] = {"epochs": 4, "save_every": 6}

    def save_and_kill(step: FitStep) -> None:
        if step.num_steps == 15 and not killed:
            group.save(tmp_path / "weights", optimizer=False)
            killed.append(group.ranks[1].pid)
            os.kill(group.ranks[1].pid, signal.SIGKILL)
            group.call(time.sleep, 0.1)  # what this raises is the group's failure, not the callback's

    killed: list[int] = []
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        expected = alone(group.state_dict(), ROWS, 4)
        report = fit(group, ROWS, **options, save_to=tmp_path / "saved", callbacks=[save_and_kill])
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(expected, abs=1e-5)
        with pytest.raises(GroupBrokenError, match="is shut down"):
            fit(group, ROWS, save_to=tmp_path / "again", callbacks=[Once(group.shutdown)])
        assert group.state is GroupState.CLOSED


def test_an_interrupt_of_a_broken_group_ends_the_run_that_would_restart_it(checkpoint: Path) -> None:
    """It was refused, and the run went on, restart after restart."""

    def kill_and_interrupt(step: FitStep) -> None:
        if not refused:
            os.kill(group.ranks[1].pid, signal.SIGKILL)
            for ask in (lambda: group.call(time.sleep, WAIT_S), group.interrupt):
                with pytest.raises(GroupError) as caught:
                    ask()
                refused.append(caught.type)

    refused: list[type[GroupError]] = []
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        with pytest.raises(CallCancelledError, match="ended fit after step"):
            fit(group, ROWS, epochs=4, callbacks=[kill_and_interrupt])
        assert refused[1:] == [GroupBrokenError]
        assert group.state is GroupState.BROKEN, "no restart was tried"
