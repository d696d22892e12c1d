"""Two handles of one named group are two drivers: what one of them leaves on the ranks, and what its restart does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupBrokenError, GroupError, ShardedModelGroup, Split
from raysharding.group import Call, GroupState
from raysharding.group.calls import Client
from raysharding.group.cluster import connect
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_controller import start_controller
from tests.clock import now
from tests.group.conftest import make_group

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

SMALL, LARGE = Split(torch.ones(4, 8)), Split(10 * torch.ones(4, 8))


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def wrong(output: torch.Tensor) -> torch.Tensor:
    raise ValueError("no loss")


@pytest.fixture(scope="module")
def both(cluster: None, checkpoint: Path) -> Iterator[tuple[ShardedModelGroup, ShardedModelGroup]]:
    with make_group(checkpoint, name="both") as first:
        first.set_optimizer(torch.optim.SGD, lr=0.0)  # so that a norm does not depend on the updates before
        yield first, ShardedModelGroup.attach("both")  # tests leave it READY, with two ranks


def add(group: ShardedModelGroup, rows: Split, loss: Callable[..., Any] = mean) -> Call:
    return group.forward_backward.remote(rows, loss=loss)


def norm(group: ShardedModelGroup, *rows: Split) -> float:
    for one in rows:
        add(group, one).result()
    return group.optim_step()["grad_norm"]


def refused(run: Callable[[], object], why: str) -> None:
    with pytest.raises(GroupError, match=why):
        run()


def test_gradients_of_an_accumulation_are_one_drivers_alone(
    both: tuple[ShardedModelGroup, ShardedModelGroup], checkpoint: Path
) -> None:
    first, second = both
    alone, together = norm(first, SMALL), norm(first, LARGE, SMALL)
    beside = "refused while an open accumulation"
    for one in [add(first, SMALL), first.optim_step.remote(), add(first, SMALL)]:
        one.result()
    refused(lambda: add(second, LARGE).result(), beside)  # the lock is of what the ranks hold, not of the first call
    refused(lambda: second.clip_grad_norm_(1e-6), beside)
    refused(lambda: first.fit([{"input": [1.0] * 8}], batch_size=1, progress=False), "optim_step or zero_grad ends it")
    assert norm(first) == alone
    assert norm(second, SMALL) == alone, "the step has released the lock"

    calls = [add(first, SMALL, wrong), add(first, SMALL)]
    refused(calls[0].result, "raised")
    calls[1].result()
    refused(lambda: add(second, LARGE).result(), beside)
    refused(add(first, SMALL, wrong).result, "raised")
    assert norm(second, SMALL) == alone, "the gradients are gone with the failure, and so is the lock"

    add(first, SMALL).result()
    first.load(checkpoint)
    assert norm(second, SMALL) == alone, "or with a load"

    waits = first.call.remote(time.sleep, 0.5)
    queued = add(first, LARGE), second.train_step.remote(SMALL, loss=mean)
    waits.result()
    refused(queued[1].result, beside)  # it was accepted before the accumulation began

    with pytest.raises(GroupError):
        second.forward(torch.ones(2, 5))
    refused(lambda: add(first, SMALL).result(), "forward of the driver on .* has dropped the gradients")
    assert norm(first, LARGE, SMALL) == together, "all batches again"

    with ShardedModelGroup.attach("both") as third:
        add(third, LARGE).result()
    assert norm(second, SMALL) == alone, "a driver that leaves takes its gradients with it"


def kill(group: ShardedModelGroup, *others: ShardedModelGroup) -> None:
    os.kill(group.ranks[1].pid, signal.SIGKILL)
    until = now() + 20
    while any(one.state is not GroupState.BROKEN for one in (group, *others)):
        assert now() < until
        time.sleep(0.02)


def test_a_restart_by_another_driver_is_told_before_the_model_changes(
    both: tuple[ShardedModelGroup, ShardedModelGroup], tmp_path: Path
) -> None:
    """Else a run goes on from older weights, or saves them as its newest."""
    first, second = both
    add(first, SMALL).result()
    kill(first, second)
    with first._run_lock.running(first._client):
        refused(second.restart, "restart is refused while fit of")  # which restarts by itself
    second.restart()
    assert first.forward(SMALL).shape == (4, 4), "what changes nothing needs not know"
    calls: list[Call] = [add(first, SMALL), first.optim_step.remote()]
    assert all(call.wait(30) for call in calls), "and yet the program has not looked at them"
    calls.append(first.save.remote(tmp_path / "stale"))
    for call in calls:
        refused(call.result, "was restarted by the driver on")
    assert not list(tmp_path.iterdir())
    assert norm(first, SMALL) > 0, "told once"
    assert norm(second, SMALL) > 0, "and not the one that has restarted it"
    second.restart(world_size=1)
    with pytest.raises(ValueError, match="both handles are of one group"):
        first.copy_to(second)
    rows = [{"input": [1.0] * 8}] * 2
    run = partial(first.fit, rows, batch_size=2, loss=mean, max_steps=1, progress=False)
    refused(run, "was restarted by the driver on")
    assert run().num_steps == 1
    second.restart(world_size=2)

    async def awaited() -> None:
        await first.zero_grad.remote()

    refused(lambda: asyncio.run(awaited()), "was restarted by the driver on")
    first.zero_grad()
    assert second.call(int) == [0, 0]


def test_calls_of_other_threads_leave_a_restart_alone(both: tuple[ShardedModelGroup, ShardedModelGroup]) -> None:
    group, _ = both
    kill(group)
    said, is_over = set[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                group.forward(SMALL)
            except GroupBrokenError as error:
                said.add(str(error).partition("\n")[0])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        group.restart()
    finally:
        is_over.set()
        thread.join(30)
    assert any("is being restarted" in one for one in said)
    assert group.forward(SMALL).shape == (4, 4)


def test_ctrl_c_in_the_first_moment_of_a_restart_leaves_the_group_broken(
    both: tuple[ShardedModelGroup, ShardedModelGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    kill(first, second)
    begin = first._client.connection.begin

    def pressed(method: str, *args: Any) -> Any:
        ref = begin(method, *args)
        if method == "begin_restart":
            os.kill(os.getpid(), signal.SIGINT)
        return ref

    monkeypatch.setattr(first._client.connection, "begin", pressed)
    with pytest.raises(KeyboardInterrupt):
        first.restart()
    monkeypatch.undo()
    second.restart()
    assert first.call(int) == [0, 0]


@pytest.mark.usefixtures("cluster")
def test_the_attach_of_another_driver_does_not_end_a_group_that_is_being_made(checkpoint: Path) -> None:
    """It may arrive first."""
    connect()
    spec = GroupSpec(checkpoint=str(checkpoint), name="made")
    controller = start_controller(spec)
    poller, maker = (Client(controller, spec.title, spec.timeouts, 0) for _ in range(2))
    assert poller.connection.attach().spec is None
    poller.detach()
    assert maker.connection.attach(makes=True).snapshot.state is GroupState.STARTING
    time.sleep(0.5)
    assert maker.connection.ask("watch", maker.connection.key, -1, 0.0).state is GroupState.STARTING
    maker.shutdown()
