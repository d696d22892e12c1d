"""Errors of actors that do not start, and of bundles that are not placed in time."""

from __future__ import annotations

import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysharding import CallTimeoutError, Placement, PlacementError, Timeouts
from raysharding.group.cluster import Lifetime, Reservation, reserve, wait_placed
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_actors import start_actors
from tests.conftest import NUM_CPUS

pytestmark = pytest.mark.usefixtures("cluster")


def test_an_actor_in_a_bundle_that_others_use_says_so() -> None:
    """Of a placement group that is the caller's."""

    class Other:
        def ready(self) -> None:
            pass

    need = {"CPU": 1.0}
    bundles = placement_group([need])
    taken = PlacementGroupSchedulingStrategy(bundles)
    other = ray.remote(num_cpus=1)(Other).options(scheduling_strategy=taken).remote()
    try:
        ray.get(other.ready.remote(), timeout=60)
        spec = GroupSpec(checkpoint="absent", timeouts=Timeouts(start_s=1.0))
        with pytest.raises(CallTimeoutError, match="free the given placement group: another actor or task may use"):
            start_actors(Reservation(bundles, need, is_ours=False), spec, 1, "cpu", ["absent"], None)
    finally:
        ray.kill(other)
        remove_placement_group(bundles)


def test_the_time_to_place_begins_with_the_reservation() -> None:
    """Not after the checks that are made meanwhile."""
    placement = Placement(cpus_per_rank=NUM_CPUS)
    squatter = placement_group([{"CPU": 1}])
    assert squatter.wait(20)
    reservation = reserve(1, "cpu", placement, Lifetime())
    try:
        with pytest.raises(PlacementError, match="not placed within 600 s"):
            wait_placed(reservation, 1, placement, 600.0, begun=time.monotonic() - 600.0)
    finally:
        reservation.release()
        remove_placement_group(squatter)
