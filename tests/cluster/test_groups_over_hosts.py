"""The main job over three hosts: which interface, which order, where rank 0 is, and that the numbers are right."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cluster.local.hosts import Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import CopyReport, Loading, Placement, ShardedModelGroup, Timeouts
from raysharding.errors import CheckpointError
from raysharding.group.ranks import RankInfo
from tests.cluster import jobs
from tests.cluster.conftest import save_for
from tests.cluster.driver import Driver
from tests.controllers import controller_pids

# Ray's processes on three hosts take a machine of two cores half a minute to start.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ranks(driver: Driver, checkpoint: str) -> Iterator[list[RankInfo]]:
    """Four ranks over three hosts."""
    yield driver.run(jobs.start, checkpoint, world_size=4, strategy="SPREAD")
    driver.run(jobs.stop)


@pytest.fixture(scope="module")
def trained(reference: nn.Module) -> nn.Module:
    """A copy of the model, which is trained beside the group."""
    return copy.deepcopy(reference)


def test_where_ranks_and_the_controller_are(ranks: list[RankInfo], rays: RayHosts) -> None:
    hosts = rays.hosts
    assert ranks[0].node_ip == hosts[1].address, "host 1 alone sees the files; the driver is on host 0"
    nodes = [info.node_ip for info in ranks]
    order = list(dict.fromkeys(nodes))
    assert nodes == sorted(nodes, key=order.index), "ranks of one node follow each other"
    assert order == [hosts[1].address, hosts[0].address, hosts[2].address], "the driver's node comes next"
    assert set() < controller_pids() <= set(hosts[0].pids()), "the driver's node; see unreachable hosts, too"
    assert [info.local_rank for info in ranks] == [nodes[:rank].count(node) for rank, node in enumerate(nodes)]


def interfaces() -> tuple[str, str, list[str]]:
    """Gloo's interface; what the host's own name resolves to; the host's interfaces."""
    names = [name for _, name in socket.if_nameindex()]
    return os.environ["GLOO_SOCKET_IFNAME"], socket.gethostbyname(socket.gethostname()), names


def test_groups_meet_where_host_names_mislead(ranks: list[RankInfo], driver: Driver, rays: RayHosts) -> None:
    misleading = {host.address: "127.0.0.1" for host in rays.hosts} | {rays.hosts[2].address: "172.31.2.1"}
    seen = driver.run(lambda: list(jobs.group().call(interfaces)))
    assert [interface for interface, _, _ in seen] == ["eth0"] * 4
    assert [resolved for _, resolved, _ in seen] == [misleading[info.node_ip] for info in ranks]
    assert all({"lo", "eth0", "other0"} <= set(names) for _, _, names in seen)


