"""Room on the cluster: what is short is said, what is given is kept, ranks are numbered by node and GPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from safetensors.torch import save_file

from raysharding import CheckpointError, Placement, PlacementError, PlanError, ShardedModelGroup, Timeouts
from raysharding.group.cluster import ask_nodes, choose_ranks, cluster_cpus, placement, reserve, wait_placed
from raysharding.group.cluster.placement import choose_num_threads
from raysharding.group.launch.spec import GroupSpec
from tests import forking, programs
from tests.clock import now
from tests.group.conftest import NUM_CPUS, make_group, make_mlp
from tests.group.standing import Driver, standing_cluster

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("nothing_left")


def test_an_infeasible_group_is_refused_at_once_with_need_against_have(checkpoint: Path) -> None:
    """Nothing adds nodes to a cluster that `ray.init()` started."""
    begun = now()
    with pytest.raises(PlacementError) as caught:
        make_group(checkpoint, world_size=3, placement=Placement(cpus_per_rank=5))
    assert now() - begun < 30
    message = str(caught.value)
    first = "3 ranks of 5 CPU each cannot be placed; infeasible: even when idle, the cluster has space for 1 ranks; "
    assert message.splitlines()[0].startswith(first)
    assert f"of {NUM_CPUS} CPU" in message
    assert "space for 1 ranks" in message
    assert caught.value.need == {"CPU": 5.0}
    assert len(caught.value.have) == 1


def test_a_busy_cluster_is_not_called_infeasible(checkpoint: Path) -> None:
    """And labels that no node carries are shown."""
    second = Timeouts(place_s=1)
    squatter = placement_group([{"CPU": 5}])
    assert squatter.wait(20)
    try:
        with pytest.raises(PlacementError, match="busy: when idle, the cluster has space for 2 ranks"):
            make_group(checkpoint, placement=Placement(cpus_per_rank=4), timeouts=second)
        with pytest.raises(PlacementError, match=r"infeasible(.|\n)*its labels do not match"):
            make_group(checkpoint, placement=Placement(labels={"zone": "nowhere"}), timeouts=second)
    finally:
        remove_placement_group(squatter)


def test_bundles_that_are_placed_are_seen_after_the_deadline() -> None:
    """Ray answers a wait of no time wrong once in five."""
    reservation = reserve(2, "cpu", Placement(), "late")
    try:
        assert reservation.placement_group.wait(20)
        for _ in range(20):
            wait_placed(reservation, 0.0)
    finally:
        reservation.release()


@pytest.mark.full
def test_a_log_says_for_what_it_waits(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every 10 s, and not where the program asked for no progress."""
    squatter = placement_group([{"CPU": 3}])
    assert squatter.wait(20)
    options: dict[str, Any] = {"placement": Placement(cpus_per_rank=4), "timeouts": Timeouts(place_s=12)}
    try:
        with pytest.raises(PlacementError):
            make_group(checkpoint, **options)
        # One rank fits, or none where another group of these tests is still up.
        line = r"^raysharding: waiting for [12] of 2 ranks of 4 CPU each, 1[01] s$"
        assert re.search(line, capfd.readouterr().err, re.MULTILINE)
        with pytest.raises(PlacementError):
            make_group(checkpoint, **options, progress=False)
        assert "waiting for" not in capfd.readouterr().err
    finally:
        remove_placement_group(squatter)


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


def test_gpus_that_the_cluster_has_not_are_refused_at_once(checkpoint: Path) -> None:
    waits, begun = Timeouts(place_s=60), now()
    with pytest.raises(PlacementError, match=r'infeasible: .* for 0 ranks; .*; with device="cpu" ranks need') as caught:
        ShardedModelGroup.from_checkpoint(checkpoint, model=make_mlp(), world_size=2, device="cuda", timeouts=waits)
    assert now() - begun < 30
    assert caught.value.need == {"CPU": 1.0, "GPU": 1.0}
    assert [node["GPU"] for node in caught.value.have.values()] == [0.0]


