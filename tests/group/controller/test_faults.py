"""Real faults in real ranks: time to the error, what it says, and that nothing is left."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch

from raysharding import (
    CallTimeoutError,
    GroupBrokenError,
    GroupError,
    Loading,
    PerRank,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.group import Call, GroupState
from tests import programs
from tests.clock import now
from tests.faults.trap import slow_reads
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = Timeouts(drain_s=1.0, call_s=60.0)


def wait_in_collective(group: ShardedModelGroup, first: str) -> Call:
    """Let rank 0 wait in a collective for rank 1, which does something else first."""

    def work(what: str) -> None:
        import time

        import torch.distributed as dist

        if what == "raise":
            time.sleep(0.3)
            raise RuntimeError("rank 1 alone")
        if what == "sleep":
            time.sleep(100)
        dist.barrier()  # rank 1 never comes: the tests are about just that

    return group.call.remote(work, PerRank(["nothing", first]))


def failure_of(call: Call, within_s: float) -> GroupError:
    begun = now()
    with pytest.raises(GroupError) as caught:
        call.result(timeout_s=30)
    assert now() - begun < within_s
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.primary == caught.value.primary
    return caught.value


def assert_broken(group: ShardedModelGroup, error: GroupError) -> None:
    assert group.state is GroupState.BROKEN
    begun = now()
    with pytest.raises(GroupBrokenError, match="is broken and refuses calls") as caught:
        group.forward(Split(torch.zeros(2, 8)))
    assert now() - begun < 0.5
    assert caught.value.primary == error.primary
    assert group.status()["state"] == "broken"


def test_a_rank_killed_in_a_call(checkpoint: Path) -> None:
    dropped = weakref.ref(killed_in_a_call(checkpoint))
    until = now() + 2.0
    while dropped() is not None and now() < until:
        gc.collect()
        time.sleep(0.01)  # the thread that ended the call may hold it for a moment
    assert dropped() is None, "a broken group that is dropped without shutdown() must go"


def killed_in_a_call(checkpoint: Path) -> ShardedModelGroup:
    group = make_group(checkpoint, timeouts=QUICK)
    call = wait_in_collective(group, "sleep")
    queued = group.call.remote(lambda: 1)
    time.sleep(0.5)
    os.kill(group.ranks[1].pid, signal.SIGKILL)
    error = failure_of(call, within_s=2.0)
    assert error.primary is not None
    assert (error.primary.rank, error.primary.kind, error.primary.phase) == (1, "died", "call")
    assert error.primary.pid == group.ranks[1].pid
    assert error.failures[0].kind == "collateral"
    with pytest.raises(GroupBrokenError):
        queued.result()
    assert_broken(group, error)
    return group


def test_a_rank_that_raises_while_the_others_wait_for_it(checkpoint: Path) -> None:
    group = make_group(checkpoint, timeouts=QUICK)
    error = failure_of(wait_in_collective(group, "raise"), within_s=4.0)
    assert error.primary is not None
    assert (error.primary.rank, error.primary.kind) == (1, "raised")
    assert error.primary.error_type == "RuntimeError"
    assert "rank 1 alone" in error.primary.traceback
    assert error.failures[0].kind == "collateral"
    assert_broken(group, error)
    group.shutdown()


def test_a_function_that_fails_on_one_rank_alone_leaves_the_group_ready(group: ShardedModelGroup) -> None:
    def work(what: str) -> None:
        import sys

        if what == "raise":
            raise ConnectionRefusedError("a service of the user's")
        if what == "exit":
            sys.exit(3)

    for what, error_type in (("raise", "ConnectionRefusedError"), ("exit", "SystemExit")):
        with pytest.raises(GroupError) as caught:
            group.call(work, PerRank(["nothing", what]))
        assert caught.value.primary is not None
        assert (caught.value.primary.rank, caught.value.primary.kind) == (1, "raised")
        assert caught.value.primary.error_type == error_type
        assert sorted(caught.value.failures) == [1]
        assert group.state is GroupState.READY
    with pytest.raises(GroupError, match="ConnectionRefusedError"):
        group.call(work, "raise")
    assert group.call(lambda: 5) == [5, 5]


NEW_RAY = """
import sys, time, ray
from raysharding import ShardedModelGroup
from tests.forking import runtime_env
from tests.group.conftest import make_mlp

