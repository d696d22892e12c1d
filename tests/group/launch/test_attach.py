"""Named groups: another driver, or the same one again, joins the drivers of a loaded group."""

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
    GroupBrokenError,
    GroupError,
    PerRank,
    Placement,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.group import GroupState
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
    return {one["name"] for one in listed if one["namespace"] == "raysharding"}


def test_a_group_is_joined_with_all_that_it_is(lasting: tuple[int, ...]) -> None:
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
    assert tuple(first.call(os.getpid)) == lasting, "the driver that was there goes on"


def test_a_group_that_is_dropped_lives_on(lasting: tuple[int, ...], checkpoint: Path) -> None:
    threads = threading.active_count()
    for _ in range(3):
        group = ShardedModelGroup.attach("llama")
        del group
        gc.collect()
    group = ShardedModelGroup.attach("llama")
    assert tuple(group.call(os.getpid)) == lasting
    until = now() + 5.0
    while threading.active_count() > threads + 1:
        assert now() < until, "the threads of clients that are gone end"
        time.sleep(0.05)
    with pytest.raises(ValueError, match=r"name='none': no group of that name .* its groups are: 'llama'"):
        ShardedModelGroup.attach("none")
    with pytest.raises(ValueError, match=r"name='llama': a group of that name .* ShardedModelGroup.attach\('llama'\)"):
        make_group(checkpoint, name="llama")
    assert tuple(group.call(os.getpid)) == lasting


def test_ranks_that_a_driver_left_unlike_are_reset(lasting: tuple[int, ...]) -> None:
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


def test_a_rank_that_died_while_no_driver_was_there_breaks_the_group(
    doomed: ShardedModelGroup, reference: nn.Module
) -> None:
    pid = doomed.ranks[1].pid
    doomed._client.detach()
    os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    group = ShardedModelGroup.attach("doomed")
    assert group.state is GroupState.BROKEN
    with pytest.raises(GroupBrokenError, match="rank 1 died"):
        group.call(int)
    group.restart()
    assert torch.allclose(group.forward(Split(ROWS)), reference(ROWS), atol=1e-6)
    group.shutdown()


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
