"""Named groups: another driver, or the same one again, finds a loaded group and takes it over."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from raysharding import (
    CallTimeoutError,
    FitStep,
    GroupBrokenError,
    GroupError,
    GroupTakenOverError,
    PerRank,
    Placement,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.batch import RankBatch
from raysharding.group import GroupState
from raysharding.group.rpc.messages import Command, pack_same
from raysharding.group.supervision.lease_renewal import LeaseRenewal
from tests.clock import now
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

ROWS = torch.ones(3, 8)


def work(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return 7


@pytest.fixture(scope="module")
def lasting(cluster: None, checkpoint: Path) -> Iterator[tuple[int, ...]]:
    """The pids of a group named `llama`, for tests that leave it whole, whoever has it then."""
    made = make_group(checkpoint, name="llama", timeouts=Timeouts(drain_s=1.0))
    yield tuple(one.pid for one in made.ranks)
    ShardedModelGroup.attach("llama").shutdown()
    assert "llama" not in names()


@pytest.fixture
def doomed(nothing_left: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """A named group that the test ends."""
    group = make_group(checkpoint, name="doomed", timeouts=Timeouts(drain_s=1.0))
    yield group
    group.shutdown()
    until = now() + 10.0
    while "doomed" in names():
        assert now() < until
        time.sleep(0.05)


def names() -> set[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"].partition("/")[0] for one in listed if one["namespace"] == "raysharding"}


def test_a_group_is_taken_over_with_all_that_it_is(lasting: tuple[int, ...]) -> None:
    def loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    first = ShardedModelGroup.attach("llama")
    first.set_optimizer(torch.optim.SGD, lr=0.1)
    first.train_step(Split(ROWS), loss=loss)
    trained = first.state_dict()

    group = ShardedModelGroup.attach("llama")

    assert group.ranks == first.ranks
    assert tuple(group.call(os.getpid)) == lasting
    after = group.state_dict()
    assert after.keys() == trained.keys()
    assert all(torch.equal(after[name], trained[name]) for name in trained)
    assert group.load_report == first.load_report, "nothing was loaded again"
    group.train_step(Split(ROWS), loss=loss)

    # Who had it is told, at once and for every call, and can do it no harm.
    until = now() + 1.0
    while first.state is not GroupState.BROKEN:
        assert now() < until
        time.sleep(0.01)
    with pytest.raises(GroupTakenOverError, match="group 'llama' was taken over by another driver"):
        first.forward(Split(ROWS))
    begun = now()
    first.shutdown()
    assert now() - begun < 1.0
    assert tuple(group.call(os.getpid)) == lasting


def test_a_driver_that_has_lost_its_group_does_not_restart_it(lasting: tuple[int, ...], tmp_path: Path) -> None:
    """It would remove what the ranks are writing, and make a group of its own once the name is free."""
    first = ShardedModelGroup.attach("llama")
    first.set_optimizer(torch.optim.SGD, lr=0.1)
    first.save(tmp_path / "save")
    first._parts = replace(first._parts, spec=replace(first._parts.spec, max_restarts=2))
    taken: list[ShardedModelGroup] = []

    def take(step: FitStep) -> None:
        if not taken:
            taken.append(ShardedModelGroup.attach("llama"))

    rows = [{"input": [1.0] * 8}] * 400
    with pytest.raises(GroupTakenOverError) as caught:
        first.fit(rows, batch_size=2, loss=lambda output: output.square().mean(), callbacks=[take])
    assert not getattr(caught.value, "__notes__", ()), "no restart was tried"
    with pytest.raises(GroupTakenOverError):
        first.restart(world_size=1)
    assert tuple(taken[0].call(os.getpid)) == lasting


def test_a_group_that_is_dropped_lives_on(lasting: tuple[int, ...], checkpoint: Path) -> None:
    threads = threading.active_count()
    for _ in range(3):
        group = ShardedModelGroup.attach("llama")
        del group
        gc.collect()
    group = ShardedModelGroup.attach("llama")
    assert tuple(group.call(os.getpid)) == lasting
    assert threading.active_count() <= threads + 1, "the supervision of a group that is gone and taken over ends"
    with pytest.raises(ValueError, match=r"name='none': no group of that name .* its groups are: 'llama'"):
        ShardedModelGroup.attach("none")
    with pytest.raises(ValueError, match=r"name='llama': a group of that name .* ShardedModelGroup.attach\('llama'\)"):
        make_group(checkpoint, name="llama")
    assert tuple(group.call(os.getpid)) == lasting


def test_the_call_of_an_earlier_driver_ends_first(lasting: tuple[int, ...]) -> None:
    first = ShardedModelGroup.attach("llama")
    call, queued = first.call.remote(work, 2.0), first.call.remote(work, 60.0)
    time.sleep(0.3)
    begun, begun_clock = now(), time.monotonic()
    group = ShardedModelGroup.attach("llama")
    assert time.monotonic() - begun_clock > 1.0
    assert now() - begun < 4.0
    for one in (call, queued):
        with pytest.raises(GroupTakenOverError):
            one.result()
    assert group.state is GroupState.READY
    assert group.call(work, 0.0) == [7, 7]

    # An error that every rank raised alike leaves the group as good as before.
    with pytest.raises(GroupError):
        group.call(lambda: 1 / 0)
    again = ShardedModelGroup.attach("llama")
    assert again.call(work, 0.0) == [7, 7]


def test_ranks_that_an_earlier_driver_left_unlike_are_reset(lasting: tuple[int, ...]) -> None:
    """Its last call raised on one rank, which was reset, while the other kept the root gathered."""

    def gather_root(rows: torch.Tensor, raises: bool) -> None:
        from raysharding import current_worker

        with torch.no_grad():
            current_worker().module(rows)
        if raises:
            raise LookupError("alone")

    first = ShardedModelGroup.attach("llama")
    expected = first.forward(Split(ROWS))
    with pytest.raises(GroupError, match="LookupError: alone"):
        first.call(gather_root, ROWS, PerRank([False, True]))
    second = ShardedModelGroup.attach("llama", timeouts=Timeouts(call_s=20.0, drain_s=1.0))
    assert torch.equal(second.forward(Split(ROWS)), expected)


def test_what_ray_brings_late_of_an_earlier_driver_is_nobodys_answer(lasting: tuple[int, ...]) -> None:
    """The rank refuses it, and tells the driver that it obeys: by a number that is none of that one's calls."""
    first = ShardedModelGroup.attach("llama")
    assert first.call(work, 0.0) == [7, 7]
    client = first._client
    args = pack_same("call", RankBatch((0.0,)), work, None)
    number = client.supervisor._runner._numbers
    late, _ = Command("call", args, epoch=client.members[0].epoch, number=number).encode()
    group = ShardedModelGroup.attach("llama")
    call = group.call.remote(work, 0.5)
    ray.get([member.actor.deliver.remote(late) for member in group._client.members])
    assert call.result() == [7, 7]
    assert [group.call(work, 0.0) for _ in range(4)] == [[7, 7]] * 4
    numbers = [one._client.supervisor._runner._numbers for one in (first, group)]
    assert abs(numbers[0] - numbers[1]) > 1 << 31, "no two drivers count through the same numbers"


