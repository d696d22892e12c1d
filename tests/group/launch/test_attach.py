"""Named groups: another driver, or the same one again, finds a loaded group and uses it beside the others."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from raysharding import (
    CallTimeoutError,
    GroupBrokenError,
    GroupError,
    PerRank,
    Placement,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.group import GroupState
from tests.clock import now, wait_until
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

ROWS = torch.ones(3, 8)


def work(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return 7


@pytest.fixture(scope="module")
def lasting(cluster: None, checkpoint: Path) -> Iterator[tuple[int, ...]]:
    """The pids of a group named `llama`, for tests that leave it whole."""
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
    wait_until(lambda: "doomed" not in names(), 10.0, "the name is free")


def names() -> set[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in listed if one["namespace"] == "raysharding"}


def test_attach_finds_the_group_with_all_that_it_is(lasting: tuple[int, ...]) -> None:
    first = ShardedModelGroup.attach("llama")
    first.set_optimizer(torch.optim.SGD, lr=0.1)
    first.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())
    trained = first.state_dict()

    group = ShardedModelGroup.attach("llama")

    assert group.ranks == first.ranks
    assert tuple(group.call(os.getpid)) == lasting
    after = group.state_dict()
    assert after.keys() == trained.keys()
    assert all(torch.equal(after[name], trained[name]) for name in trained)
    assert group.load_report == first.load_report, "nothing was loaded again"
    group.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())


def test_a_group_that_is_dropped_lives_on(lasting: tuple[int, ...], checkpoint: Path) -> None:
    group = ShardedModelGroup.attach("llama")
    before = callback_threads()
    for _ in range(3):
        other = ShardedModelGroup.attach("llama")
        del other
        gc.collect()
    assert tuple(group.call(os.getpid)) == lasting
    wait_until(lambda: not (callback_threads() - before), 10.0, "the thread of a handle that is gone ends", 0.01)
    with pytest.raises(ValueError, match=r"name='none': no group of that name .* its groups are: 'llama'"):
        ShardedModelGroup.attach("none")
    with pytest.raises(ValueError, match=r"name='llama': a group of that name .* ShardedModelGroup.attach\('llama'\)"):
        make_group(checkpoint, name="llama")
    assert tuple(group.call(os.getpid)) == lasting


def callback_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("calls of ")}


def test_the_shutdown_of_a_detached_handle_leaves_the_group_to_the_others(lasting: tuple[int, ...]) -> None:
    with ShardedModelGroup.attach("llama") as detached:
        pass
    detached.shutdown()
    assert tuple(ShardedModelGroup.attach("llama").call(os.getpid)) == lasting


def test_a_call_of_another_driver_runs_first(lasting: tuple[int, ...]) -> None:
    first, second = ShardedModelGroup.attach("llama"), ShardedModelGroup.attach("llama")
    call = first.call.remote(work, 1.0)
    time.sleep(0.3)
    begun = now()
    assert second.call(work, 0.0) == [7, 7]
    assert now() - begun > 0.5, "behind the first"
    assert call.result(1.0) == [7, 7]

    # An error that every rank raised alike leaves the group as good as before, for both.
    with pytest.raises(GroupError):
        second.call(lambda: 1 / 0)
    assert first.call(work, 0.0) == [7, 7]


def test_ranks_that_another_driver_left_unlike_are_reset(lasting: tuple[int, ...]) -> None:
    """Its last call raised on one rank, which was reset, while the other kept the root gathered."""

    def gather_root(rows: torch.Tensor, raises: bool) -> None:
        from raysharding import current_worker

        with torch.no_grad():
            current_worker().module(rows)
        if raises:
            raise LookupError("alone")

    first = ShardedModelGroup.attach("llama")
    second = ShardedModelGroup.attach("llama", timeouts=Timeouts(call_s=20.0, drain_s=1.0))
    expected = first.forward(Split(ROWS))
    with pytest.raises(GroupError, match="LookupError: alone"):
        first.call(gather_root, ROWS, PerRank([False, True]))
    assert torch.equal(second.forward(Split(ROWS)), expected)


def test_a_call_of_another_driver_that_hangs_breaks_the_group_for_both(doomed: ShardedModelGroup) -> None:
    def hang(what: str) -> None:
        import time

        import torch.distributed as dist

        if what == "sleep":
            time.sleep(100)
        dist.barrier()  # rank 1 never comes

    first = ShardedModelGroup.attach("doomed", timeouts=Timeouts(call_s=2.0))
    call = first.call.remote(hang, PerRank(["wait", "sleep"]))
    time.sleep(0.5)
    second = ShardedModelGroup.attach("doomed")  # it waits for no call
    assert not call.done()
    queued = second.call.remote(int)
    with pytest.raises(CallTimeoutError) as caught:
        call.result()
    assert "time.sleep(100)" in caught.value.failures[1].traceback
    with pytest.raises(GroupBrokenError, match="rank 1 hung"):
        queued.result()
    assert second.state is GroupState.BROKEN


@pytest.mark.full
def test_a_group_whose_rank_died_without_drivers_is_found_broken_and_restarts(
    doomed: ShardedModelGroup, reference: nn.Module
) -> None:
    pid = doomed.ranks[1].pid
    doomed._client.detach()
    os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    group = ShardedModelGroup.attach("doomed")
    with pytest.raises(GroupBrokenError, match=r"'doomed' is broken .* rank 1 died"):
        group.call(int)
    group.restart()
    again = ShardedModelGroup.attach("doomed")
    torch.testing.assert_close(again.forward(Split(ROWS)), reference(ROWS))
    group.shutdown()


@pytest.mark.usefixtures("nothing_left")
def test_any_driver_renews_the_lease_and_the_group_ends_without_one(checkpoint: Path) -> None:
    """Also a driver with timeouts of its own, which have no lease."""
    first = make_group(checkpoint, name="doomed", timeouts=Timeouts(lease_s=1.0))
    second = ShardedModelGroup.attach("doomed", timeouts=Timeouts())
    first._client.detach()
    time.sleep(2.0)
    assert second.call(int) == [0, 0]
    second._client.detach()
    wait_until(lambda: "doomed" not in names(), 10.0, "the name is free")


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
