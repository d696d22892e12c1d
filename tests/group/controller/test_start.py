"""Ranks' processes start in their bundles, are numbered by node and GPU, and those that do not start are named."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysharding import CallTimeoutError, GroupError, Placement
from raysharding.group import GroupState
from raysharding.group.cluster import Reservation
from raysharding.group.controller.start import probe, rank_order, start_ranks
from raysharding.group.messages import StartPlan
from raysharding.group.rank import CONCURRENCY_GROUPS, RankActor, Title
from raysharding.group.rank.actor import ActorInfo
from tests import programs
from tests.clock import now, wait_until
from tests.conftest import free_cpus, make_group, placement_groups

pytestmark = pytest.mark.usefixtures("nothing_left")


def plan_of(world_size: int, **options: Any) -> StartPlan:
    """A plan for CPU ranks."""
    fields: dict[str, Any] = {
        "actor_class": RankActor,
        "concurrency_groups": CONCURRENCY_GROUPS,
        "titles": tuple(Title("model", "group", bundle) for bundle in range(world_size)),
        "world_size": world_size,
        "device_type": "cpu",
        "placement": Placement(),
        "place_s": 30.0,
        "start_s": 60.0,
        "paths": (),
        "driver_node": "",
        "hub": None,
    }
    return StartPlan(**fields | options)


def test_an_actor_in_a_bundle_that_others_use_says_so() -> None:
    """Of a placement group that is the caller's."""

    class Other:
        def ready(self) -> None:
            pass

    need = {"CPU": 1.0}
    bundles = placement_group([need])
    given = Placement(placement_group=bundles)
    taken = PlacementGroupSchedulingStrategy(bundles)
    other = ray.remote(num_cpus=1)(Other).options(scheduling_strategy=taken).remote()
    try:
        ray.get(other.ready.remote(), timeout=60)
        with pytest.raises(CallTimeoutError, match="free the given placement group: another actor or task may use"):
            asyncio.run(start_ranks(plan_of(1, start_s=1.0), Reservation(bundles, 1, need, given)))
    finally:
        ray.kill(other)
        remove_placement_group(bundles)


class Placed(Reservation):
    """A reservation that asks Ray for nothing."""

    def node_ip(self, bundle: int) -> str:
        return f"node of {bundle}"


def test_an_actor_that_died_is_reported_while_another_still_starts() -> None:
    class Starts:
        def __init__(self, dies: bool) -> None:

            if dies:
                os._exit(1)
            time.sleep(100)

        def probe(self, paths: tuple[()]) -> None:
            """Never answers."""

    remote = ray.remote(num_cpus=1)(Starts).remote
    actors = [remote(False), remote(True)]
    begun = now()
    try:
        with pytest.raises(GroupError, match="could not start") as caught:
            asyncio.run(probe(actors, plan_of(2), Placed(None, 2, {}, Placement())))
        assert list(caught.value.failures) == [1]
        assert caught.value.failures[1].node_ip == "node of 1"
        assert now() - begun < 30
    finally:
        for actor in actors:
            ray.kill(actor)


def test_ranks_go_by_node_then_gpu_and_rank_0_sees_the_checkpoint() -> None:
    def actor(node: str, gpu: str, sees: bool) -> ActorInfo:
        return ActorInfo(
            node_id=node, node_ip=f"10.0.0.{node}", pid=1, gpu_ids=(gpu,), sees_checkpoint=sees, stacks_descriptor=3
        )

    infos = [
        actor("1", "10", False),
        actor("2", "1", True),
        actor("3", "1", True),
        actor("1", "9", False),
        actor("2", "0", True),
        actor("3", "0", True),
    ]
    assert rank_order(infos, driver_node="3") == [5, 2, 4, 1, 3, 0]
    assert rank_order(infos, driver_node="1") == [4, 1, 5, 2, 3, 0]


def test_an_interrupted_restart_waits_for_no_resources(checkpoint: Path) -> None:
    free = free_cpus()
    with make_group(checkpoint, placement=Placement(cpus_per_rank=free / 2)) as group:
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(GroupError):
            group.call(time.sleep, 60)
        wait_until(lambda: free_cpus() == free, 10, "the ranks' CPUs are free")
        squatter = placement_group([{"CPU": 2}])
        assert squatter.wait(20)
        others = placement_groups()
        try:
            restarting = threading.Thread(target=lambda: raised.append(stopped(group.restart)))
            raised: list[str] = []
            restarting.start()
            wait_until(lambda: placement_groups() - others, 10, "it waits for room")
            group.interrupt()
            restarting.join(10)
            assert "was stopped" in raised[0]
            assert group.state is GroupState.BROKEN
            wait_until(lambda: not placement_groups() - others, 10, "it waits no more")
        finally:
            remove_placement_group(squatter)
        assert group.restart().world_size == 2
        assert group.call(int) == [0, 0]


def stopped(restart: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as caught:
        restart()
    return str(caught.value)


SHARED = """
import asyncio, json
import ray
from raysharding import Placement
from raysharding.group.cluster import choose_ranks, cluster_cpus, cluster_gpus
from raysharding.group.controller.start import reserve_for, start_ranks
from ray.util.placement_group import placement_group
from tests.forking import runtime_env
from tests.group.controller.test_start import plan_of

ray.init("local", num_cpus=8, num_gpus=2, include_dashboard=False, runtime_env=runtime_env())

def started(gpus_per_rank, world_size, given=None):
    placement = Placement(gpus_per_rank=gpus_per_rank, cpus_per_rank=0.1, placement_group=given)
    kind, world_size = choose_ranks("cuda", world_size, placement, cluster_gpus(), cluster_cpus())
    plan = plan_of(world_size, device_type=kind, placement=placement)
    reservation = reserve_for(plan, "shared", print)
    members, numbered = asyncio.run(start_ranks(plan, reservation))
    return ([one.info.device for one in members], list(numbered.visible_gpus)), (members, reservation)

def ended(kept):
    for one in kept[0]:
        ray.kill(one.actor)
    kept[1].release()

found = {}
found["all"], kept = started(0.5, None)
ended(kept)
found["more than half first"], one = started(0.6, 2)
found["then less"], two = started(0.4, 2)
ended(one)
ended(two)
given = placement_group([{"CPU": 0.1, "GPU": 1 / 3}] * 3)
found["given"], _ = started(1 / 3, None, given)
small = placement_group([{"CPU": 0.1, "GPU": 0.25}])
try:
    started(0.5, 1, small)
except ValueError as error:
    found["small"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.usefixtures("worker_python")
def test_ranks_get_the_device_that_ray_gave_them() -> None:
    """Not that of their number on the node; the node's GPUs are seen once each, in order."""
    done = programs.run(SHARED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["all"] == [["cuda:0", "cuda:0", "cuda:1", "cuda:1"], ["0,1"] * 4]
    # Each group has a rank on each GPU: Ray fills one before the next, and two of 0.6 do not go on one.
    assert found["more than half first"] == found["then less"] == [["cuda:0", "cuda:1"], ["0,1"] * 2]
    devices, visible = found["given"]
    assert devices == ["cuda:0"] * 3
    assert set(visible) in ({"0"}, {"1"})
    assert "holds 0.1 CPU, 0.25 GPU, but a rank needs 0.1 CPU, 0.5 GPU: change the bundles" in found["small"]
