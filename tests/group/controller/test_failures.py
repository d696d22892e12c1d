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
    all_agreed,
    all_alike,
    all_recovered,
    failed,
    judge,
    leaves_intact,
    output_only,
    rank_died,
    rank_hung,
    rank_raised,
    rank_stopped,
)
from raysharding.group.messages import RemoteError, Stacks, StateChange, without_frames
from raysharding.group.messages.remote_error import is_connection_error, record_exception

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1")


def info(rank: int) -> RankInfo:
    return RankInfo(rank, node_id="n", node_ip="10.0.0.1", pid=100 + rank, local_rank=rank, device="cpu")


def raised(error: Exception) -> RemoteError:
    return record_exception(error, stage="run", phase="call", tensor=None, recovered=True)


def typed_error(seen: list[Observed], error: GroupError, world_size: int) -> RayshardingError | None:
    """What the caller gets."""
    return raised_by(failed(seen, error, world_size))


ABSENT = {rank: RendezvousError(f"rank {rank} did not come", missing_ranks=[rank]) for rank in (0, 1)}
DIED = rank_died(info(0), "call", RuntimeError("killed\n  by signal 9"))
STOPPED = rank_stopped(info(2), "call")
WAITS = rank_hung(info(0), "call", 5.0, Stacks("in barrier", in_collective=True))
SLEEPS = rank_hung(info(1), "call", 5.0, Stacks("in sleep", in_collective=False))
NCCL = [
    dist.DistBackendError(
        "NCCL error in: ncclSystemError: System call (e.g. socket, malloc) or external library failed"
    ),
    dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 ms"),
]


def raises(rank: int, error: Exception) -> Observed:
    return rank_raised(info(rank), raised(error))


@pytest.mark.parametrize(
    ("seen", "primary", "kinds"),
    [
        pytest.param([raises(1, GLOO), DIED, STOPPED], 1, "collateral died collateral", id="lost"),
        pytest.param([raises(2, ABSENT[0]), DIED], 1, "collateral died", id="missed before its death is heard"),
        # Both deadlines of a rendezvous are the same, and either may be heard first.
        pytest.param([raises(0, ABSENT[1]), raises(2, ABSENT[0])], 1, "collateral raised", id="misses the store"),
        pytest.param([raises(2, KeyError("a")), DIED], 0, "raised died", id="the first of two causes"),
        pytest.param([raises(1, GLOO), raises(0, GLOO)], 0, "raised collateral", id="connections alone"),
        pytest.param([WAITS, SLEEPS], 1, "hung hung", id="who waits is not the cause"),
        *[pytest.param([raises(0, one), raises(1, ValueError())], 1, "collateral raised") for one in NCCL],
    ],
)
def test_the_first_cause_is_primary_and_others_are_collateral(seen: list[Observed], primary: int, kinds: str) -> None:
    error = judge(seen, "call", timed_out=SLEEPS in seen)
    assert error.primary == seen[primary].failure
    assert [error.failures[one.failure.rank].kind for one in seen] == kinds.split()
    assert isinstance(error, CallTimeoutError) == (SLEEPS in seen)
    assert DIED.failure.message.startswith("killed by signal 9; group.logs(0) shows its last lines")


def test_our_own_errors_reach_the_caller_as_they_are() -> None:
    """Not that a rank is missing, where it has died."""
    original = PlanError("does not fit", problems=["a is missing"])
    group_error = judge(seen := [raises(0, original)], "load", timed_out=False)
    given = typed_error(seen, group_error, 1)
    assert isinstance(given, PlanError)
    assert given.problems == original.problems
    assert given.__cause__ is group_error
    seen = [raises(2, ABSENT[0]), DIED]
    assert typed_error(seen, error := judge(seen, "join", timed_out=False), 3) is error
    assert isinstance(typed_error(seen[:1], judge(seen[:1], "join", timed_out=False), 3), RendezvousError)


def test_alike_means_every_rank_the_same_type_on_its_own_account_and_repaired() -> None:
    alike = [rank_raised(info(rank), raised(ValueError(f"row {rank}"))) for rank in range(2)]
    assert all_alike(alike, 2)
    assert not all_alike(alike[:1], 2)
    assert not all_alike([alike[0], rank_raised(info(1), raised(KeyError("row")))], 2)
    assert not all_alike([alike[0], Observed(alike[1].failure, None)], 2)
    spoilt = replace(alike[1], raised=replace(raised(ValueError("x")), recovered=False))
    assert not all_alike([alike[0], spoilt], 2)
    for lost in (GLOO, *NCCL):  # all ranks lost their peers: the process group is gone
        assert not all_alike([raises(rank, lost) for rank in range(2)], 2)
    agreed = [
        replace(one, agreed_from=1) for one in (raised(RayshardingError("KeyError: row")), raised(KeyError("row")))
    ]
    seen = [rank_raised(info(rank), one) for rank, one in enumerate(agreed)]
    assert all_agreed(seen, 2)
    assert not all_agreed(seen[:1], 2)
    assert not all_agreed(alike, 2)
    assert leaves_intact("generate", seen, (), 2)
    assert not leaves_intact("call", seen, [StateChange(whole=False, num_changes=1)] * 2, 2)
    assert judge(seen, "generate", timed_out=False).primary == seen[1].failure
    packing = replace(alike[0], raised=replace(raised(ValueError("x")), stage="output"))
    assert output_only([packing])
    assert not output_only(alike)


def test_a_function_that_raised_on_some_ranks_only_has_harmed_nothing() -> None:
    some = [rank_raised(info(1), raised(ValueError("row"))), rank_raised(info(2), raised(KeyError("row")))]
    assert all_recovered(some)
    assert not all_recovered([*some, rank_died(info(0), "call", RuntimeError("gone"))])
    assert not all_recovered([*some, rank_raised(info(0), raised(GLOO))])
    assert all_alike([rank_raised(info(rank), raised(ConnectionResetError("a service"))) for rank in range(2)], 2)


def test_a_copy_of_an_error_holds_no_frames() -> None:
    error = judge([rank_raised(info(0), raised(ValueError("x")))], "call", timed_out=True)
    with pytest.raises(CallTimeoutError):
        raise error from ValueError("x")
    kept = without_frames(error)
    assert (type(kept), str(kept), kept.failures) == (CallTimeoutError, str(error), error.failures)
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)


@pytest.mark.parametrize("said", ["ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError"])
def test_a_rank_that_used_nccl_wrongly_is_the_cause(said: str) -> None:
    """Not the one that waits for it, which on a GPU need not be seen to."""
    wrong = rank_raised(info(1), raised(dist.DistBackendError(f"NCCL error in: x.cpp\n{said}: something is wrong")))
    waits = rank_hung(info(0), "call", 5.0, Stacks("in .item()", in_collective=False, is_busy=True))
    assert "its device computes, or waits for other ranks" in waits.failure.message
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