CHOICES = """
import json, re, sys
from pathlib import Path
import ray
from examples import quickstart
from raysharding import Placement, PlacementError, ShardedModelGroup
from raysharding.group.cluster import ask_nodes, choose_ranks, cluster_cpus, cluster_gpus
from tests.forking import runtime_env
from tests.group.conftest import make_mlp

ray.init("local", num_cpus=9, num_gpus=int(sys.argv[1]), include_dashboard=False, runtime_env=runtime_env())
(line,) = re.findall(r"^ *world_size = (.*)$", Path("examples/quickstart.py").read_text(), re.MULTILINE)
found = {
    name: choose_ranks(None, given, Placement(), cluster_gpus(), cluster_cpus())
    for name, given in {"default": None, "quickstart": eval(line, {**vars(quickstart), "device": None})}.items()
}
for options in (dict(world_size=None), dict(world_size=int(sys.argv[1]) + 1, device="cuda")):
    try:
        with ShardedModelGroup.from_checkpoint(sys.argv[2], model=make_mlp(), **options) as group:
            found[str(options["world_size"])] = f"{group.world_size} ranks on {group.ranks[0].device}"
    except Exception as error:
        found[str(options["world_size"])] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.mark.usefixtures("worker_python")
@pytest.mark.full
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_what_a_cluster_with_so_many_gpus_gets(num_gpus: int, checkpoint: Path) -> None:
    done = programs.run(CHOICES, str(num_gpus), str(checkpoint))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["default"] == ["cuda", num_gpus]
    assert found["quickstart"] == ["cuda", min(num_gpus, 4)]
    # The GPUs are there for Ray, but not for this machine's torch.
    assert "knows no GPU" in found["None"]
    assert f"PlacementError: {num_gpus + 1} ranks of 1 CPU, 1 GPU each cannot be" in found[str(num_gpus + 1)]


NODES = """
import json, time
import ray
from ray.cluster_utils import Cluster
from raysharding import Placement, PlacementError
from raysharding.group.cluster import reserve, wait_placed
from raysharding.group.cluster.ray_internals import may_grow

def reserved(world_size, place_s):
    begun = time.monotonic()
    try:
        reservation = reserve(world_size, "cuda", Placement(), "nodes")
        try:
            wait_placed(reservation, place_s)
        finally:
            reservation.release()
        return "placed"
    except PlacementError as error:
        assert time.monotonic() - begun < place_s + 1
        return str(error)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=4, num_gpus=1)
ray.init(cluster.address, log_to_driver=False)
until = time.monotonic() + 30
while may_grow() and time.monotonic() < until:  # until Ray has published what it sees
    time.sleep(0.1)
found = [reserved(3, 0), reserved(2, 30)]
cluster.remove_node(second)
while all(node["Alive"] for node in ray.nodes()):
    time.sleep(0.1)
print(json.dumps([*found, reserved(2, 1)]))
ray.shutdown()
cluster.shutdown()  # else Ray's file with its address stays, which later programs of this machine would wait for
"""


@pytest.mark.full
def test_a_node_that_was_lost_may_come_back() -> None:
    done = programs.run(NODES)
    assert done.returncode == 0, done.stderr
    refused, placed, waited = json.loads(done.stdout.splitlines()[-1])
    assert "cannot be placed; infeasible: even when idle, the cluster has space for 2 ranks" in refused
    assert placed == "placed"
    assert "were not placed within 1 s; infeasible" in waited
    assert 'with device="cpu" ranks need no GPU' in waited


PLACED_LATER = """
import contextlib, io
from ray.experimental.internal_kv import _internal_kv_get
until = now() + 30
while sys.argv[3] == "1" and not _internal_kv_get("__autoscaling_status") and now() < until:
    time.sleep(0.1)

def refused(**options):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            make(**options)
        except PlacementError as error:
            return str(error) + said.getvalue()

tell(errors=[refused(device="cuda", timeouts=Timeouts(place_s=1 if sys.argv[3] == "1" else 12))])
with make(placement=Placement(cpus_per_rank=2)) as group:
    tell(nodes=sorted({one.node_id for one in group.ranks} - {ray.get_runtime_context().get_node_id()}))
    tell(errors=[refused(placement=Placement(cpus_per_rank=2), timeouts=Timeouts(place_s=6))])
    # Resident, and without a call for longer than `idle_timeout_minutes` and the autoscaler's second.
    time.sleep(7 if sys.argv[3] == "2" else 0)
    tell(resident=sum(node["Alive"] for node in ray.nodes()))
until = now() + (40 if sys.argv[3] == "2" else 0)
while sum(node["Alive"] for node in ray.nodes()) > 1 and now() < until:
    time.sleep(0.2)
