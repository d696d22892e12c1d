"""Room on the cluster: what is short is said, what is given is kept, ranks are numbered by node and GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from raysharding import CheckpointError, Placement, PlacementError, Timeouts
from raysharding.group.actor import ActorInfo
from raysharding.group.locate import open_anywhere
from raysharding.group.start import rank_order
from tests.group.conftest import NUM_CPUS, make_group

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_an_infeasible_group_says_need_against_have(checkpoint: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(PlacementError, match="infeasible") as caught:
        make_group(checkpoint, world_size=3, placement=Placement(cpus_per_rank=5), timeouts=Timeouts(place_s=1))
    assert time.monotonic() - begun < 5
    message = str(caught.value)
    assert "3 ranks of 5 CPU each were not placed within 1 s" in message
    assert f"of {NUM_CPUS} CPU" in message
    assert "room for 1 ranks" in message
    assert caught.value.need == {"CPU": 5.0}
    assert len(caught.value.have) == 1


def test_a_busy_cluster_is_not_called_infeasible(checkpoint: Path) -> None:
    squatter = placement_group([{"CPU": 5}])
    assert squatter.wait(20)
    try:
        with pytest.raises(PlacementError, match="busy: idle, the cluster has room for 2 ranks"):
            make_group(checkpoint, placement=Placement(cpus_per_rank=4), timeouts=Timeouts(place_s=1))
    finally:
        remove_placement_group(squatter)


def test_labels_that_no_node_carries_are_shown(checkpoint: Path) -> None:
    placement = Placement(labels={"zone": "nowhere"})
    with pytest.raises(PlacementError, match="its labels do not match") as caught:
        make_group(checkpoint, placement=placement, timeouts=Timeouts(place_s=1))
    assert "infeasible" in str(caught.value)


def test_a_given_placement_group_is_used_and_kept(checkpoint: Path) -> None:
    given = placement_group([{"CPU": 1}])
    assert given.wait(20)
    try:
        with pytest.raises(ValueError, match="has 1 bundles, but world_size=2"):
            make_group(checkpoint, placement=Placement(placement_group=given))
        with pytest.raises(ValueError, match="bundle 0 of the placement group holds 1 CPU, a rank needs 2 CPU"):
            make_group(checkpoint, world_size=1, placement=Placement(placement_group=given, cpus_per_rank=2))
        with make_group(checkpoint, world_size=1, placement=Placement(placement_group=given)) as group:
            assert group.call(lambda: 5) == [5]
        assert placement_group_table(given)["state"] == "CREATED"
    finally:
        remove_placement_group(given)


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_chosen_is_asked_for(checkpoint: Path) -> None:
    assert "GPU" not in ray.cluster_resources()
    with pytest.raises(ValueError, match="give world_size"):
        make_group(checkpoint, world_size=None)
    with pytest.raises(ValueError, match="world_size=0"):
        make_group(checkpoint, world_size=0)


def test_a_path_that_no_node_sees_fails_before_anything_is_placed(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="on the driver or on any node"):
        make_group(checkpoint.with_name("nothing.safetensors"))


def test_a_path_that_only_a_node_sees_is_opened_there(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = open_anywhere(checkpoint, start_s=30)
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # in the driver; the nodes' processes see it
    assert open_anywhere(checkpoint, start_s=30) == here


def test_ranks_go_by_node_then_gpu_and_rank_0_sees_the_checkpoint() -> None:
    def actor(node: str, gpu: str, sees: bool) -> ActorInfo:
        return ActorInfo(node_id=node, node_ip=f"10.0.0.{node}", pid=1, gpu_ids=(gpu,), sees_checkpoint=sees)

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
