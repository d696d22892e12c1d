"""Preflight and doctor: what is wrong with nodes and links is an error before bytes move, and names them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import nn

from raysharding import GroupBrokenError, Placement, PreflightError, ShardedModelGroup
from raysharding.cli import main
from raysharding.distributed.footprint import MemoryNeed, Need
from raysharding.distributed.transfer.memory import available_bytes
from raysharding.group.cluster.nodes import NodeFacts, facts_here
from raysharding.group.launch import preflight as preflight_run
from raysharding.group.launch.preflight import (
    Preflight,
    check_builds,
    check_interfaces,
    check_memory,
    check_security,
    check_versions,
)
from raysharding.group.ranks import RankInfo
from raysharding.units import MIB
from tests import programs
from tests.clock import now
from tests.group.conftest import make_group

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "raysharding": "0.1.0", "safetensors": "0.8.0"}
NODE = NodeFacts("10.0.0.1", VERSIONS, "eth0", None, has_token_auth=True, available_bytes=1 << 30)


def test_a_healthy_group_raises_no_alarm(group: ShardedModelGroup) -> None:
    report = group.preflight_report
    assert report is not None
    assert report.findings == ()
    (node,) = report.nodes
    assert node.node_ip == group.ranks[0].node_ip
    assert set(node.versions) >= {"python", "torch", "ray", "raysharding"}
    assert report.link is not None
    assert 0 < report.link.latency_s < 1
    assert report.seconds < 5  # 0.05 s where the machine is idle
    assert "nothing is wrong" in repr(report)


@pytest.mark.usefixtures("cluster", "nothing_left")
def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    rows = 4 * available_bytes() // (1 << 20)
    header = json.dumps({"weight": {"dtype": "U8", "shape": [rows, 1 << 20], "data_offsets": [0, rows << 20]}})
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (rows << 20))  # a hole: no disk holds it
    with pytest.raises(PreflightError, match=r"memory: host memory of ranks 0, 1 on node .* short by") as caught:
        make_group(tmp_path, model=one_tensor(rows))
    assert len(caught.value.problems) == 1
    assert "spread the ranks over more nodes" in str(caught.value)


def one_tensor(rows: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torch
        from torch import nn

        module = nn.Module()
        empty = torch.empty(rows, 1 << 20, dtype=torch.uint8, device="meta")
        module.weight = nn.Parameter(empty, requires_grad=False)
        return module

    return build


@pytest.mark.usefixtures("cluster", "nothing_left")
def test_other_versions_on_the_ranks_are_all_named(checkpoint: Path, tmp_path: Path) -> None:
    for package in ("torch", "safetensors"):
        # What pip writes, of other versions, before the real ones on the ranks' path.
        (tmp_path / f"{package}-9.9.9.dist-info").mkdir()
        written = f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9.9\n"
        (tmp_path / f"{package}-9.9.9.dist-info" / "METADATA").write_text(written)
    path = os.pathsep.join((str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    begun = now()
    with pytest.raises(PreflightError, match="preflight found 1 errors") as caught:
        make_group(checkpoint, placement=Placement(runtime_env={"env_vars": {"PYTHONPATH": path}}))
    error, warning = caught.value.problems
    ip = ray.util.get_node_ip_address()
    assert error.startswith("error: versions: torch differs: 2.13.0 on the driver; 9.9.9 on " + ip)
    assert warning.startswith("warning: versions: safetensors differs: ")
    assert now() - begun < 100  # the actors' start; the comparison takes no time


@pytest.mark.usefixtures("cluster", "nothing_left")
def test_a_rank_that_does_not_come_to_the_first_collective_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_run, "LINK_S", 2.0)
    with make_group(checkpoint, preflight=False) as group:
        assert group.preflight_report is None
        Preflight(group._client).link()  # the control
        os.kill(group.ranks[1].pid, signal.SIGSTOP)
        begun = now()
        with pytest.raises(PreflightError, match="a small all-reduce did not end within 2 s") as caught:
            Preflight(group._client).link()
        assert now() - begun < 2.0 + 2.0
        assert any(problem.startswith("rank 1 (node ") and " hung" in problem for problem in caught.value.problems)
        with pytest.raises(GroupBrokenError):
            group.state_dict()


@pytest.mark.usefixtures("cluster", "nothing_left")
def test_the_doctor_finds_a_healthy_cluster_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port-range", "29700-29799"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"ports: rank 0's store listened at \S+:297\d\d\n", told)
    assert ray.util.get_node_ip_address() in told
    assert "broadcast of 61.04 MiB at " in told
    assert told.endswith("nothing is wrong\n")
    assert ray.is_initialized()  # it was connected before


TWO_NODES = """
import sys
import ray
from ray.cluster_utils import Cluster