def test_a_call_of_an_earlier_driver_that_hangs(doomed: ShardedModelGroup) -> None:
    def hang(what: str) -> None:
        import time

        import torch.distributed as dist

        if what == "sleep":
            time.sleep(100)
        dist.barrier()  # rank 1 never comes

    call = doomed.call.remote(hang, PerRank(["wait", "sleep"]))
    time.sleep(0.5)
    begun, begun_clock = now(), time.monotonic()
    with pytest.raises(CallTimeoutError, match="attach on group 'doomed'") as caught:
        ShardedModelGroup.attach("doomed", timeouts=Timeouts(call_s=2.0))
    assert time.monotonic() - begun_clock > 2.0
    assert now() - begun < 14.0
    assert "time.sleep(100)" in caught.value.failures[1].traceback
    with pytest.raises(GroupTakenOverError):
        call.result()
    assert "doomed" not in names()


@pytest.mark.parametrize("bundle", [0, 1])
@pytest.mark.full
def test_a_group_with_a_dead_rank_is_removed(doomed: ShardedModelGroup, bundle: int) -> None:
    victim = next(one for one in doomed._client.members if one.name == f"doomed/{bundle}")
    # As if no driver had been there to see it.
    doomed._supervisor.detach()
    os.kill(victim.info.pid, signal.SIGKILL)
    time.sleep(1.0)
    with pytest.raises(GroupBrokenError, match=rf"'doomed' is broken: its actor 'doomed/{bundle}' is gone; it was"):
        ShardedModelGroup.attach("doomed")


def test_a_driver_that_leaves_at_once_leaves_no_lease_behind(doomed: ShardedModelGroup) -> None:
    renewal = LeaseRenewal(doomed._client.members, 1.0, lambda: True)
    renewal._number = 1000  # after those of the group's own
    time.sleep(0.5)
    renewal.change(None)
    renewal.stop()
    renewal.wait_heard(5.0)
    time.sleep(2.0)
    assert doomed.call(int) == [0, 0]


def test_the_lease_of_an_earlier_driver_ends_with_its_ownership(nothing_left: None, checkpoint: Path) -> None:
    """Nobody renews it any more: the ranks would end, whatever lease the new driver has."""
    first = make_group(checkpoint, name="doomed", timeouts=Timeouts(lease_s=1.0))
    group = ShardedModelGroup.attach("doomed", timeouts=Timeouts())
    time.sleep(2.0)
    assert group.call(int) == [0, 0]
    group.shutdown()
    with pytest.raises(GroupTakenOverError):
        first.call(int)


@pytest.mark.full
def test_a_stopped_rank_does_not_hold_attach_up(doomed: ShardedModelGroup) -> None:
    os.kill(doomed.ranks[1].pid, signal.SIGSTOP)
    begun = now()
    with pytest.raises(CallTimeoutError, match="does not answer within 2 s"):
        ShardedModelGroup.attach("doomed", timeouts=Timeouts(call_s=2.0))
    assert now() - begun < 4.0


@pytest.mark.full
def test_a_restarted_group_keeps_its_name(doomed: ShardedModelGroup, reference: nn.Module) -> None:
    os.kill(doomed.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(GroupError):
        doomed.call(work, 5.0)
    doomed.restart()
    group = ShardedModelGroup.attach("doomed")
    assert torch.allclose(group.forward(Split(ROWS)), reference(ROWS), atol=1e-6)
    group.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, "name='a/b': give None, or a printable str without '/'"),
        ({"name": ""}, "name='': give None"),
        ({"name": 3}, "name=3: give None"),
        ({"name": "x", "placement": Placement(placement_group=object())}, "with a placement group of your own"),
    ],
)
def test_names_are_checked(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_group(checkpoint, **options)
