"""The process that made a group dies: an actor, a task, a driver whose group is not loaded yet. All is free in 10 s."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysharding import Placement
from tests.clock import now, wait_until
from tests.controllers import controller_pids, new_controller
from tests.group.conftest import make_group, make_mlp, placement_groups, rank_processes

pytestmark = pytest.mark.usefixtures("nothing_left")

RELEASE_S = 10.0


def owner_class() -> Any:
    """An actor that makes groups. Local, so that it pickles by value: workers need not import the tests."""

    class Owner:
        def make(self, checkpoint: str, options: dict[str, Any]) -> list[int]:
            from raysharding import ShardedModelGroup

            self.group = ShardedModelGroup.from_checkpoint(checkpoint, device="cpu", world_size=2, **options)
            return [os.getpid(), *(one.pid for one in self.group.ranks)]

        def own(self, cls: Any, checkpoint: str, options: dict[str, Any]) -> list[int]:
            self.inner = ray.remote(num_cpus=0)(cls).remote()
            return [os.getpid(), *ray.get(self.inner.make.remote(checkpoint, options))]

    return Owner


def make_and_wait(checkpoint: str, options: dict[str, Any], told: str) -> None:
    """A task that makes a group, and tells the pids."""
    from raysharding import ShardedModelGroup

    group = ShardedModelGroup.from_checkpoint(checkpoint, device="cpu", world_size=2, **options)
    Path(told + "~").write_text(" ".join(map(str, [os.getpid(), *(one.pid for one in group.ranks)])))
    os.rename(told + "~", told)
    time.sleep(1000)


def held() -> set[Any]:
    """What groups hold: processes, placement groups, names."""
    return {*rank_processes(), *controller_pids(), *placement_groups(), *names()}


@pytest.fixture
def wait_free(cluster: None) -> Callable[[float], None]:
    """Wait until all is free that is not held now, within 10 s of a time."""
    before = held()

    def wait(since: float) -> None:
        while left := held() - before:
            assert now() - since < RELEASE_S, left
            time.sleep(0.05)
        print(f"free after {now() - since:.2f} s")

    return wait


def states() -> set[str]:
    return {entry["state"] for entry in placement_group_table().values()}


def names() -> set[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in listed if one["namespace"] == "raysharding"}


@pytest.fixture
def owner(cluster: None) -> Any:
    return ray.remote(num_cpus=0)(owner_class()).remote()


def test_what_ray_refuses_is_the_same_error_as_of_a_group_without_a_name(cluster: None, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"^Invalid label selector .*`a b`"):
        make_group(checkpoint, name="llama", placement=Placement(labels={"a b": "x"}))


@pytest.mark.parametrize("how", ["with its ranks", "ray.kill", pytest.param("with its owner", marks=pytest.mark.full)])
def test_an_actor_that_owns_a_group(owner: Any, checkpoint: Path, wait_free: Callable[[float], None], how: str) -> None:
    options = {"model": make_mlp()}
    if how == "with its owner":
        pids = ray.get(owner.own.remote(owner_class(), str(checkpoint), options))
    else:
        pids = ray.get(owner.make.remote(str(checkpoint), options))
    since = now()
    if how == "with its ranks":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(owner)
    wait_free(since)


@pytest.mark.full
def test_the_controller_that_ray_starts_anew_ends_where_the_owner_is_gone(
    owner: Any, checkpoint: Path, wait_free: Callable[[float], None]
) -> None:
    others = controller_pids()
    pids = ray.get(owner.make.remote(str(checkpoint), {"model": make_mlp()}))
    killed = controller_pids() - others
    since = now()
    for pid in (pids[0], *killed):
        os.kill(pid, signal.SIGKILL)
    new_controller(others | killed)
    wait_free(since)


@pytest.mark.full
def test_a_task_that_owns_a_group(checkpoint: Path, tmp_path: Path, wait_free: Callable[[float], None]) -> None:
    told = tmp_path / "pids"
    task = ray.remote(num_cpus=0, max_retries=0)(make_and_wait)
    made = task.remote(str(checkpoint), {"model": make_mlp()}, str(told))
    wait_until(told.exists, 60.0, "the task has told its pids")
    since = now()
    os.kill(int(told.read_text().split()[0]), signal.SIGKILL)
    wait_free(since)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(made)


@pytest.mark.full
def test_an_owner_that_dies_before_its_named_group_is_loaded(
    checkpoint: Path, tmp_path: Path, wait_free: Callable[[float], None]
) -> None:
    """While it waits for room, while its controller starts, and its ranks, and while they build the model."""

    def build_for_ever() -> Any:
        Path(str(tmp_path / "builds")).touch()
        time.sleep(1000)

    owners = [ray.remote(num_cpus=0)(owner_class()).remote() for _ in range(4)]
    pids = ray.get([one.__ray_call__.remote(lambda _: os.getpid()) for one in owners])
    asked: dict[str, dict[str, Any]] = {
        "builds": {"model": build_for_ever},
        "waits": {"placement": Placement(strategy="STRICT_SPREAD")},
        "starts ranks": {},
        "starts": {},
    }
    others = rank_processes()
    seen: dict[str, Callable[[], bool]] = {
        "builds": (tmp_path / "builds").exists,
        "waits": lambda: "PENDING" in states(),
        "starts ranks": lambda: not rank_processes() <= others,
        "starts": lambda: "starts" in names(),
    }
    for one, pid, (name, options) in zip(owners, pids, asked.items(), strict=True):
        one.make.remote(str(checkpoint), {"name": name, "model": make_mlp(), **options})
        wait_until(seen[name], 60.0, name, 0.005)
        since = now()
        os.kill(pid, signal.SIGKILL)
        wait_free(since)


@pytest.mark.full
def test_an_owner_that_dies_while_its_ranks_cannot_start(
    owner: Any, checkpoint: Path, wait_free: Callable[[float], None]
) -> None:
    """Another actor has a bundle of the placement group; `Timeouts.start_s` is minutes away."""
    trial = placement_group([{"CPU": 1}] * 2)
    ray.get(trial.ready(), timeout=30)
    strategy = PlacementGroupSchedulingStrategy(trial, placement_group_bundle_index=0)
    user: Any = ray.remote(num_cpus=1, scheduling_strategy=strategy)(type("User", (), {"ping": lambda self: None}))
    used = user.remote()
    ray.get(used.ping.remote(), timeout=60)
    others = rank_processes() | controller_pids()
    try:
        owner.make.remote(str(checkpoint), {"model": make_mlp(), "placement": Placement(placement_group=trial)})
        until = now() + 60.0
        while rank_processes() <= others:
            assert now() < until
            time.sleep(0.005)
        time.sleep(0.5)
        since = now()
        ray.kill(owner)
        while not rank_processes() | controller_pids() <= others:
            assert now() - since < RELEASE_S
            time.sleep(0.05)
    finally:
        ray.kill(used)
        remove_placement_group(trial)
    wait_free(since)
