"""Row 24, and several groups on one cluster: starts at the same moment do not meet each other's ports or results."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from raysharding import Placement, ShardedModelGroup, Split
from tests.clock import now
from tests.conftest import make_group
from tests.faults.joining import join_and_sum
from tests.spawn import PRELOADED

NUM_GROUPS = 20


@contextmanager
def squatters(number: int) -> Iterator[set[int]]:
    """Listen on many of the ports that the kernel gives away, and on all addresses."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("0.0.0.0", 0))) for _ in range(number)]
        yield {listener.getsockname()[1] for listener in listeners}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_groups", [4, pytest.param(NUM_GROUPS, marks=pytest.mark.full)])
def test_groups_that_start_at_once_do_not_collide(num_groups: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.faults.joining"])
    answers, addresses = context.Queue(), [context.Queue() for _ in range(num_groups)]
    all_met = context.Event()
    processes = [
        context.Process(target=join_and_sum, args=(rank, number, addresses[number], answers, all_met), daemon=True)
        for number in range(num_groups)
        for rank in range(2)
    ]
    with squatters(500) as taken:
        try:
            for process in processes:
                process.start()
            found = [answers.get(timeout=100) for _ in processes]
        finally:
            all_met.set()
            for process in processes:
                process.join(10)
                process.kill()
    assert sorted((number, rank) for number, rank, _, _ in found) == [(n, r) for n in range(num_groups) for r in (0, 1)]
    assert all(total == 2 * number for number, _, total, _ in found), "each pair added up its own"
    ports = {port for _, _, _, port in found}
    assert len(ports) == num_groups
    assert not ports & taken


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(240)
def test_groups_side_by_side(checkpoint: Path, reference: nn.Module, tmp_path: Path) -> None:
    num_groups = 2
    groups: list[ShardedModelGroup] = []
    errors: list[Exception] = []

    def start() -> None:
        try:
            groups.append(make_group(checkpoint, placement=Placement(cpus_per_rank=0.5), optimizer=torch.optim.SGD))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(num_groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group)
        assert not errors
        assert len(groups) == num_groups
        rows = torch.randn(8, 8)
        calls = [group.forward.remote(Split(rows)) for _ in range(20) for group in groups]
        assert all(torch.allclose(call.result(), reference(rows), atol=1e-6) for call in calls)
        for index, group in enumerate(groups):
            group.save(tmp_path / str(index))
        assert len({info.pid for group in groups for info in group.ranks}) == 2 * num_groups
        groups[0].shutdown()
        assert all(torch.allclose(group.forward(Split(rows)), reference(rows), atol=1e-6) for group in groups[1:])


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(300)
def test_eight_ranks(checkpoint: Path, reference: nn.Module, tmp_path: Path) -> None:
    placement = Placement(cpus_per_rank=0.5)
    with make_group(checkpoint, world_size=8, placement=placement, optimizer=torch.optim.SGD) as group:
        rows = torch.randn(19, 8)
        assert torch.allclose(group.forward(Split(rows)), reference(rows), atol=1e-6)
        metrics = group.train_step(Split(rows), loss=lambda output, rows: output.square().mean())
        assert abs(metrics["loss"] - reference(rows).square().mean().item()) < 1e-6
        group.save(tmp_path / "saved")
        begun = now()
        group.shutdown()
        assert now() - begun < 10
