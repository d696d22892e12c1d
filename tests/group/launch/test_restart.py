"""`restart`: new processes, which load the group's newest files."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharding import (
    CallTimeoutError,
    CheckpointError,
    GroupBrokenError,
    GroupError,
    ShardedModelGroup,
    Sharding,
    Split,
    Timeouts,
)
from raysharding.group import GroupState
from raysharding.group.calls.connection import Connection
from tests.clock import now, wait_until
from tests.group.conftest import make_group, rank_processes

pytestmark = pytest.mark.usefixtures("nothing_left")

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
ADAM = partial(torch.optim.AdamW, lr=1e-2)
QUICK = Timeouts(drain_s=1.0, call_s=60.0)


class OneProcess:
    """The model in this process, trained as the group is."""

    def __init__(self, reference: nn.Module) -> None:
        self.model = copy.deepcopy(reference).requires_grad_()
        self.optimizer = ADAM(self.model.parameters())

    def train(self) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(BATCH), BATCH[:, :4])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def to_target(fault: str = "none") -> Callable[..., torch.Tensor]:
    """Return a loss that pickles by value, and that brings a fault on rank 1: in the loss, in backward, at the step."""

    def loss(output: Any, x: Any) -> Any:
        import os
        import signal

        import torch
        import torch.distributed as dist

        here = dist.get_rank() == 1
        if here and fault == "raise in loss":
            raise RuntimeError("rank 1 alone")
        if not output.requires_grad:
            return torch.nn.functional.mse_loss(
                output[:, :4], x[:, :4]
            )  # a trial run, which finds out what the loss does
        if here and fault == "raise in backward":

            def refuse(_: Any) -> None:
                raise RuntimeError("rank 1 alone")

            output.register_hook(refuse)
        if here and fault == "die in backward":
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return torch.nn.functional.mse_loss(output[:, :4], x[:, :4])

    return loss


def train(group: ShardedModelGroup, fault: str = "none") -> float:
    return float(group.train_step(Split(BATCH), loss=to_target(fault))["loss"])


def assert_same(group: ShardedModelGroup, oracle: OneProcess) -> None:
    found = group.state_dict()
    for name, value in oracle.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicate_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_rank_that_fails_alone_breaks_the_group_until_a_restart(
    checkpoint: Path, reference: nn.Module, replicate_size: int, tmp_path: Path
) -> None:
    """New processes go on from the newest save, with the optimizer's state; handles stay usable."""
    sharding, size = Sharding(replicate_size=replicate_size), 3 if replicate_size == 1 else 2
    options: dict[str, Any] = {"timeouts": QUICK, "sharding": sharding, "optimizer": ADAM}
    with make_group(checkpoint, world_size=size, **options) as group:
        handle = group.forward
        train(group)
        group.save(tmp_path / "saved")
        for fault in ("raise in loss", "raise in backward", "die in backward"):
            pids = {rank.pid for rank in group.ranks}
            kind = "died" if fault == "die in backward" else "raised"
            with pytest.raises(GroupError, match=f"rank 1 {kind}") as caught:
                train(group, fault)
            if kind == "raised":
                assert {rank: one.kind for rank, one in caught.value.failures.items()} == {
                    rank: "raised" if rank == 1 else "collateral" for rank in range(size)
                }
            assert group.state is GroupState.BROKEN
            with pytest.raises(GroupBrokenError, match=r"group\.restart\(\) makes it whole"):
                handle(Split(BATCH))
            report = group.restart()
            assert (report.checkpoint, report.world_size) == (str(tmp_path / "saved"), size)
            assert "rank 1" in report.why
            assert group.state.value == "ready"
            assert pids.isdisjoint(rank.pid for rank in group.ranks)
            one = OneProcess(reference)
            one.train()
            assert train(group) == pytest.approx(one.train(), abs=1e-6)
            assert_same(group, one)
            torch.testing.assert_close(handle(Split(BATCH)), one.model(BATCH).detach(), rtol=1e-5, atol=1e-6)
        assert group.restart(world_size=2).world_size == group.world_size == 2
        assert len(rank_processes()) >= 2


def test_ranks_that_wait_for_each_other_are_named(checkpoint: Path, reference: nn.Module) -> None:
    """And so is the one that hung first, which is the reason for the restart."""

    def late() -> None:
        import time

        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()

    def miss_each_other() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.barrier()  # rank 1 is elsewhere: the test is about just that
        else:
            dist.recv(torch.zeros(1), src=0)

    with make_group(checkpoint, timeouts=Timeouts(call_s=1.5)) as group:
        begun = now()
        with pytest.raises(CallTimeoutError, match="all ranks wait in collectives, so not in the same one") as caught:
            group.call(miss_each_other)
        assert now() - begun < 1.5 + 2.0
        assert sorted(caught.value.failures) == [0, 1]
        assert all("miss_each_other" in failure.traceback for failure in caught.value.failures.values())
        group.restart()
        torch.testing.assert_close(group.forward(Split(BATCH)), reference(BATCH))
        with pytest.raises(CallTimeoutError, match="rank 1 hung"):
            group.call(late)
        assert group.restart().why.startswith("rank 1 ")


