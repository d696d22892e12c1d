"""Fixtures of many files here; those of all tests of groups are in `tests/conftest.py`, shared with `tests/faults`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from raysharding import Placement, ShardedModelGroup
from raysharding.group import GroupState
from raysharding.group.fit import run as fit_run
from tests.conftest import NUM_CPUS, free_cpus, make_group, make_mlp, placement_groups, rank_processes, room_for
from tests.group.fit.runs import ADAMW, NUM_ROWS, alone

__all__ = ["NUM_CPUS", "free_cpus", "make_group", "make_mlp", "placement_groups", "rank_processes", "room_for"]


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_ROWS, 8, generator=random)
    return [{"x": one.tolist(), "y": float(one.sum() / 8)} for one in inputs]


@pytest.fixture(scope="session")
def parquet(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=9)
    return path


@pytest.fixture
def few_steps_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver hear of five steps at most at once, so that a short run can break in its middle."""
    monkeypatch.setattr(fit_run, "_MAX_STEPS", 5)


@pytest.fixture(scope="session")
def undisturbed(reference: nn.Module, rows: list[dict[str, Any]]) -> list[float]:
    """Losses of one process over four epochs of `rows` in order."""
    return alone(reference.state_dict(), rows, 4)


@pytest.fixture(scope="session")
def trained(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """Two ranks that tests of many files train, each from `fresh`."""
    # Other tests' groups have the CPUs.
    with make_group(checkpoint, placement=Placement(cpus_per_rank=0.1)) as group:
        yield group


@pytest.fixture
def fresh(trained: ShardedModelGroup, checkpoint: Path) -> ShardedModelGroup:
    """A group of the checkpoint's weights, with AdamW, for tests that leave it READY."""
    if trained.state is GroupState.BROKEN:  # a test before has failed
        trained.restart()
    trained.load(checkpoint)
    trained.set_optimizer(ADAMW)
    return trained