ray.init("local", runtime_env=runtime_env(), num_cpus=1, include_dashboard=False, log_to_driver=False)
group = ShardedModelGroup.from_checkpoint(sys.argv[1], model=make_mlp(), world_size=1, device="cpu")
ray.shutdown()
ray.init("local", runtime_env=runtime_env(), num_cpus=1, include_dashboard=False, log_to_driver=False)
begun = time.monotonic()
group.shutdown()
assert time.monotonic() - begun < 3, "nothing is left to wait for"
assert group.state.value == "closed"
ray.shutdown()
"""


@pytest.mark.full
@pytest.mark.usefixtures("worker_python")
def test_a_group_whose_ray_is_gone_is_shut_down_at_once(checkpoint: Path) -> None:
    done = programs.run(NEW_RAY, str(checkpoint))
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_rank_that_sleeps_past_the_deadline(checkpoint: Path) -> None:
    group = make_group(checkpoint, timeouts=Timeouts(call_s=1.5))
    call = wait_in_collective(group, "sleep")
    error = failure_of(call, within_s=1.5 + 2.0)
    assert isinstance(error, CallTimeoutError)
    assert isinstance(error, TimeoutError)
    assert error.primary is not None
    assert (error.primary.rank, error.primary.kind) == (1, "hung"), "not rank 0, which waits for it"
    assert "time.sleep(100)" in error.primary.traceback
    assert "rank 0 in a collective that rank 1 did not reach" in error.message
    assert "dist.barrier()" in error.failures[0].traceback
    assert error.failures[0].kind == "hung"
    assert "waits in a collective" in error.failures[0].message
    assert_broken(group, error)
    group.shutdown()


def test_a_stopped_rank_is_hung_and_removed(checkpoint: Path) -> None:
    group = make_group(checkpoint, timeouts=Timeouts(call_s=1.5))
    os.kill(group.ranks[1].pid, signal.SIGSTOP)
    error = failure_of(group.call.remote(lambda: 1), within_s=1.5 + 2.0)
    assert isinstance(error, CallTimeoutError)
    assert error.primary is not None
    assert (error.primary.rank, error.primary.kind) == (1, "hung")
    assert "answers no questions; its process is stopped by a signal" in error.primary.message
    assert sorted(error.failures) == [1]
    group.shutdown()


def test_a_rank_killed_while_the_model_is_built(checkpoint: Path) -> None:
    def build() -> torch.nn.Module:
        import os
        import signal

        import torch.distributed as dist
        from torch import nn

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    with pytest.raises(GroupError) as caught:
        make_group(checkpoint, model=build, timeouts=QUICK)
    assert caught.value.primary is not None
    assert (caught.value.primary.rank, caught.value.primary.kind, caught.value.primary.phase) == (1, "died", "build")


SMALL_BUCKETS = Loading("scatter", bucket_bytes=4096)


@pytest.mark.full
def test_a_slow_disk_that_gives_bytes_is_no_hang(many_buckets: Path) -> None:
    timeouts = Timeouts(load_stall_s=1.5)
    with make_group(many_buckets, model=slow_reads(0.25), loading=SMALL_BUCKETS, timeouts=timeouts) as group:
        assert group.load_report.seconds > timeouts.load_stall_s, "the control must outlast the deadline"


def test_a_disk_that_gives_no_bytes_is_a_hang(many_buckets: Path) -> None:
    with pytest.raises(CallTimeoutError, match="load on group") as caught:
        make_group(many_buckets, model=slow_reads(60), loading=SMALL_BUCKETS, timeouts=Timeouts(load_stall_s=1.0))
    primary = caught.value.primary
    assert primary is not None
    assert (primary.rank, primary.kind) == (0, "hung")
    assert primary.phase in ("plan", "stream")
    assert "in slow" in primary.traceback
