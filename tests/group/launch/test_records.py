"""Which files a restart takes for the newest: those of the last save or load that the ranks ran, for whomever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupError, Split, Timeouts
from tests.clock import now
from tests.conftest import make_group
from tests.group.standing import Driver, StandingCluster, standing_cluster

WAIT_S = 10.0
HELD_S = 3.0
"""A driver that lets no thread pass the other while it submits is right, too."""

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


@pytest.fixture(scope="module")
def standing(worker_python: Path) -> Iterator[StandingCluster]:
    with standing_cluster() as cluster:
        yield cluster


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


class Held:
    """`False` on the ranks. Pickling it on the driver waits, for a while, until it may go."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.is_there.set()
        self.may_go.wait(HELD_S)
        return bool, (False,)


@pytest.mark.usefixtures("nothing_left")
def test_a_load_that_overtakes_a_save_on_the_driver_is_the_older_one(checkpoint: Path, tmp_path: Path) -> None:
    """One thread has begun to submit a save when another one loads: the ranks' order counts, not the driver's."""
    other, save = tmp_path / "other", tmp_path / "save"
    ended: list[str] = []
    held: Any = Held()
    with make_group(checkpoint, timeouts=Timeouts(drain_s=1.0), optimizer=torch.optim.SGD) as group:
        group.save(other)
        saving = threading.Thread(target=lambda: note(group.save.remote(save, overwrite=held), ended))
        saving.start()
        assert held.is_there.wait(WAIT_S)
        note(group.load.remote(other), ended)
        group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
        held.may_go.set()
        saving.join(WAIT_S)
        until = now() + WAIT_S
        while len(ended) < 2:
            assert now() < until
            time.sleep(0.01)
        newest = {"save": save, "load": other}[ended[-1]]
        os.kill(group.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1 died"):
            group.call(int)
        assert group.restart().checkpoint == str(newest)


def note(call: Any, ended: list[str]) -> None:
    """Keep the name of a call when all ranks have run it."""
    call.when_done(lambda done: ended.append(done.name))