from raysharding import Placement, PreflightError, ShardedModelGroup
from raysharding.group.launch.doctor import diagnose
from tests.forking import runtime_env

cluster = Cluster()
for ip in ("127.0.0.2", "127.0.0.3"):
    cluster.add_node(num_cpus=1, node_ip_address=ip)
ray.init(cluster.address, log_to_driver=False, runtime_env=runtime_env())
report = diagnose()
print(report)
def build():
    from torch import nn
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
try:
    ShardedModelGroup.from_checkpoint(sys.argv[1], model=build, world_size=2, device="cpu")
except PreflightError as error:
    print(f"PreflightError: {error}")
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.full
@pytest.mark.usefixtures("worker_python")
@pytest.mark.timeout(300)  # a cluster of its own: 30 s where the machine is idle
def test_a_cluster_over_loopback_addresses_is_no_cluster(checkpoint: Path) -> None:
    # Two raylets with addresses of their own, which are real, and which no other machine could reach.
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    done = programs.run(TWO_NODES, str(checkpoint), environment=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    for ip in ("127.0.0.2", "127.0.0.3"):
        what = f"error: interface: node {ip}: its address is the loopback interface's (lo), which no other node"
        assert done.stdout.count(what) == 2, done.stdout
    assert "PreflightError: preflight found 2 errors" in done.stdout
    assert done.stdout.count("warning: security: Ray runs without token authentication on 127.0.0.2, 127.0.0.3") == 2


def test_builds_and_micro_versions_may_differ() -> None:
    other = replace(NODE, node_ip="10.0.0.2", versions=VERSIONS | {"torch": "2.13.0+cu128", "python": "3.11.9"})
    assert not [*check_versions(VERSIONS, [NODE, other])]
    older = replace(other, versions=VERSIONS | {"python": "3.12.1"})
    (finding,) = check_versions(VERSIONS, [NODE, older])
    assert finding.is_error
    assert finding.message.startswith("python differs: 3.11 on the driver, 10.0.0.1; 3.12 on 10.0.0.2; install one")
    (finding,) = check_versions(VERSIONS, [replace(NODE, versions={**VERSIONS, "transformers": "5.23.0"})])
    assert not finding.is_error
    assert "transformers differs: absent on the driver; 5.23.0 on 10.0.0.1" in finding.message


def test_a_build_for_cpus_is_found_before_ranks_on_gpus_meet() -> None:
    nodes = [NODE, replace(NODE, node_ip="10.0.0.2", versions=VERSIONS | {"torch": "2.13.0+cu128"})]
    (finding,) = check_builds("cuda:0", nodes)
    assert finding.is_error
    assert finding.message == (
        "torch 2.13.0+cpu on node 10.0.0.1 knows no GPU: install torch's build for the GPUs there, or give device='cpu'"
    )
    assert not [*check_builds("cpu", nodes), *check_builds("sim:0", nodes)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chosen_interface": "lo"}, "node 10.0.0.2: GLOO_SOCKET_IFNAME=lo is the loopback interface"),
        ({"interface": "lo"}, "node 10.0.0.2: its address is the loopback interface's"),
        ({"interface": None}, "node 10.0.0.2: no network interface owns that address"),
        ({"interface": None, "chosen_interface": "eth1"}, None),
        ({}, None),
    ],
)
def test_an_interface_that_leads_nowhere_is_named(changed: dict[str, Any], message: str | None) -> None:
    other = replace(NODE, node_ip="10.0.0.2", **changed)
    found = list(check_interfaces([NODE, other]))
    assert [finding.is_error for finding in found] == [True] * (message is not None)
    assert message is None or found[0].message.startswith(message)
    assert not list(check_interfaces([other, other]))  # one node needs none