def test_weights_changed_in_part_are_loaded_again(checkpoint: Path, reference: nn.Module) -> None:
    """Another learning rate on some ranks is another model, too; a rank that raises alone before any change is not."""

    def half(others: str) -> None:
        import torch
        import torch.distributed as dist

        from raysharding import current_worker

        if dist.get_rank() == 1 and others != "wait":
            raise RuntimeError("before its step")
        if others == "raise":
            return
        if others == "learning rate":
            optimizer = current_worker().optimizer
            assert optimizer is not None
            optimizer.param_groups[0]["lr"] *= 0.1  # as a schedule does
            return
        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.add_(1.0)
        if others == "wait":
            if dist.get_rank() == 1:
                raise RuntimeError("half-way")
            dist.barrier()  # rank 1 never comes: the test is about just that

    with make_group(checkpoint, timeouts=QUICK) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(GroupError, match="rank 1 raised"):
            group.call(half, "raise")
        assert group.state is GroupState.READY, "nothing was changed"
        for others in ("wait", "go on", "learning rate"):
            with pytest.raises(GroupError, match="rank 1 raised"):
                group.call(half, others)
            assert group.state.value == "broken", "the ranks hold parts of two models"
            report = group.restart()
            assert report.checkpoint == str(checkpoint)
            torch.testing.assert_close(group.forward(Split(BATCH)), reference(BATCH))


def test_what_restart_refuses(checkpoint: Path, tmp_path: Path) -> None:
    with make_group(checkpoint, timeouts=QUICK) as group:
        with pytest.raises(ValueError, match="there is nothing to restart"):
            group.restart()
        group.save(tmp_path / "saved")
        shutil.rmtree(tmp_path / "saved")
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 0 died"):
            group.call(lambda: 1)
        with pytest.raises(CheckpointError, match="saved") as caught:
            group.restart()
        assert "rank 0" in str(caught.value.__notes__)
        with pytest.raises(GroupBrokenError, match="rank 0 died") as broken:
            group.call(int)
        assert broken.value.primary is not None
        assert broken.value.primary.rank == 0
        assert group.state is GroupState.BROKEN
        assert group.restart(str(checkpoint)).checkpoint == str(checkpoint)
        assert group.call(lambda: 1) == [1, 1]
    with pytest.raises(GroupBrokenError, match="is shut down"):
        group.restart()


@pytest.mark.parametrize("when_s", [0.0, 0.5, 1.5])
def test_a_group_that_is_shut_down_while_it_restarts_stays_shut(checkpoint: Path, when_s: float) -> None:
    group = make_group(checkpoint, timeouts=Timeouts(drain_s=1.0))
    restarting = group.restart.remote(checkpoint=str(checkpoint))
    time.sleep(when_s)
    group.shutdown()
    with contextlib.suppress(GroupError):  # unless it was done before
        restarting.result(timeout_s=60.0)
    assert group.state is GroupState.CLOSED


class Held:
    """`False` on the ranks. Pickling it on the driver waits, for a while, until it may go."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.is_there.set()
        self.may_go.wait(3.0)  # a driver that lets no thread pass the other while it submits is right, too
        return bool, (False,)


def test_a_load_that_overtakes_a_save_on_the_driver_is_the_older_one(checkpoint: Path, tmp_path: Path) -> None:
    """One thread has begun to submit a save when another one loads: the ranks' order counts, not the driver's."""
    other, save = tmp_path / "other", tmp_path / "save"
    ended: list[str] = []
    held: Any = Held()
    with make_group(checkpoint, timeouts=Timeouts(drain_s=1.0), optimizer=torch.optim.SGD) as group:
        group.save(other)
        saving = threading.Thread(target=lambda: note(group.save.remote(save, overwrite=held), ended))
        saving.start()
        assert held.is_there.wait(10.0)
        note(group.load.remote(other), ended)
        group.train_step(Split(torch.ones(3, 8)), loss=lambda output, rows: output.square().mean())
        held.may_go.set()
        saving.join(10.0)
        wait_until(lambda: len(ended) >= 2, 10.0, "both calls have ended", 0.01)
        newest = {"save": save, "load": other}[ended[-1]]
        os.kill(group.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1 died"):
            group.call(int)
        assert group.restart().checkpoint == str(newest)


def note(call: Any, ended: list[str]) -> None:
    """Keep the name of a call when all ranks have run it."""
    call.when_done(lambda done: ended.append(done.name))


def test_a_call_that_is_refused_tells_that_the_group_is_broken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who restarts the group after the error is not told that it is ready, however late the news come."""
    with make_group(checkpoint, world_size=1, timeouts=QUICK) as group:
        connection = group._client.connection
        monkeypatch.setattr(Connection, "_on_answer", lambda *_: None)
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        states = [group.state]
        watch = partial(connection.ask, "watch", connection.key, -1, 0.0)
        wait_until(lambda: watch().state is GroupState.BROKEN, 10.0, "the controller hears of the death")
        states.append(group.state)
        with pytest.raises(GroupBrokenError, match="died"):
            group.forward(BATCH)
        assert [*states, group.state] == [GroupState.READY, GroupState.READY, GroupState.BROKEN]
        monkeypatch.undo()
        connection.thread.call(connection._watch)
        group.restart()
        group.forward(BATCH)
