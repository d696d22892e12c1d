"""References of Ray in and out of calls: arguments, `Out.refs()` passed on, `Call.ref()`; and errors as builtins."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

from raysharding import GroupError, Out, PerRank, Same, ShardedModelGroup, Split
from raysharding.group import GroupState
from raysharding.group.calls import Call
from raysharding.group.messages import pack
from tests.clock import now
from tests.conftest import make_group, rank_processes

ROWS = torch.arange(32.0).reshape(4, 8)


def test_a_reference_reaches_every_rank_as_its_value(group: ShardedModelGroup, reference: nn.Module) -> None:
    ref = ray.put(ROWS)
    torch.testing.assert_close(group.forward(ref), reference(ROWS))
    torch.testing.assert_close(group.forward(ray.put(ROWS.numpy())), reference(ROWS))
    sums = group.call(lambda x, y: float(x.sum() + y.sum()), ref, y=PerRank([ray.put(ROWS), ray.put(-ROWS)]))
    assert sums == [2 * float(ROWS.sum()), 0.0]


def test_what_one_call_leaves_in_the_store_another_takes(group: ShardedModelGroup) -> None:
    refs = group.call(lambda: torch.ones(3), out=Out.refs())
    assert group.call(lambda x: x.tolist(), refs) == [[1.0] * 3] * 2


def test_an_argument_outlives_the_drivers_reference(group: ShardedModelGroup) -> None:
    slow = group.call.remote(time.sleep, 0.5)
    call = group.call.remote(lambda x: x.sum().item(), ray.put(np.ones(1_000_000)))
    gc.collect()
    assert call.result() == [1_000_000.0] * 2
    assert slow.done()


def test_references_are_not_pinned_by_packing(cluster: None) -> None:
    """Ray never frees an object whose reference was pickled outside of Ray."""
    ref = ray.put(1)
    packed = pack({"x": [ref]}, "a value")
    assert packed.refs == (ref,)
    assert packed.unpack() == {"x": [ref]}


def test_a_reference_that_one_rank_cannot_fetch_fails_the_call_only(group: ShardedModelGroup) -> None:
    @ray.remote(num_cpus=0)
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(GroupError, match=r"call: the value of the ObjectRef x cannot be fetched") as caught:
        group.call(lambda x: x, x=PerRank([ray.put(1), fail.remote()]))
    assert "lost" in str(caught.value)
    assert group.state is GroupState.READY
    assert group.call(lambda x: x, ray.put(1)) == [1, 1]


def test_a_split_of_a_reference_says_what_to_give(group: ShardedModelGroup) -> None:
    with pytest.raises(ValueError, match=r"args\[0\]: the driver has no rows .*Split\(ray.get\(ref\)\)"):
        group.forward(Split(ray.put(ROWS)))


def test_ray_waits_for_a_call(group: ShardedModelGroup, reference: nn.Module, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def wait() -> str:
        while not gate.exists():
            time.sleep(0.01)
        return "open"

    first, second = group.call.remote(wait).ref(), group.forward.remote(Split(ROWS)).ref()
    assert ray.wait([first, second], timeout=0.1)[0] == []
    gate.touch()
    assert ray.get(first, timeout=60) == ["open"] * 2
    torch.testing.assert_close(ray.get(second, timeout=60), reference(ROWS))


def test_nothing_of_a_reference_is_left(group: ShardedModelGroup) -> None:
    call = group.call.remote(int)
    assert ray.get(call.ref(), timeout=60) == [0, 0]
    until = now() + 30
    while keepers := rank_processes("ray::ResultKeeper"):
        assert now() < until, keepers
        time.sleep(0.05)
    assert call.result() == [0, 0]


def test_ray_waits_for_a_call_of_the_driver_or_in_steps(group: ShardedModelGroup, reference: nn.Module) -> None:
    """Their results come about in the driver, not on the ranks."""
    gathering, asking = group.state_dict.remote().ref(), group.status.remote().ref()
    torch.testing.assert_close(ray.get(gathering, timeout=60), dict(reference.state_dict()))
    assert ray.get(asking, timeout=60)["name"] == group.name


@pytest.mark.usefixtures("nothing_left")
def test_a_reference_outlives_its_group_and_what_nobody_has_fetched_ends_in_an_error(checkpoint: Path) -> None:
    group = make_group(checkpoint, world_size=1)
    kept = group.call.remote(torch.zeros, 100_000).ref()
    ray.wait([kept], timeout=60)
    (ref,) = group.call(torch.zeros, 100_000, out=Out.refs())
    call = group.call.remote(torch.zeros, 100_000)
    call.wait(60)
    assert ray.get(group.shutdown.remote().ref(), timeout=60) is None
    assert [one.shape for one in ray.get(kept)] == [(100_000,)]
    until = now() + 30
    lost = False
    while not lost and now() < until:  # Ray notices the end of the owner a little later
        try:
            ray.get(ref, timeout=20)
        except ray.exceptions.ObjectLostError:
            lost = True
        time.sleep(0.1)
    assert lost
    with pytest.raises(GroupError, match="the result of call on rank 0 is lost"):
        call.result()


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_pickled_is_told_by_the_reference() -> None:
    def fail() -> None:
        raise ValueError("at step 3", threading.Lock())

    with pytest.raises(GroupError, match=r"the result of fit, or its error, cannot be pickled: .*at step 3"):
        ray.get(Call.in_thread("fit", fail).ref(), timeout=60)


def test_a_failed_calls_reference_raises_its_error(group: ShardedModelGroup) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(GroupError, match="no") as caught:
        ray.get(group.call.remote(fail).ref(), timeout=20)
    assert isinstance(caught.value, ray.exceptions.RayTaskError)


def test_what_every_rank_raised_is_caught_by_its_builtin_type(group: ShardedModelGroup) -> None:
    def fail() -> None:
        raise KeyError("name")

    def fail_on_one() -> None:
        from raysharding import current_worker

        if current_worker().rank == 0:
            raise KeyError("name")

    with pytest.raises(KeyError) as caught:
        group.call(fail)
    assert isinstance(caught.value, GroupError)
    assert str(caught.value).startswith("call on ")
    with pytest.raises(GroupError) as alone:
        group.call(fail_on_one)
    assert not isinstance(alone.value, KeyError)


def test_a_traceback_ends_with_the_users_frame(group: ShardedModelGroup) -> None:
    def use_torch() -> None:
        nn.Linear(3, 3)(torch.ones(2))

    with pytest.raises(GroupError) as caught:
        group.call(use_torch)
    lines = caught.value.primary.traceback.splitlines()  # type: ignore[union-attr]
    frames = [line.strip() for line in lines if line.strip().startswith(("File", "…"))]
    assert frames[0].startswith("… ")
    assert frames[0].endswith("frames of raysharding")
    assert frames[-2].endswith("in use_torch")
    assert frames[-1].endswith("frames of torch.nn")


def test_an_error_raised_again_has_no_longer_traceback(group: ShardedModelGroup) -> None:
    def fail() -> None:
        raise ValueError

    call = group.call.remote(fail)
    lengths = set()
    for _ in range(3):
        with pytest.raises(GroupError) as caught:
            call.result()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


def test_rows_that_every_rank_computes_are_told_once(group: ShardedModelGroup) -> None:
    group._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.forward(Same(ROWS))
        group.forward(Split(ROWS))
        group.call(lambda x: None, ROWS)
        assert not caught
        group.forward(ROWS)
        group.forward(ROWS)
    assert len(caught) == 1
    assert "forward: every rank computes all of args[0] of shape (4, 8)" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_name_that_forward_does_not_know_is_refused_on_the_driver(group: ShardedModelGroup) -> None:
    wrong: dict[str, Any] = {"inputs": Split(ROWS)}
    with pytest.raises(ValueError, match=r"forward: the model's forward has no argument inputs=: is it input=\?"):
        group.forward(**wrong)
