"""Room on the cluster: what is short is said, what is given is kept, ranks are numbered by node and GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from safetensors.torch import save_file

from raysharding import CheckpointError, GroupError, Placement, PlacementError, Timeouts
from raysharding.group.actors.actor import ActorInfo
from raysharding.group.cluster.nodes import replies
from raysharding.group.cluster.placement import choose_num_threads
from raysharding.group.launch.start_actors import probe, rank_order
from tests.clock import now
from tests.group.conftest import NUM_CPUS, make_group

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_an_infeasible_group_says_need_against_have(checkpoint: Path) -> None:
    begun = now()
    with pytest.raises(PlacementError, match="infeasible") as caught:
        make_group(checkpoint, world_size=3, placement=Placement(cpus_per_rank=5), timeouts=Timeouts(place_s=1))
    assert now() - begun < 5
    message = str(caught.value)
    assert "3 ranks of 5 CPU each were not placed within 1 s" in message
    assert f"of {NUM_CPUS} CPU" in message
    assert "space for 1 ranks" in message
    assert caught.value.need == {"CPU": 5.0}
    assert len(caught.value.have) == 1


def test_a_busy_cluster_is_not_called_infeasible(checkpoint: Path) -> None:
    squatter = placement_group([{"CPU": 5}])
    assert squatter.wait(20)
    try:
        with pytest.raises(PlacementError, match="busy: when idle, the cluster has space for 2 ranks"):
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
        with pytest.raises(ValueError, match="bundle 0 of the placement group holds 1 CPU, but a rank needs 2 CPU"):
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
    with pytest.raises(CheckpointError, match="on the driver and on the nodes that answered"):
        make_group(checkpoint.with_name("nothing.safetensors"))


def test_a_node_that_crashes_does_not_hide_another_that_answers() -> None:
    @ray.remote(max_retries=0, num_cpus=1)
    def answer(after_s: float) -> int:

        time.sleep(after_s)
        return 7 if after_s else os._exit(1)

    refs = {answer.remote(0.0): "10.0.0.1", answer.remote(1.0): "10.0.0.2"}
    (died, error), answered = replies(refs, 30)
    assert died == "10.0.0.1"
    assert "died" in str(error)
    assert answered == ("10.0.0.2", 7)


def test_an_actor_that_died_is_reported_while_another_still_starts() -> None:
    class Starts:
        def __init__(self, dies: bool) -> None:

            if dies:
                os._exit(1)
            time.sleep(100)

        def probe(self, path: None) -> None:
            """Never answers."""

    start = ray.remote(num_cpus=1)(Starts).remote
    actors = [start(False), start(True)]
    begun = now()
    try:
        with pytest.raises(GroupError, match="could not start") as caught:
            probe(actors, 60, None, lambda bundle: f"node of {bundle}")
        assert list(caught.value.failures) == [1]
        assert caught.value.failures[1].node_ip == "node of 1"
        assert now() - begun < 30
    finally:
        for actor in actors:
            ray.kill(actor)


@pytest.mark.usefixtures("cluster")
def test_threads_are_as_the_runtime_environment_says() -> None:
    assert choose_num_threads(Placement(cpus_per_rank=2.5)) == 2
    assert choose_num_threads(Placement(cpus_per_rank=0.5)) == 1
    assert choose_num_threads(Placement(runtime_env={"env_vars": {"OMP_NUM_THREADS": "3"}})) == 3


BEFORE_RAY = """
import json, sys, ray, torch
from raysharding import PlanError, ShardedModelGroup, Timeouts
from torch import nn

model, layer, SGD = sys.argv[1], nn.Linear(2, 2), torch.optim.SGD
cases = [
    (dict(), PlanError, "missing from the checkpoint"),
    (dict(model="AutoModelForCausalLMs"), PlanError, "not a transformers auto class"),
    (dict(model=3), ValueError, "model=3"),
    (dict(model=layer), ValueError, "model=Linear"),
    (dict(optimizer="adamw"), ValueError, "optimizer='adamw'"),
    (dict(optimizer=SGD(layer.parameters(), lr=1)), ValueError, "functools.partial(torch.optim.SGD"),
    (dict(optimizer=lambda parameters, lock=__import__("threading").Lock(): None), TypeError, "optimizer cannot be"),
    (dict(timeouts=30), ValueError, "give Timeouts(...)"),
    (dict(world_size="2"), ValueError, "world_size='2'"),
    (dict(world_size=0), ValueError, "world_size=0"),
    (dict(max_output_bytes="2GiB"), ValueError, "max_output_bytes='2GiB'"),
]
for options, error_type, words in cases:
    try:
        ShardedModelGroup.from_checkpoint(model, **{"world_size": 2, "device": "cpu", **options})
    except error_type as error:
        assert words in str(error), (options, str(error))
    else:
        raise AssertionError(options)
assert not ray.is_initialized()
"""


def test_what_the_driver_can_see_is_refused_before_ray_is_started(tmp_path: Path) -> None:
    save_file({"classifier.weight": torch.zeros(2, 8)}, tmp_path / "model.safetensors")
    fields = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 8, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", BEFORE_RAY, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


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