def test_forward_and_training_equal_one_process(ranks: list[RankInfo], driver: Driver, trained: nn.Module) -> None:
    rows, targets = torch.randn(7, 8), torch.randn(7, 4)
    with torch.no_grad():
        torch.testing.assert_close(driver.run(jobs.forward, rows), trained(rows))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for metrics in driver.run(jobs.train, rows, targets):
        loss = (trained(rows) - targets).square().mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([one.grad for one in trained.parameters() if one.grad is not None])
        assert metrics == pytest.approx({"loss": loss.item(), "grad_norm": norm.item()}, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(driver.run(jobs.forward, rows), trained(rows))


@pytest.mark.parametrize("width", [16, 17], ids=["other values", "other headers"])
def test_other_files_under_the_same_path_are_refused(
    ranks: list[RankInfo], driver: Driver, rays: RayHosts, trained: nn.Module, tmp_path: Path, width: int
) -> None:
    seen = save_for(rays.hosts[1], trained, tmp_path)
    torch.manual_seed(1)
    (tmp_path / "other").mkdir()
    save_file(jobs.make_mlp(width)().state_dict(), tmp_path / "other" / "model.safetensors")
    rays.hosts[2].show_alone(tmp_path / "other", seen)
    with pytest.raises(CheckpointError, match="other content") as caught:
        driver.run(lambda: jobs.group().load(seen))
    assert "host1" in str(caught.value)
    assert "host2" in str(caught.value)
    assert seen in str(caught.value)
    driver.run(jobs.forward, torch.ones(4, 8))  # READY


@pytest.mark.full
def test_a_load_over_slow_links_moves_and_raises_no_alarm(
    driver: Driver, hosts: Hosts, rays: RayHosts, tmp_path: Path
) -> None:
    width = 1 << 20
    stall_s = 1.5
    seen = save_for(rays.hosts[1], jobs.make_mlp(width)(), tmp_path)  # 52 MiB; two thirds leave the host
    loading, timeouts = Loading(bucket_bytes=1 << 20), Timeouts(load_stall_s=stall_s)
    driver.run(jobs.start, seen, width=width, loading=loading, timeouts=timeouts)
    try:
        hosts.set_rate(50)
        seconds, pauses = driver.run(watch_load, seen)
    finally:
        hosts.set_rate(None)
        driver.run(jobs.stop)
    assert seconds > 2 * stall_s
    assert len(pauses) > 5
    assert max(pauses) < stall_s


def watch_load(checkpoint: str) -> tuple[float, list[float]]:
    """Load it again; returns the seconds, and those between the moments at which the bytes had grown."""
    call = jobs.group().load.remote(checkpoint)
    begun = moved = time.monotonic()
    pauses, done = [], 0
    while not call.wait(0.02):
        if call.progress[0] != done:
            now_s, done = time.monotonic(), call.progress[0]
            pauses.append(now_s - moved)
            moved = now_s
    call.result()
    return time.monotonic() - begun, pauses


@pytest.mark.full
def test_weights_go_over_the_wire_once_and_stay_on_a_host_that_has_them(driver: Driver, tmp_path: Path) -> None:
    width = 1 << 14
    module = jobs.make_mlp(width)()
    save_file(module.state_dict(), tmp_path / "model.safetensors")  # which all hosts see
    report, is_equal, places = driver.run(copy_between, str(tmp_path), (2, 3), width)
    assert is_equal
    assert not report.is_planned
    num_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    assert num_bytes <= report.num_bytes == report.wire_bytes + report.shared_bytes <= 1.02 * num_bytes
    # Of halves into thirds, on three hosts: what a host has of both stays there.
    kept = sum(
        len(set(_rows_of(tensor, 2, mine)) & set(_rows_of(tensor, 3, theirs))) * tensor[0].nbytes
        for mine, theirs in itertools.product(range(2), range(3))
        if places[0][mine] == places[1][theirs]
        for tensor in module.state_dict().values()
    )
    assert 0 < kept <= report.shared_bytes <= 1.02 * kept
    assert max(*report.source_extra_bytes, *report.target_extra_bytes) <= 33 << 20


def copy_between(checkpoint: str, sizes: tuple[int, int], width: int) -> tuple[CopyReport, bool, list[list[str]]]:
    """Copy changed weights from one new group to another; returns the report, whether they are equal, and the nodes."""
    options: dict[str, Any] = {"model": jobs.make_mlp(width), "device": "cpu"}
    options["placement"] = Placement(strategy="SPREAD", cpus_per_rank=0.5)
    with (
        ShardedModelGroup.from_checkpoint(checkpoint, world_size=sizes[0], **options) as jobs._group,
        ShardedModelGroup.from_checkpoint(checkpoint, world_size=sizes[1], **options) as target,
    ):
        source = jobs.group()
        jobs.change()
        source.copy_to(target)
        report = source.copy_to(target)
        mine, theirs = source.state_dict(), target.state_dict()
        is_equal = all(torch.equal(mine[name], theirs[name]) for name in mine)
        return report, is_equal, [[info.node_ip for info in one.ranks] for one in (source, target)]


def _rows_of(tensor: torch.Tensor, world_size: int, rank: int) -> range:
    """Rows of a rank's shard: FSDP2 cuts as `torch.chunk` does, and the last ranks have what is left, or none."""
    size = -(-len(tensor) // world_size)
    return range(len(tensor))[rank * size : (rank + 1) * size]