tell(left=sum(node["Alive"] for node in ray.nodes()))
"""
IDLE_S = 3
AUTOSCALED = """#!/bin/sh
for argument in "$@"; do case $argument in --port=*) port=${argument#--port=};; esac; done
sed "s/PORT/$port/" FOLDER/autoscaler.json > FOLDER/started.json
export AUTOSCALER_UPDATE_INTERVAL_S=1 RAY_FAKE_CLUSTER=1
exec env VERSION RAY "$@" --autoscaling-config=FOLDER/started.json
"""
VERSIONS = {
    1: "RAY_enable_autoscaler_v2=0",
    2: f"RAY_enable_autoscaler_v2=1 RAY_CLOUD_INSTANCE_ID={FAKE_HEAD_NODE_ID}",
}


@pytest.mark.full
@pytest.mark.usefixtures("worker_python")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_cluster_with_an_autoscaler_is_waited_for(version: int, checkpoint: Path, tmp_path: Path) -> None:
    nodes = {"worker": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 1}}
    autoscaler = BASE_READONLY_CONFIG | {
        "max_workers": 1,
        "idle_timeout_minutes": IDLE_S / 60 if version == 2 else 5,
        # Ray's fake nodes; by its own name, v2 looks for a file of defaults that Ray's wheel lacks.
        "provider": {
            "type": "external",
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": "127.0.0.1:PORT",
        },
        "available_node_types": {**BASE_READONLY_CONFIG["available_node_types"], **nodes},
    }
    (tmp_path / "autoscaler.json").write_text(json.dumps(autoscaler))
    program = AUTOSCALED.replace("FOLDER", str(tmp_path)).replace("RAY ", f"{Path(sys.executable).with_name('ray')} ")
    (tmp_path / "ray").write_text(program.replace("VERSION", VERSIONS[version]))
    (tmp_path / "ray").chmod(0o755)
    with ExitStack() as stack:
        with forking.ray_starts_with(tmp_path / "python"):  # the program `ray` beside it starts the cluster
            cluster = stack.enter_context(standing_cluster(num_cpus=1))
        driver = stack.enter_context(Driver(cluster, checkpoint, PLACED_LATER, str(version)))
        (refused,) = driver.hear()["errors"]
        if version == 1:  # which does not report what it cannot add
            assert "within 1 s; the autoscaler has not added the nodes: even when idle, the cluster has sp" in refused
            assert "infeasible" not in refused
        else:
            assert "within 12 s; infeasible: Ray's autoscaler reports that no nodes" in refused
            assert "waiting for 2 of 2 GPUs, 10 s; Ray's autoscaler reports that no nodes" in refused
        driver.hear()  # the group's processes
        # The pending placement group made the autoscaler add a node.
        assert len(driver.hear()["nodes"]) == 1
        # What others hold is no reason to call a group infeasible, though v2 reports it so.
        assert "within 6 s; busy: when idle, the cluster has space for 2 ranks" in driver.hear()["errors"][0]
        # A resident group keeps its node, and pays for it, until it is shut down; then the node is let go.
        assert driver.hear()["resident"] == 2
        assert driver.hear()["left"] == (1 if version == 2 else 2)


@pytest.mark.usefixtures("cluster")
def test_ranks_on_cpus_are_counted_and_told(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "GPU" not in ray.cluster_resources()
    with make_group(checkpoint, world_size=None) as group:
        assert group.world_size == 2
    told = f"raysharding: 2 ranks on CPUs, since world_size is not given and the largest node has {NUM_CPUS} CPUs\n"
    assert told in capfd.readouterr().err
    one = Placement(cpus_per_rank=NUM_CPUS)
    assert choose_ranks(None, None, one, 0, cluster_cpus()) == ("cpu", 1)
    assert choose_ranks("cpu", None, Placement(), 4, [1.0, 1.0]) == ("cpu", 1)
    assert choose_ranks("cpu", None, Placement(), 4, [1.0, 2.0]) == ("cpu", 2)
    assert choose_ranks(None, None, Placement(), 4, [1.0, 2.0]) == ("cuda", 4)


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_chosen_is_asked_for(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no GPU is available: give world_size"):
        ShardedModelGroup.from_checkpoint(checkpoint, model=make_mlp(), device="cuda")
    with pytest.raises(ValueError, match="world_size=0"):
        make_group(checkpoint, world_size=0)


def test_a_path_that_no_node_sees_fails_before_anything_is_placed(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="on the driver and on the nodes that answered"):
        make_group(checkpoint.with_name("nothing.safetensors"))


@pytest.mark.usefixtures("cluster")
def test_a_node_that_is_gone_does_not_hide_another_that_answers() -> None:
    def answer(after_s: float) -> int:
        time.sleep(after_s)
        return 7 if after_s else os._exit(1)

    own, gone = ray.get_runtime_context().get_node_id(), "e" * 56
    (first, error), answered = ask_nodes(answer, {gone: 0.0, own: 1.0}, 30)
    assert first == gone
    assert isinstance(error, ray.exceptions.RayError)
    assert answered == (own, 7)
    ((_, crashed),) = ask_nodes(answer, {own: 0.0}, 30)
    assert "died" in str(crashed)
    ((_, late),) = ask_nodes(answer, {own: 30.0}, 0.2)
    assert isinstance(late, ray.exceptions.GetTimeoutError)


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


def misfit(folder: Path) -> str:
    """Write a checkpoint that lacks tensors of the model that its config.json names."""
    save_file({"classifier.weight": torch.zeros(2, 8)}, folder / "model.safetensors")
    fields = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 8, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.usefixtures("cluster")
def test_a_model_that_does_not_fit_waits_neither_for_actors_nor_for_room(tmp_path: Path) -> None:
    squatter = placement_group([{"CPU": NUM_CPUS - 3}])
    assert squatter.wait(20)
    try:
        for cpus_per_rank in (1.0, 2.0):
            options: dict[str, Any] = {
                "placement": Placement(cpus_per_rank=cpus_per_rank),
                "timeouts": Timeouts(place_s=2),
            }
            with pytest.raises(PlanError, match="missing from the checkpoint"):
                ShardedModelGroup.from_checkpoint(misfit(tmp_path), world_size=3, device="cpu", **options)
    finally:
        remove_placement_group(squatter)


def test_what_the_driver_can_see_is_refused_before_ray_is_started(tmp_path: Path) -> None:
    alone = os.environ | {"RAY_ADDRESS": "local"}  # another cluster of the machine would be joined
    done = programs.run(BEFORE_RAY, misfit(tmp_path), environment=alone)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("org/llama", "llama"),
        ("/data/llama/", "llama"),
        ("s3://bucket/llama/model.safetensors.index.json", "llama"),
        ("hf://org/llama@0123abcd", "llama"),
        ("/cache/models--org--llama/snapshots/0123abcd", "llama"),
        ("model.safetensors", "model.safetensors"),
    ],
)
def test_the_short_name_of_a_model(checkpoint: str, name: str) -> None:
    assert GroupSpec(checkpoint).short_name == name


@pytest.mark.parametrize(
    ("gpus_per_rank", "on_a_gpu"),
    [(1, 1), (0.6, 1), (0.5, 2), (0.4, 2), (1 / 3, 3), (0.3, 3), (0.1, 10), (0.0001, 10**4)],
)
def test_ranks_that_share_gpus_are_counted_as_ray_does(gpus_per_rank: float, on_a_gpu: int) -> None:
    """Gpu by gpu: no rank has parts of two."""
    shared = Placement(gpus_per_rank=gpus_per_rank, cpus_per_rank=0)
    assert choose_ranks("cuda", None, shared, 3, [1.0]) == ("cuda", 3 * on_a_gpu)
    need = placement.rank_need("cuda", shared)
    assert need == {"GPU": gpus_per_rank}
    assert placement.ranks_that_fit({"CPU": 1.0, "GPU": 3.0}, need) == 3 * on_a_gpu
    assert placement.ranks_that_fit({"CPU": 1.0, "GPU": 0.0}, need) == 0


def test_ten_ranks_of_a_tenth_of_a_cpu_fit_one() -> None:
    assert placement.ranks_that_fit({"CPU": 1.0}, {"CPU": 0.1}) == 10


def test_a_part_of_a_gpu_is_refused_where_ranks_were_asked_to_run_on_cpus() -> None:
    shared = Placement(gpus_per_rank=0.5)
    with pytest.raises(ValueError, match=r"gpus_per_rank=0\.5\) with device='cpu': ranks on CPUs reserve no GPU"):
        choose_ranks("cpu", 2, shared, 4, [8.0])
    # The same program on a machine without GPUs.
    assert choose_ranks(None, 2, shared, 0, [8.0]) == ("cpu", 2)
