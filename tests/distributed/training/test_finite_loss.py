"""A loss that is NaN or infinite: what the error says, and that nothing is concluded from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch, Split, deal
from raysharding.distributed.loading.full_state_dict import load_full_state_dict
from raysharding.distributed.training.labels import find_labels
from raysharding.distributed.training.loss_probe import recall
from raysharding.distributed.training.step import train_step
from tests.distributed.training.training_cases import CASES, Scaled, row_mean, token_mean
from tests.spawn import run_ranks

NAMES = ("llama", "llama_callable", "t5", "bert_classifier", "bert_mlm", "resnet", "token_mean", "row_mean", "guarded")


def batch_of(rows: dict[str, torch.Tensor]) -> RankBatch:
    return deal((), {key: Split(value) for key, value in rows.items()}, dist.get_world_size())[dist.get_rank()]


def step(module: nn.Module, batch: RankBatch, loss: Callable[..., Any] | None) -> dict[str, float]:
    return train_step(module, torch.optim.SGD(module.parameters(), lr=0.1), batch, loss=loss)


def spoil(module: nn.Module, value: float) -> str:
    """Put a value into the last parameter of more than one dim."""
    name, parameter = [item for item in module.named_parameters() if item[1].ndim > 1][-1]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    return name


def error_of(module: nn.Module, batch: RankBatch, loss: Callable[..., Any] | None) -> str:
    with pytest.raises(ValueError, match="loss") as caught:
        step(module, batch, loss)
    return str(caught.value)


def spoiled_weights() -> None:
    for name in NAMES:
        case = CASES[name]
        torch.manual_seed(0)
        module = case.build()
        good = copy.deepcopy(module.state_dict())
        batch = batch_of(case.rows())
        where = spoil(module, math.nan)
        said = error_of(module, batch, case.loss)
        assert "the loss of this batch is nan on rank 0, nan on rank 1" in said, f"{name}: {said}"
        assert "before the first update since the weights were loaded" in said, said
        assert f"the parameter {where} holds values that are not finite" in said, said
        # Nothing was concluded from it: with good weights the step is that of a model that never was spoiled.
        labels = find_labels(module, batch, case.loss)
        assert recall(module, batch, case.loss, labels.kind) is None, name
        module.load_state_dict(good)
        twin = case.build()
        twin.load_state_dict(good)
        assert step(module, batch, case.loss) == step(twin, batch, case.loss), name


def after_updates() -> None:
    rows = CASES["token_mean"].rows()
    module, batch = Scaled(), batch_of(rows)
    for _ in range(2):
        step(module, batch, token_mean)
    good = copy.deepcopy(module.state_dict())
    spoil(module, math.inf)
    assert not math.isfinite(step(module, batch, token_mean)["loss"])
    target = {"target": torch.rand(7)}
    said = error_of(module, batch_of({"tokens": rows["tokens"], **target}), row_mean)
    assert "after 3 updates since the weights were loaded, of which number 2 was the last with a finite loss" in said
    load_full_state_dict(module, {**good, "scale": torch.tensor(math.inf)})
    said = error_of(module, batch_of({"tokens": rows["tokens"], **target}), row_mean)
    assert "before the first update since the weights were loaded; the parameter scale holds" in said, said


def spoiled_batch() -> None:
    case = CASES["bert_regression"]
    rows = case.rows()
    rows["labels"][-1] = math.nan
    said = error_of(case.build(), batch_of(rows), None)
    assert "the loss of this batch is nan on rank 1 before" in said, said
    assert "batch['labels'] holds NaN" in said, said


def masked_by_the_loss_alone() -> None:
    """Rank 1 has only labels that the loss leaves out, and nobody but the loss knows of it."""
    rows = CASES["token_mean"].rows()
    rows["labels"] = torch.where(torch.arange(7)[:, None] > 2, 0, rows["labels"].clamp(min=1))
    loss = nn.CrossEntropyLoss(ignore_index=0)
    said = error_of(Scaled(), batch_of(rows), lambda output, labels: loss(output.flatten(0, 1), labels.flatten()))
    assert "nan on rank 1 before" in said, said
    assert "Where nothing counts by a rule of the loss's own, pass the labels as labels=, masked by -100" in said, said


def run_all() -> None:
    spoiled_weights()
    after_updates()
    spoiled_batch()
    masked_by_the_loss_alone()


@pytest.mark.timeout(100)
def test_a_loss_that_is_not_finite_is_called_so_and_concludes_nothing() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, run_all, timeout_s=90)
