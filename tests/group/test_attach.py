"""Named groups: another driver, or the same one again, finds a loaded group and takes it over."""

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
    GroupTakenOverError,
    PerRank,
    Placement,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.group import GroupState
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

ROWS = torch.ones(3, 8)


def work(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return 7


@pytest.fixture
def named(nothing_left: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """A group that outlives its driver, shut down after the test by whoever has it then."""
    group = make_group(checkpoint, name="llama", timeouts=Timeouts(drain_s=1.0))
    yield group
    group.shutdown()
    if "llama" in names():
        ShardedModelGroup.attach("llama").shutdown()


def names() -> set[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"].partition("/")[0] for one in listed if one["namespace"] == "raysharding"}


def test_a_group_is_taken_over_with_all_that_it_is(named: ShardedModelGroup, reference: nn.Module) -> None:
    named.set_optimizer(torch.optim.SGD, lr=0.1)
    named.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())
    trained, pids = named.state_dict(), [one.pid for one in named.ranks]
    waiting = threading.Thread(target=lambda: None)

    group = ShardedModelGroup.attach("llama")

    assert group.ranks == named.ranks
    assert group.call(os.getpid) == pids
    after = group.state_dict()
    assert after.keys() == trained.keys()
    assert all(torch.equal(after[name], trained[name]) for name in trained)
    assert group.load_report == named.load_report, "nothing was loaded again"
    group.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())
    del waiting

    # Who had it is told, at once and for every call, and can do it no harm.
    until = time.monotonic() + 1.0
    while named.state is not GroupState.BROKEN:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(GroupTakenOverError, match="group 'llama' was taken over by another driver"):
        named.forward(Split(ROWS))
    begun = time.monotonic()
    named.shutdown()
    assert time.monotonic() - begun < 1.0
    assert group.call(os.getpid) == pids
    group.shutdown()
    assert names() == set()


def test_dropping_the_object_ends_a_group_without_a_name_only(named: ShardedModelGroup, checkpoint: Path) -> None:
    pids = [one.pid for one in named.ranks]
    other = make_group(checkpoint, name="other")
    others = [one.pid for one in other.ranks]
    del other
    gc.collect()
    with pytest.raises(ValueError, match=r"name='none': no group of that name .* there are: 'llama', 'other'"):
        ShardedModelGroup.attach("none")
    with pytest.raises(ValueError, match=r"name='llama': a group of that name .* ShardedModelGroup.attach\('llama'\)"):
        make_group(checkpoint, name="llama")
    with ShardedModelGroup.attach("other") as again:
        assert [one.pid for one in again.ranks] == others
    assert names() == {"llama"}, "a with block ends it"
    assert named.call(os.getpid) == pids


def test_the_call_of_an_earlier_driver_ends_first(named: ShardedModelGroup) -> None:
    call = named.call.remote(work, 2.0)
    time.sleep(0.3)
    begun = time.monotonic()
    group = ShardedModelGroup.attach("llama")
    assert 1.0 < time.monotonic() - begun < 4.0
    with pytest.raises(GroupTakenOverError):
        call.result()
    assert group.state is GroupState.READY
    assert group.call(work, 0.0) == [7, 7]

    # An error that every rank raised alike leaves the group as good as before.
    with pytest.raises(GroupError):
        group.call(lambda: 1 / 0)
    again = ShardedModelGroup.attach("llama")
    assert again.call(work, 0.0) == [7, 7]
    again.shutdown()


def test_a_call_of_an_earlier_driver_that_hangs(named: ShardedModelGroup) -> None:
    def hang(what: str) -> None:
        import time

        import torch.distributed as dist

        if what == "sleep":
            time.sleep(100)
        dist.barrier()  # rank 1 never comes

    call = named.call.remote(hang, PerRank(["wait", "sleep"]))
    time.sleep(0.5)
    begun = time.monotonic()
    with pytest.raises(CallTimeoutError, match="attach on group 'llama'") as caught:
        ShardedModelGroup.attach("llama", timeouts=Timeouts(call_s=2.0))
    assert 2.0 < time.monotonic() - begun < 14.0
    assert "time.sleep(100)" in caught.value.failures[1].traceback
    with pytest.raises(GroupTakenOverError):
        call.result()
    assert names() == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_with_a_dead_rank_is_removed(named: ShardedModelGroup, rank: int) -> None:
    victim = next(one for one in named._channel.members if one.name == f"llama/{rank}")
    # As if no driver had been there to see it.
    named._supervisor.detach()
    os.kill(victim.info.pid, signal.SIGKILL)
    time.sleep(1.0)
    with pytest.raises(GroupBrokenError, match=r"group 'llama' is broken: its actor 'llama/.' is gone; it was stopped"):
        ShardedModelGroup.attach("llama")
    until = time.monotonic() + 10.0
    while names():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_stopped_rank_does_not_hold_attach_up(named: ShardedModelGroup) -> None:
    os.kill(named.ranks[1].pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(CallTimeoutError, match="does not answer within 2 s"):
        ShardedModelGroup.attach("llama", timeouts=Timeouts(call_s=2.0))
    assert time.monotonic() - begun < 4.0


def test_a_restarted_group_keeps_its_name(named: ShardedModelGroup, reference: nn.Module) -> None:
    os.kill(named.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(GroupError):
        named.call(work, 5.0)
    named.restart()
    group = ShardedModelGroup.attach("llama")
    assert torch.allclose(group.forward(Split(ROWS)), reference(ROWS), atol=1e-6)
    group.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, "name='a/b': give None, or a printable str without '/'"),
        ({"name": ""}, "name='': give None"),
        ({"name": 3}, "name=3: give None"),
        ({"name": "x", "placement": Placement(placement_group=object())}, "with a placement group of yours"),
    ],
)
def test_names_are_checked(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_group(checkpoint, **options)
