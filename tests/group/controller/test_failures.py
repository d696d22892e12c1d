"""Which failure is named first, whatever the order in which failures reach the controller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from raysharding import CallTimeoutError, PlanError, RendezvousError
from raysharding.errors import GroupError, RayshardingError
from raysharding.group import RankInfo
from raysharding.group.calls.connection import raised_by
from raysharding.group.controller.failures import (
    Observed,
    all_alike,
    all_recovered,
    failed,
    judge,
    output_only,
    saw_death,
    saw_hang,
    saw_raise,
    saw_stop,
)
from raysharding.group.messages import RemoteError, Stacks, without_frames
from raysharding.group.messages.remote_error import is_connection_error, record_exception

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1")


def info(rank: int) -> RankInfo:
    return RankInfo(rank, node_id="n", node_ip="10.0.0.1", pid=100 + rank, local_rank=rank, device="cpu")


def raised(error: Exception) -> RemoteError:
    return record_exception(error, stage="run", phase="call", tensor=None, recovered=True)


def typed_error(seen: list[Observed], error: GroupError, world_size: int) -> RayshardingError | None:
    """What the caller gets."""
    return raised_by(failed(seen, error, world_size))


def test_a_lost_connection_that_arrives_first_is_not_the_cause() -> None:
    died = saw_death(info(1), "call", RuntimeError("killed\n  by signal 9"))
    error = judge([saw_raise(info(0), raised(GLOO)), died, saw_stop(info(2), "call")], "call", timed_out=False)
    assert error.primary == died.failure
    assert {rank: failure.kind for rank, failure in error.failures.items()} == {
        0: "collateral",
        1: "died",
        2: "collateral",
    }
    assert died.failure.message.startswith("killed by signal 9; group.logs(1) shows its last lines")


def test_ranks_that_say_who_did_not_come_follow_the_one_that_died() -> None:
    """They may be heard before Ray has told of the death."""
    absent = RendezvousError("rank 0 did not come", missing_ranks=[0])
    died = saw_death(info(0), "join", RuntimeError("gone"))
    seen = [saw_raise(info(2), raised(absent)), died]
    error = judge(seen, "join", timed_out=False)
    assert error.primary == died.failure
    assert error.failures[2].kind == "collateral"
    assert typed_error(seen, error, 3) is error
    alone = judge(seen[:1], "join", timed_out=False)
    assert isinstance(typed_error(seen[:1], alone, 3), RendezvousError)


def test_rank_0_that_waits_follows_the_ranks_that_cannot_reach_its_store() -> None:
    """Both deadlines are the same, and either may be heard first."""
    waits = saw_raise(info(0), raised(RendezvousError("ranks that did not arrive: 1, 2", missing_ranks=[1, 2])))
    unable = saw_raise(info(2), raised(RendezvousError("cannot reach rank 0's store", missing_ranks=[0])))
    error = judge([waits, unable], "join", timed_out=False)
    assert error.primary == unable.failure
    assert error.failures[0].kind == "collateral"


def test_of_two_causes_the_first_is_primary_and_the_other_keeps_its_kind() -> None:
    first, second = saw_raise(info(2), raised(KeyError("a"))), saw_death(info(0), "call", RuntimeError("gone"))
    error = judge([first, second], "call", timed_out=False)
    assert error.primary == first.failure
    assert error.failures[0].kind == "died"


def test_where_only_connections_were_lost_the_first_is_primary() -> None:
    seen = [saw_raise(info(rank), raised(GLOO)) for rank in (1, 0)]
    error = judge(seen, "call", timed_out=False)
    assert error.primary == seen[0].failure
    assert not all_alike(seen, 2), "all ranks lost their peers: the process group is gone"


def test_a_hang_is_a_timeout_and_who_waits_is_not_the_cause() -> None:
    waits = saw_hang(info(0), "call", 5.0, Stacks("in barrier", in_collective=True))
    sleeps = saw_hang(info(1), "call", 5.0, Stacks("in sleep", in_collective=False))
    error = judge([waits, sleeps], "call", timed_out=True)
    assert isinstance(error, CallTimeoutError)
    assert error.primary == sleeps.failure
    assert error.failures[0].kind == "hung"


def test_alike_means_every_rank_the_same_type_on_its_own_account_and_repaired() -> None:
    alike = [saw_raise(info(rank), raised(ValueError(f"row {rank}"))) for rank in range(2)]
    assert all_alike(alike, 2)
    assert not all_alike(alike[:1], 2)
    assert not all_alike([alike[0], saw_raise(info(1), raised(KeyError("row")))], 2)
    assert not all_alike([alike[0], Observed(alike[1].failure, None)], 2)
    spoilt = replace(alike[1], raised=replace(raised(ValueError("x")), recovered=False))
    assert not all_alike([alike[0], spoilt], 2)
    packing = replace(alike[0], raised=replace(raised(ValueError("x")), stage="output"))
    assert output_only([packing])
    assert not output_only(alike)


def test_a_function_that_raised_on_some_ranks_only_has_harmed_nothing() -> None:
    some = [saw_raise(info(1), raised(ValueError("row"))), saw_raise(info(2), raised(KeyError("row")))]
    assert all_recovered(some)
    assert not all_recovered([*some, saw_death(info(0), "call", RuntimeError("gone"))])
    assert not all_recovered([*some, saw_raise(info(0), raised(GLOO))])
    assert all_alike([saw_raise(info(rank), raised(ConnectionResetError("a service"))) for rank in range(2)], 2)


def test_a_copy_of_an_error_holds_no_frames() -> None:
    error = judge([saw_raise(info(0), raised(ValueError("x")))], "call", timed_out=True)
    with pytest.raises(CallTimeoutError):
        raise error from ValueError("x")
    kept = without_frames(error)
    assert (type(kept), str(kept), kept.failures) == (CallTimeoutError, str(error), error.failures)
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)


def test_our_own_errors_reach_the_caller_as_they_are() -> None:
    original = PlanError("does not fit", problems=["a is missing"])
    seen = [saw_raise(info(0), raised(original))]
    group_error = judge(seen, "load", timed_out=False)
    given = typed_error(seen, group_error, 1)
    assert isinstance(given, PlanError)
    assert given.problems == original.problems
    assert given.__cause__ is group_error


NCCL = [
    dist.DistBackendError(
        "NCCL error in: ncclSystemError: System call (e.g. socket, malloc) or external library failed"
    ),
    dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 ms"),
]


@pytest.mark.parametrize("error", NCCL)
def test_after_an_error_of_nccl_no_collective_can_work(error: Exception) -> None:
    """Of the ranks that say so, none is the cause where another one says something else."""
    alone, follows = saw_raise(info(1), raised(ValueError("row"))), saw_raise(info(0), raised(error))
    assert judge([follows, alone], "call", timed_out=False).primary == alone.failure
    assert not all_alike([saw_raise(info(rank), raised(error)) for rank in range(2)], 2)


@pytest.mark.parametrize("said", ["ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError"])
def test_a_rank_that_used_nccl_wrongly_is_the_cause(said: str) -> None:
    """Not the one that waits for it, which on a GPU need not be seen to."""
    wrong = saw_raise(info(1), raised(dist.DistBackendError(f"NCCL error in: x.cpp\n{said}: something is wrong")))
    waits = saw_hang(info(0), "call", 5.0, Stacks("in .item()", in_collective=False))
    assert judge([wrong, waits], "call", timed_out=True).primary == wrong.failure
    assert not all_recovered([wrong])


@pytest.mark.parametrize("error", [GLOO, *NCCL, dist.DistNetworkError("x"), ConnectionResetError("x")])
def test_lost_connections_are_known(error: Exception) -> None:
    assert is_connection_error(error)
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert is_connection_error(wrapped)
    typed = RendezvousError("rank 1 lost the store")
    typed.__cause__ = error
    assert not is_connection_error(typed), "it says itself what happened"
    assert not is_connection_error(RuntimeError("mat1 and mat2 cannot be multiplied"))