def test_a_cluster_without_a_token_is_open_and_its_dashboard_too() -> None:
    assert not list(check_security([NODE], "10.0.0.1:8265"))
    nodes = [NODE, replace(NODE, node_ip="10.0.0.2", has_token_auth=False)]
    (finding,) = check_security(nodes, "127.0.0.1:8265")
    assert not finding.is_error
    assert finding.message.startswith("Ray runs without token authentication on 10.0.0.2: on every node run")
    told = [finding.message for finding in check_security(nodes, "10.0.0.1:8265")]
    assert told[1].startswith("the dashboard at 10.0.0.1:8265 accepts jobs from anyone who reaches it: use a token")
    assert len([*check_security(nodes, "")]) == 1


def test_memory_is_compared_node_by_node_and_gpu_by_gpu() -> None:
    ranks = [
        RankInfo(rank, f"node{rank // 2}", f"10.0.0.{rank // 2}", 1, rank % 2, f"cuda:{rank % 2}") for rank in range(4)
    ]
    host_need, gpu_need = Need(100, 0, 1000), Need(10, 5, 20)
    fine = MemoryNeed(host_need, gpu_need)
    assert list(check_memory(ranks, [fine] * 4)) == []
    needs = [
        fine,
        fine,
        MemoryNeed(host_need._replace(load=950), gpu_need),
        MemoryNeed(host_need, gpu_need._replace(load=18)),
    ]
    host, training = check_memory(ranks, needs)
    assert host.is_error
    assert host.message.startswith(
        "host memory of ranks 2, 3 on node 10.0.0.1: 1.03 KiB are needed for shards and load"
    )
    assert not training.is_error
    assert training.message.startswith("GPU memory of rank 3 (cuda:1 of node 10.0.0.1): 23 B are needed with gradients")


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    ranks = [RankInfo(rank, "node", "10.0.0.1", 1, rank, f"cuda:{rank // 2}") for rank in range(4)]
    who = "GPU memory of ranks 0, 1 (together on cuda:0 of node 10.0.0.1): "
    for load, training, is_error, said in (
        (9, 5, False, "28 B are needed with gradients and optimizer state, 19 B are free"),
        (10, 0, True, "20 B are needed for shards and load, 19 B are free: short by 1 B"),
    ):
        on_gpus = [Need(load, training, free) for free in (20, 19)] + [Need(load if is_error else 4, training, 20)] * 2
        (finding,) = check_memory(ranks, [MemoryNeed(Need(0, 0, 1000), one) for one in on_gpus])
        assert finding.is_error is is_error
        assert finding.message.startswith(f"{who}{said}")
        assert "Placement(gpus_per_rank=1)" in finding.message


def test_gpus_that_a_mask_hides_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/bash\nfree=(10 11 12 13)\n"
        'case "${!#}" in --id=*) ids=${!#};; *) ids=0,1,2,3;; esac\n'
        "ids=${ids#--id=}\n"
        'for id in ${ids//,/ }; do echo "${free[id]}"; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = {}
    for mask in (None, "1,3", ""):
        if mask is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        found[mask] = facts_here("127.0.0.1").gpu_free_bytes
    assert found == {None: (10 * MIB, 11 * MIB, 12 * MIB, 13 * MIB), "1,3": (11 * MIB, 13 * MIB), "": ()}
