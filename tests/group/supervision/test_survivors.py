"""What is known of the ranks that a failure has left, and what a restart may take them for."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from raysharding.group.rpc.messages import (
    COMMAND_BYTES,
    RESULT_BYTES,
    Command,
    Packed,
    Response,
    StateChange,
    number_of,
)
from raysharding.group.supervision.running_call import QueuedCall, RunningCall
from raysharding.group.supervision.survivors import RecoverableState, Survivors

from raysharding import CheckpointError, GroupBrokenError, GroupError, ShardedModelGroup, Timeouts
from raysharding.group import GroupState
from raysharding.group.calls.call import Call, Collect
from tests.group.conftest import make_group
from tests.group.recovery.hsdp import QUICK, Copied, kill_idle, make_hsdp

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

SAME, OTHER, TORN = StateChange(True, 1), StateChange(True, 0), StateChange(False, 0)


def test_ranks_are_kept_until_one_dies() -> None:
    survivors = Survivors(keep_s=60.0)
    assert survivors.why_not([]) == ""
    assert "its shards went with it" in survivors.why_not([0])
    survivors.keep(RecoverableState(why_not=""))
    assert survivors.hear_death(0)
    assert "its shards went with it" in survivors.recoverable.why_not
    assert survivors.take() is None


def test_ranks_are_kept_while_a_restart_asks_them() -> None:
    survivors = Survivors(keep_s=0.1)
    survivors.keep(RecoverableState(why_not=""))
    survivors.keep_for(5.0)
    assert survivors.left_s > 3.0
    assert survivors.take() is not None
    assert survivors.take() is None, "one restart at a time"


def test_a_rank_whose_part_ray_could_not_run_holds_another_model() -> None:
    call = Call("call", 3, Collect(lambda call: None), 1.0)
    run = RunningCall(QueuedCall(call, Command("call"), Packed(b"", ()), 1.0), 1, 1.0)
    run.finished, run.changes = {0, 1, 2}, {0: SAME, 1: SAME}
    assert not run.holds_one_model()
    run.changes[2] = SAME
    assert run.holds_one_model()


def packed(num_bytes: int) -> Packed:
    return Packed(b"", (np.zeros(num_bytes, dtype=np.uint8),))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("args_bytes", [1, COMMAND_BYTES, COMMAND_BYTES + 1])
@pytest.mark.parametrize("shared_bytes", [None, 1, COMMAND_BYTES, COMMAND_BYTES + 1])
def test_a_command_arrives_whole_and_ray_stores_what_is_large(args_bytes: int, shared_bytes: int | None) -> None:
    args, shared = packed(args_bytes), None if shared_bytes is None else packed(shared_bytes)
    sent = Command("call", args, shared, max_output_bytes=5, resets=True, epoch=3, number=7)
    message, stored = sent.stored().encode()
    assert number_of(message) == 7
    assert len(stored) == (args_bytes > COMMAND_BYTES) + ((shared_bytes or 0) > COMMAND_BYTES)
    command = Command.decode(message, ray.get(stored))
    assert replace(command, args=None, shared=None) == replace(sent, args=None, shared=None)
    assert isinstance(command.args, Packed)
    assert command.args.num_bytes == args_bytes
    assert (command.shared.num_bytes if isinstance(command.shared, Packed) else None) == shared_bytes


def test_a_response_is_the_same_after_its_trip() -> None:
    for response in (
        Response(SAME, number=1),
        Response(TORN, number=1 << 40, more=True, is_stored=True),
        Response(OTHER, value=Packed(b"x", ())),
    ):
        message = response.encode()
        assert number_of(message) == response.number
        assert Response.decode(message) == response


@pytest.mark.parametrize("num_bytes", [0, RESULT_BYTES // 2, RESULT_BYTES, 3 * RESULT_BYTES])
def test_results_of_every_size_arrive(group: ShardedModelGroup, num_bytes: int) -> None:
    def make(size: int) -> Any:
        import torch

        return torch.arange(size, dtype=torch.uint8) if size else None

    expected = make(num_bytes)
    for found in (*group.call(make, num_bytes), *group.call.remote(make, num_bytes).per_rank()):
        assert (found is None) if expected is None else torch.equal(found, expected)
    assert {rank for rank, _ in group.call.remote(make, num_bytes).stream()} == {0, 1}


def slow_down(failing: int) -> None:
    """What a schedule does, on all ranks but one."""
    import torch.distributed as dist

    from raysharding import current_worker

    if dist.get_rank() == failing:
        raise ValueError("bad data on this rank")
    optimizer = current_worker().optimizer
    assert optimizer is not None
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def test_another_learning_rate_on_some_ranks_is_another_model(checkpoint: Path) -> None:
    with make_group(checkpoint, timeouts=QUICK) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(GroupError, match="rank 1 raised"):
            group.call(slow_down, 1)
        assert group.state.value == "broken"
        assert group.restart().how == "reloaded"
        with pytest.raises(GroupError, match="rank 1 raised"):
            group.call(raise_on, 1)
        assert group.state.value == "ready", "nothing was changed"


def raise_on(failing: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == failing:
        raise ValueError("bad data on this rank")


def test_what_broke_the_group_is_told_also_after_a_restart_that_failed(checkpoint: Path, tmp_path: Path) -> None:
    with make_hsdp(Copied(checkpoint, tmp_path)) as group:
        kill_idle(group, 2)
        with pytest.raises(CheckpointError) as caught:  # there is no file
            group.restart()
        assert "its shards went with it" in str(caught.value.__notes__)
        with pytest.raises(GroupBrokenError, match="rank 2 died") as broken:
            group.call(int)
        assert broken.value.primary is not None
        assert broken.value.primary.rank == 2


@pytest.mark.parametrize("when_s", [0.0, 0.5, 1.5])
def test_a_group_that_is_shut_down_while_it_restarts_stays_shut(checkpoint: Path, when_s: float) -> None:
    group = make_group(checkpoint, timeouts=Timeouts(drain_s=1.0))
    restarting = group.restart.remote(checkpoint=str(checkpoint))
    time.sleep(when_s)
    group.shutdown()
    with contextlib.suppress(GroupError):  # unless it was done before
        restarting.result(timeout_s=60.0)
    assert group.state is GroupState.CLOSED
