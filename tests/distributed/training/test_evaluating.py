"""Evaluation over data equals one process: loss, metrics, rows; errors reach every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import profile

from raysharding.data import SequenceRows, Stream
from raysharding.data.source import Columns
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.training.data_loader import DataPlan
from raysharding.distributed.training.evaluate import Evaluation, EvaluationPlan
from raysharding.errors import DataError
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_fitting import BATCH, many_rows
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES
from tests.spawn import device_type


def hits(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that the model gets right, of those that count."""
    counts = labels[:, 1:] != -100
    return ((output["logits"][:, :-1].argmax(-1) == labels[:, 1:]) & counts).sum(), counts.sum()


def evaluated(pair: Pair, plan: EvaluationPlan) -> dict[str, float]:
    run = Evaluation(plan, current_device(device_type()), module=pair.module)
    while run.step(pair.module):
        pass
    run.data_loader.close()
    return run.values()


@on_ranks(2, full=(3,), sim=(2,))
def test_loss_and_metrics_equal_one_process() -> None:
    rows = many_rows("llama")
    pair = Pair(CASES["llama"].build, "sgd")
    data_plan = DataPlan(SequenceRows(Columns(rows)), BATCH)
    pair.module.train()
    found = evaluated(pair, EvaluationPlan(data_plan, metrics={"accuracy": hits}))
    assert pair.module.training, "its mode is put back"
    with torch.no_grad():
        logits = pair.twin.eval()(rows["input_ids"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten())
    right, count = hits({"logits": logits}, rows["labels"])
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["accuracy"] == pytest.approx((right / count).item(), abs=1e-6)
    assert found["num_rows"] == len(rows["labels"])
    # Fewer rows than ranks, and without a loss.
    few = replace(data_plan, source=SequenceRows(Columns({name: value[:2] for name, value in rows.items()})))
    found = evaluated(pair, EvaluationPlan(few, with_loss=False, metrics={"accuracy": hits}))
    right, count = hits({"logits": logits[:2]}, rows["labels"][:2])
    assert found == {"accuracy": pytest.approx((right / count).item()), "num_rows": 2}
    assert all(parameter.grad is None for parameter in pair.module.parameters())


def predicted(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row the next token, the one that the model predicts, and the log-odds of token 3."""
    logits = output["logits"][:, -2].float()
    return labels[:, -1], logits.argmax(-1), logits[:, 3] - logits[:, 4]


def macro_f1(labels: torch.Tensor, tokens: torch.Tensor, _: torch.Tensor) -> Any:
    from sklearn.metrics import f1_score

    return f1_score(labels % 4, tokens % 4, average="macro")


def matthews(labels: torch.Tensor, tokens: torch.Tensor, _: torch.Tensor) -> Any:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels % 2, tokens % 2)


def area(labels: torch.Tensor, _: torch.Tensor, odds: torch.Tensor) -> Any:
    from sklearn.metrics import roc_auc_score

    return roc_auc_score(labels % 2, odds)


def first_odds(*rows: torch.Tensor) -> float:
    return float(rows[2] @ torch.arange(len(rows[2]), dtype=torch.float32))


def without_rows(output: Any) -> float:
    return 1.0


@on_ranks(2, full=(3,), sim=(2,))
def test_metrics_that_are_no_sums_equal_one_process() -> None:
    """F1, Matthews and the area under the curve are scikit-learn's and torchmetrics' of all rows, in their order."""
    classification = pytest.importorskip("torchmetrics.classification")
    rows = many_rows("llama")
    pair = Pair(CASES["llama"].build, "sgd")
    with torch.no_grad():
        whole = predicted({"logits": pair.twin.eval()(rows["input_ids"]).logits}, rows["labels"])
    computes: dict[str, Any] = {"f1": macro_f1, "matthews": matthews, "area": area, "order": first_odds}
    metrics: dict[str, Any] = {name: (predicted, compute) for name, compute in computes.items()}
    metrics["torchmetrics"] = (
        lambda output, labels: predicted(output, labels)[1::-1],
        classification.MulticlassF1Score(64, ignore_index=-100),
    )
    metrics["accuracy"] = hits
    data_plan = DataPlan(SequenceRows(Columns(rows)), BATCH)
    for _ in range(2):
        found = evaluated(pair, EvaluationPlan(data_plan, metrics=metrics))
        for name, compute in computes.items():
            assert found[name] == pytest.approx(float(compute(*whole)), rel=1e-4), name
        assert found["torchmetrics"] == pytest.approx(
            float(classification.MulticlassF1Score(64, ignore_index=-100)(*whole[1::-1]))
        )
    # A rank without rows has nothing to add.
    one = replace(data_plan, source=SequenceRows(Columns({name: value[:1] for name, value in rows.items()})))
    assert evaluated(pair, EvaluationPlan(one, metrics={"order": metrics["order"]}))["order"] == 0.0
    with pytest.raises(DataError, match=r"metrics\['none'\]: its first function returned shapes \[\(\)\]: return rows"):
        evaluated(pair, EvaluationPlan(data_plan, metrics={"none": (without_rows, first_odds)}))


@on_ranks(2)
def test_batches_find_the_root_gathered() -> None:
    pair = Pair(CASES["llama"].build, "sgd")
    plan = EvaluationPlan(DataPlan(SequenceRows(Columns(many_rows("llama"))), BATCH))
    evaluated(pair, plan)  # forwards that find out how the loss counts come with the first batch
    gathers = []
    for max_steps in (1, 3):
        with profile() as profiled:
            evaluated(pair, replace(plan, data=replace(plan.data, max_steps=max_steps)))
        gathers.append(sum(event.name == "c10d::_allgather_base_" for event in profiled.events()))
    assert gathers[1] == 3 * gathers[0] - 2


def bad_metric(output: Any, labels: torch.Tensor) -> Any:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    return hits(output, labels)


def one_number(output: Any, labels: torch.Tensor) -> Any:
    return hits(output, labels)[0]


@on_ranks(2)
def test_every_rank_hears_of_a_metric_that_fails() -> None:
    """What one rank's metric raises, every rank raises, and the module is right afterwards."""
    rows = many_rows("llama")
    pair = Pair(CASES["llama"].build, "sgd")
    data_plan = DataPlan(SequenceRows(Columns(rows)), BATCH)
    with pytest.raises(DataError, match=r"metrics\['bad'\] raised KeyError: 'only here'"):
        evaluated(pair, EvaluationPlan(data_plan, metrics={"bad": bad_metric}))
    with pytest.raises(DataError, match=r"metrics\['zero'\] raised ZeroDivisionError"):
        evaluated(pair, EvaluationPlan(data_plan, metrics={"zero": (predicted, lambda *rows: 1 / 0)}))
    with pytest.raises(ValueError, match=r"metrics\['one'\] returned a Tensor: return \(sum, count\)"):
        evaluated(pair, EvaluationPlan(data_plan, metrics={"one": one_number}))
    with pytest.raises(DataError, match="data has no rows"):
        evaluated(pair, EvaluationPlan(replace(data_plan, source=Stream(list))))
    assert evaluated(pair, EvaluationPlan(replace(data_plan, max_steps=1)))["num_rows"] == BATCH
