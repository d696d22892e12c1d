"""Batches in which nothing counts: a run skips them on every rank alike, or ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from raysharding.data import SequenceRows
from raysharding.data.source import Columns
from raysharding.distributed.optim.factories import attach_schedule
from raysharding.distributed.training.data_loader import DataPlan
from raysharding.distributed.training.evaluate import Evaluation, EvaluationPlan
from raysharding.distributed.training.fit import Fit, FitPlan, StepMetrics
from raysharding.distributed.training.step import train_step
from raysharding.errors import EmptyBatchError
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair, each
from tests.distributed.training.training_cases import CASES, NUM_ROWS, Case, Rows, batch_of, part_of

CPU = torch.device("cpu")
CASE_NAMES = ("llama", "bert_mlm", "sum_and_count")


def three_batches(case: Case, empty: int) -> Rows:
    rows = {name: value.repeat(3, *[1] * (value.ndim - 1)) for name, value in case.rows().items()}
    rows["labels"][empty * NUM_ROWS : (empty + 1) * NUM_ROWS] = -100
    return rows


def batch_at(rows: Rows, index: int) -> Rows:
    return part_of(rows, index * NUM_ROWS, (index + 1) * NUM_ROWS)


def plan_of(rows: Rows, case: Case, **options: Any) -> FitPlan:
    return FitPlan(DataPlan(SequenceRows(Columns(rows)), NUM_ROWS), case.loss, **options)


def halved(pair: Pair) -> torch.optim.lr_scheduler.LRScheduler:
    attach_schedule(pair.optimizer, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    return torch.optim.lr_scheduler.ExponentialLR(pair.twin_optimizer, 0.5)


def steps_of(pair: Pair, run: Fit) -> list[StepMetrics]:
    steps = []
    while (step_metrics := run.step(pair.module, pair.optimizer)) is not None:
        steps.append(step_metrics)
    return steps


def skip(name: str, empty: int, num_parts: int) -> None:
    """The other steps are those of a process that never saw the batch; the schedule takes theirs alone."""
    case = CASES[name]
    pair, rows = Pair(case.build, "adamw"), three_batches(case, empty)
    schedule = halved(pair)
    run = Fit(plan_of(rows, case, gradient_accumulation_steps=num_parts), CPU)
    steps = steps_of(pair, run)
    assert [bool(step.skipped) for step in steps] == [index == empty for index in range(3)]
    assert (run.position.num_steps, run.position.epoch) == (3, 1)
    for index, step in enumerate(steps):
        if index == empty:
            assert math.isnan(step.metrics["loss"])
            assert math.isnan(step.metrics["grad_norm"])
            assert step.metrics["lr"] == schedule.get_last_lr()[0]
            assert "nothing counts" in step.skipped, step.skipped
            assert (step.num_rows, step.num_tokens) == (0, 0)
            continue
        pair.agree(step.metrics, pair.twin_step(case, batch_at(rows, index)))
        schedule.step()
    pair.compare()


def go_on() -> None:
    """A run that stopped after a skipped batch goes on with the one behind it."""
    case = CASES["bert_mlm"]
    rows = three_batches(case, 1)
    pair = Pair(case.build, "adamw")
    run = Fit(plan_of(rows, case), CPU)
    for _ in range(2):
        assert run.step(pair.module, pair.optimizer) is not None
    run.data_loader.close()
    later = Fit(plan_of(rows, case), CPU, run.position)
    (last,) = steps_of(pair, later)
    assert later.position.num_steps == 3
    assert not last.skipped
    for index in (0, 2):
        expected = pair.twin_step(case, batch_at(rows, index))
    pair.agree(last.metrics, expected)


def end() -> None:
    case = CASES["llama"]
    pair = Pair(case.build, "adamw")
    run = Fit(plan_of(three_batches(case, 1), case, on_empty="raise"), CPU)
    assert run.step(pair.module, pair.optimizer) is not None
    with pytest.raises(EmptyBatchError, match="nothing counts"):
        run.step(pair.module, pair.optimizer)
    assert run.position.num_steps == 1
    run.data_loader.close()
    rows = case.rows()
    with pytest.raises(EmptyBatchError, match="nothing counts"):
        train_step(pair.module, pair.optimizer, batch_of({**rows, "labels": torch.full_like(rows["labels"], -100)}))


def first_of_all(name: str) -> None:
    """Of a first batch without labels nothing is concluded: the loss leaves out class 0, which there is no other of."""
    case = CASES[name]
    pair, rows = Pair(case.build, "sgd"), case.rows()
    batch = batch_of({**rows, "labels": torch.full_like(rows["labels"], -100)})
    with pytest.raises(EmptyBatchError, match="nothing counts"):
        train_step(pair.module, pair.optimizer, batch)
    pair.step(case, rows)
    pair.compare()


def look(name: str) -> None:
    """An evaluation counts such a batch as nothing."""
    case = CASES[name]
    pair, found = Pair(case.build, "adamw"), []
    for rows in three_batches(case, 1), part_of(three_batches(case, 2), 0, 2 * NUM_ROWS):
        run = Evaluation(EvaluationPlan(DataPlan(SequenceRows(Columns(rows)), NUM_ROWS), case.loss), CPU)
        while run.step(pair.module):
            pass
        found.append(run.values()["loss"])
    assert math.isclose(*found, rel_tol=1e-6), found


@pytest.mark.all_ranks
@on_ranks(2)
def test_a_batch_without_labels_is_skipped_by_all_ranks_alike() -> None:
    each(skip, [(name, empty, num_parts) for name in CASE_NAMES for empty, num_parts in ((0, 1), (1, 2))])
    go_on()
    end()
    each(first_of_all, [("bert_tagger",), ("counting",)])
    each(look, [(name,) for name in CASE_NAMES])


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="on_empty='ignore': give 'skip' or 'raise'"):
        FitPlan(DataPlan(SequenceRows([1]), 1), on_empty="ignore")  # type: ignore[arg-type]
