"""Groups in the places that Ray has for code: a Ray Data pipeline, an asyncio actor, an actor in a placement group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

from raysharding import CallTimeoutError, Placement, ShardedModelGroup, Timeouts
from tests.group.conftest import free_cpus, make_group, make_mlp

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("nothing_left")]

ROWS = 16


def batch_class() -> Any:
    """What a Ray Data pipeline calls. Local, so that it pickles by value: workers need not import the tests."""

    class Forward:
        def __init__(self, name: str) -> None:

            self.group = ShardedModelGroup.attach(name)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            import torch

            from raysharding import Split

            y = self.group.forward(Split(torch.tensor(batch["x"])))
            return {"x": batch["x"], "y": y.numpy()}

    return Forward


def async_class() -> Any:
    """An actor whose methods run on an asyncio loop, as those of a Ray Serve replica do."""

    class Replica:
        def __init__(self, make: Callable[[], Any], checkpoint: str, **options: Any) -> None:

            options |= {"model": make, "device": "cpu", "world_size": 2}
            self.group = ShardedModelGroup.from_checkpoint(checkpoint, **options)
            self.waiting = self.most = 0

        async def answer(self, x: torch.Tensor) -> Any:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            answer = await self.group.forward.remote(x)
            self.waiting -= 1
            return answer

        async def wait(self, seconds: float) -> None:
            await self.group.call.remote(time.sleep, seconds)

        async def answer_all(self, parts: list[torch.Tensor]) -> Any:
            return await asyncio.gather(*map(self.answer, parts)), self.most

    return Replica


def inputs() -> np.ndarray[Any, Any]:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1)).numpy()


def test_a_ray_data_pipeline_attaches_to_a_named_group(cluster: None, checkpoint: Path, reference: nn.Module) -> None:
    """It is a driver beside this one, whose calls go on."""
    x = inputs()
    with make_group(checkpoint, name="pipeline") as first:
        dataset = ray.data.from_items([{"x": row} for row in x])
        done = dataset.map_batches(
            batch_class(), fn_constructor_args=("pipeline",), concurrency=1, batch_size=4, num_cpus=1
        )
        rows = done.take_all()
        assert first.forward(torch.from_numpy(x)).shape == (ROWS, 4)
    assert len(rows) == ROWS
    for row in rows:
        torch.testing.assert_close(torch.tensor(row["y"]), reference(torch.tensor(row["x"])))


def test_an_asyncio_actor_in_a_placement_group_awaits_calls_and_outlives_a_cancelled_one(
    cluster: None, checkpoint: Path, reference: nn.Module
) -> None:
    """As a Serve replica and as a Tune trial: it owns one CPU that captures what it starts, and two ranks beside it.

    A call that waits leaves the loop free: all requests wait at a time. Ranks that were captured would not be placed.
    When a task is cancelled (Serve does it when a client goes away), Ray cancels what it began: not the group's calls.
    """
    trial = placement_group([{"CPU": 1}])
    ray.get(trial.ready(), timeout=30)
    strategy = PlacementGroupSchedulingStrategy(trial, placement_group_capture_child_tasks=True)
    options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": strategy}
    replica: Any = ray.remote(**options)(async_class()).remote(make_mlp(), str(checkpoint))
    parts = torch.from_numpy(inputs()).split(4)
    try:
        answers, most = ray.get(replica.answer_all.remote(parts), timeout=60)
        cancelled = replica.wait.remote(1.0)
        ray.wait([cancelled], timeout=0.5)
        ray.cancel(cancelled)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(cancelled, timeout=60)
        answers.append(ray.get(replica.answer.remote(parts[0]), timeout=60))
    finally:
        ray.kill(replica)
        remove_placement_group(trial)
    assert most == len(parts)
    for part, answer in zip([*parts, parts[0]], answers, strict=True):
        torch.testing.assert_close(answer, reference(part))


@pytest.mark.parametrize("num_bundles", [1, 2])
def test_a_lack_of_room_beside_the_placement_group_of_the_owner_names_it_where_two_ranks_fit(
    cluster: None, checkpoint: Path, num_bundles: int
) -> None:
    """As a Ray Tune trial that has reserved the ranks' room, and all that the cluster has, but does not say so."""
    trial = placement_group([{"CPU": free_cpus() / num_bundles}] * num_bundles)
    strategy = PlacementGroupSchedulingStrategy(trial, placement_group_capture_child_tasks=True)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
    timeouts = Timeouts(place_s=1.0)
    try:
        ray.get(trial.ready(), timeout=30)
        replica: Any = ray.remote(**options)(async_class()).remote(make_mlp(), str(checkpoint), timeouts=timeouts)
        with pytest.raises(ray.exceptions.ActorDiedError, match="were not placed within 1 s; busy") as raised:
            ray.get(replica.answer_all.remote([]), timeout=60)
        hint = "has 2 bundles: Placement(placement_group=ray.util.get_current_placement_group())"
        assert (hint in str(raised.value)) == (num_bundles == 2)
        assert ("Placement(placement_group=" in str(raised.value)) == (num_bundles == 2)
    finally:
        remove_placement_group(trial)


def test_a_lack_of_room_in_the_given_placement_group_is_named(cluster: None, checkpoint: Path) -> None:
    """As that of a Ray Tune trial whose function sits in the first bundle and takes its CPU."""
    trial = placement_group([{"CPU": 1}] * 2)
    ray.get(trial.ready(), timeout=30)
    strategy = PlacementGroupSchedulingStrategy(trial, placement_group_bundle_index=0)
    options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": strategy}
    user: Any = ray.remote(**options)(type("User", (), {"ping": lambda self: None})).remote()
    ray.get(user.ping.remote(), timeout=60)
    placed = {"placement": Placement(placement_group=trial), "timeouts": Timeouts(start_s=8.0)}
    try:
        with pytest.raises(CallTimeoutError, match="another actor or task may use its bundles"):
            make_group(checkpoint, world_size=2, **placed)
    finally:
        ray.kill(user)
        remove_placement_group(trial)
