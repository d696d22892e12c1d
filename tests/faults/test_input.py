"""Rows 27, 28 and 30: batches, results and arguments at their limits end in a right result or a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from raysharding import GroupBrokenError, GroupError, PerRank, ShardedModelGroup, Split, Timeouts
from raysharding.group import GroupState
from tests import programs
from tests.clock import now
from tests.conftest import make_group

WORLD_SIZE = 3


@pytest.fixture(scope="module")
def three(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """Three ranks with an optimizer, for tests that leave them READY."""
    with make_group(checkpoint, world_size=WORLD_SIZE, optimizer=torch.optim.SGD) as group:
        yield group


@pytest.mark.parametrize("num_rows", [1, WORLD_SIZE - 1, WORLD_SIZE + 1])
def test_fewer_rows_than_ranks_and_one_more(num_rows: int, three: ShardedModelGroup, reference: nn.Module) -> None:
    rows = torch.randn(num_rows, 8)
    before = {name: value.clone() for name, value in three.state_dict().items()}
    twin = make_twin(before)
    assert torch.allclose(three.forward(Split(rows)), twin(rows), atol=1e-6)
    metrics = three.train_step(Split(rows), loss=lambda output, rows: output.square().mean())
    loss = twin(rows).square().mean()
    loss.backward()
    assert abs(metrics["loss"] - loss.item()) < 1e-6
    for name, value in three.state_dict().items():
        gradient = twin.get_parameter(name).grad
        assert gradient is not None
        assert torch.allclose(value, before[name] - 1e-3 * gradient, atol=1e-7), name


def make_twin(state: dict[str, torch.Tensor]) -> nn.Module:
    twin = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    twin.load_state_dict(state)
    return twin


def test_no_rows_are_refused_by_the_driver(three: ShardedModelGroup) -> None:
    begun = now()
    for call in (three.forward, three.train_step):
        with pytest.raises(ValueError, match="0 rows"):
            call(Split(torch.zeros(0, 8)))
    assert now() - begun < 1
    assert three.state is GroupState.READY


def test_rows_that_fit_no_rank_alike_are_an_error_that_leaves_the_group_ready(three: ShardedModelGroup) -> None:
    shapes = PerRank([torch.zeros(1, 8), torch.zeros(2, 8), torch.zeros(5, 8)])
    assert len(three.forward(shapes)) in (1, 8), "rank 0's rows, or all of them"
    with pytest.raises(GroupError, match="mat1 and mat2"):
        three.forward(PerRank([torch.zeros(1, 9)] * WORLD_SIZE))
    assert three.state is GroupState.READY


@pytest.mark.usefixtures("nothing_left")
def test_a_shape_that_one_rank_alone_cannot_take_is_never_a_hang(checkpoint: Path) -> None:
    group = make_group(checkpoint, timeouts=Timeouts(call_s=20, drain_s=1))
    begun = now()
    with pytest.raises((GroupError, ValueError)) as caught:
        group.forward(PerRank([torch.zeros(1, 8), torch.zeros(1, 9)]))
    assert now() - begun < 5
    if isinstance(caught.value, GroupError):
        assert caught.value.primary is not None
        assert caught.value.primary.rank == 1
        assert "mat1 and mat2" in caught.value.primary.message
    if group.state is GroupState.BROKEN:
        with pytest.raises(GroupBrokenError):
            group.forward(Split(torch.zeros(2, 8)))
    else:
        assert group.forward(Split(torch.zeros(2, 8))).shape == (2, 4)
    group.shutdown()


LARGER_THAN_THE_STORE = """
import sys, ray, torch
from raysharding import Out, Split
from tests.conftest import make_group
from tests.forking import runtime_env

options = {"include_dashboard": False, "log_to_driver": False, "runtime_env": runtime_env()}
ray.init("local", num_cpus=1, object_store_memory=80_000_000, **options)
with make_group(sys.argv[1], world_size=1) as group:
    large = torch.arange(50_000_000, dtype=torch.float32)
    try:
        assert torch.equal(group.call(lambda value: value * 1, large)[0], large)
        print("whole")
    except Exception as error:
        assert type(error).__module__.startswith("raysharding"), repr(error)
        print("refused:", error)
    assert group.call(lambda: 5) == [5], "and the group is as it was"
"""


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left", "worker_python")
def test_values_larger_than_the_object_store_arrive_or_are_refused(checkpoint: Path) -> None:
    done = programs.run(LARGER_THAN_THE_STORE, str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("whole", "refused:")), done.stdout
