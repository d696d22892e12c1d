"""The main path through real actors: load, forward, train, gather, save, and what the group says of itself."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from raysharding import (
    CheckpointError,
    GroupBrokenError,
    GroupError,
    Out,
    OutputTooLargeError,
    PerRank,
    PlanError,
    ShardedModelGroup,
    Split,
)
from raysharding.group import GroupState
from tests.group.conftest import make_group, placement_groups, rank_processes

pytestmark = pytest.mark.usefixtures("cluster")

ROWS = 5


def mean_square() -> Callable[..., torch.Tensor]:
    """A loss that pickles by value."""

    def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
        return output.square().mean()

    return loss


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))


def test_forward_equals_one_process(group: ShardedModelGroup, reference: nn.Module, rows: torch.Tensor) -> None:
    torch.testing.assert_close(group.forward(Split(rows)), reference(rows), rtol=0, atol=1e-6)
    torch.testing.assert_close(group.forward(rows), reference(rows), rtol=0, atol=1e-6)
    torch.testing.assert_close(group.forward(Split(rows[:1])), reference(rows[:1]), rtol=0, atol=1e-6)
    ranks_own = PerRank([rows[:2], rows[2:4]])
    both = group.forward(ranks_own, out=Out.per_rank())
    torch.testing.assert_close(torch.cat(list(both)), reference(rows[:4]), rtol=0, atol=1e-6)


def test_outputs_come_as_asked(group: ShardedModelGroup, reference: nn.Module, rows: torch.Tensor) -> None:
    assert group.forward(Split(rows), out=Out.none()) is None
    assert group.forward(Split(rows), out=Out.rank0()).shape == (3, 4)
    refs = group.forward(Split(rows), out=Out.refs())
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    torch.testing.assert_close(torch.cat(ray.get(list(refs))), reference(rows), rtol=0, atol=1e-6)
    assert group.call(lambda: 3, out=Out.none()) is None
    everyone = group.call(lambda: 3, out=Out.per_rank())
    assert isinstance(everyone, PerRank)
    assert list(everyone) == [3, 3]
    assert group.call(lambda: 3, out=Out.rank0()) == 3
    assert ray.get(list(group.call(lambda: 3, out=Out.refs()))) == [3, 3]


def test_state_dict_is_bit_exact(group: ShardedModelGroup, reference: nn.Module) -> None:
    found = group.state_dict()
    assert found.keys() == reference.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())
    assert list(group.state_dict(keys=["2.bias"])) == list(group.state_dict("2.bias")) == ["2.bias"]
    with pytest.raises(GroupError, match=r"'nope'.*not in the module") as caught:
        group.state_dict(["nope"])
    assert caught.value.primary is not None
    assert caught.value.primary.phase == "state_dict"
    assert group.state is GroupState.READY


def test_call_runs_on_every_rank_inside_the_process_group(group: ShardedModelGroup) -> None:
    def work(own: int, both: torch.Tensor, split: torch.Tensor) -> tuple[int, int, float, int]:
        import threading

        import torch.distributed as dist

        from raysharding import current_worker

        total = torch.tensor([float(own)])
        dist.all_reduce(total)  # every rank is here: call(fn) runs on all
        assert current_worker().rank == dist.get_rank()
        assert torch.get_num_threads() == 1
        return os.getpid(), threading.get_ident(), total.item() + both.sum().item(), len(split)

    shared = torch.ones(100_000)
    answers = group.call(work, PerRank([1, 2]), shared, split=Split(torch.zeros(3)))
    assert [answer[0] for answer in answers] == [info.pid for info in group.ranks]
    assert [answer[2:] for answer in answers] == [(100_003.0, 2), (100_003.0, 1)]
    again = group.call(work, PerRank([1, 2]), shared, split=Split(torch.zeros(3)))
    assert [answer[1] for answer in again] == [answer[1] for answer in answers], "always the same work thread"


def test_training_saving_and_reopening(
    checkpoint: Path, reference: nn.Module, rows: torch.Tensor, tmp_path: Path
) -> None:
    expected = copy.deepcopy(reference).requires_grad_(True)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)

    def own_optimizer() -> None:
        from raysharding import current_worker

        current_worker().trainer.set_optimizer(torch.optim.SGD, {"lr": 0.0})

    told: list[tuple[int, int]] = []
    with make_group(checkpoint, progress=lambda done, total: told.append((done, total))) as group:
        assert told[-1] == (848, 848)
        with pytest.raises(ValueError, match="set_optimizer"):
            group.train_step(Split(rows), loss=mean_square())
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            loss = mean_square()(expected(rows))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            metrics = group.train_step(Split(rows), loss=mean_square())
            assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
        report = group.save(tmp_path / "saved")
        assert report is not None
        assert report.num_tensors == 4
        with pytest.raises(CheckpointError, match="overwrite"):
            group.save(tmp_path / "saved")
        assert group.state is GroupState.READY
    with make_group(tmp_path / "saved", world_size=1) as reopened:
        found = reopened.state_dict()
        reopened.call(lambda: None)
        with pytest.raises(GroupError, match="no optimizer: call set_optimizer"):
            reopened.train_step(Split(rows), loss=mean_square())
        reopened.call(own_optimizer)
        assert reopened.train_step(Split(rows), loss=mean_square())["loss"] > 0
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_what_the_group_says_of_itself(group: ShardedModelGroup) -> None:
    assert group.state is GroupState.READY
    assert [(info.rank, info.local_rank, info.device) for info in group.ranks] == [(0, 0, "cpu"), (1, 1, "cpu")]
    status = group.status()
    assert [rank["answers"] for rank in status["ranks"]] == [True, True]
    assert [rank["pid"] for rank in status["ranks"]] == [info.pid for info in group.ranks]
    assert "host MiB" in group.memory_summary()
    assert group.load_report.num_tensors == 4
    assert "2 ranks on cpu, ready" in repr(group)
    assert f"<td>{group.ranks[1].pid}</td>" in group._repr_html_()
    assert "rows gathered in order" in str(ShardedModelGroup.forward.__doc__)


def test_a_result_over_the_cap_names_size_cap_and_cure(checkpoint: Path, rows: torch.Tensor) -> None:
    with make_group(checkpoint, max_output_bytes=2000) as group:
        with pytest.raises(OutputTooLargeError, match=r"over max_output_bytes=2000; return less .*Out\.none") as caught:
            group.call(lambda: torch.zeros(1000))
        assert caught.value.num_bytes > 4000
        with pytest.raises(OutputTooLargeError):
            # On one rank alone: the ranks' work is done by then, so the group is whole.
            group.call(lambda rank: torch.zeros(1000 * rank), PerRank([0, 1]))
        assert group.forward(Split(rows)).shape == (ROWS, 4)


@pytest.mark.usefixtures("nothing_left")
def test_a_group_that_cannot_load_leaves_nothing(checkpoint: Path) -> None:
    def too_large() -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))

    with pytest.raises(PlanError) as caught:
        make_group(checkpoint, model=too_large)
    assert "2.weight" in str(caught.value)
    assert "2.bias" in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_dies_before_there_is_a_group_leaves_its_log(checkpoint: Path) -> None:
    def dying() -> nn.Module:
        import os
        import signal
        import sys

        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() == 1:
            print("the last line", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(8, 4)

    with pytest.raises(GroupError, match=r"rank 1 .*died in build") as caught:
        make_group(checkpoint, model=dying)
    what = r"(worker-\S*) in Ray's session_latest/logs on that node shows its last lines"
    named = re.search(what, str(caught.value))
    assert named is not None
    logs = Path("/tmp/ray").glob(f"session_*/logs/{named[1]}")  # another cluster may be the latest
    assert any("the last line" in log.read_text() for log in logs)


@pytest.mark.usefixtures("nothing_left")
def test_shutdown_twice_and_calls_after_it(checkpoint: Path) -> None:
    before = rank_processes(), placement_groups()
    group = make_group(checkpoint, world_size=1)
    assert len(rank_processes()) == len(before[0]) + 1
    running = group.call.remote(lambda: __import__("time").sleep(60))
    queued = group.call.remote(lambda: 1)
    group.shutdown()
    group.shutdown()
    for call in (running, queued):
        with pytest.raises(GroupBrokenError, match="was shut down"):
            call.result()
    with pytest.raises(GroupBrokenError, match="is shut down"):
        group.call(lambda: 1)
    assert group.state is GroupState.CLOSED
    assert "closed" in repr(group)


@pytest.mark.usefixtures("nothing_left")
def test_a_dropped_group_is_closed(checkpoint: Path) -> None:
    make_group(checkpoint, world_size=1)
