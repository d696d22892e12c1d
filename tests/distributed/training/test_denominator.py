"""The ranks' shares add up to one process's loss, however it is reduced and called, or every rank refuses it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raysharding.batch import Split, deal
from raysharding.distributed.training.loss import loss_share
from raysharding.distributed.training.loss_probe import forget, identity
from tests.distributed.training.training_cases import (
    CASES,
    VOCAB,
    Counting,
    Scaled,
    bert_questions,
    sum_and_count,
    token_mean,
)
from tests.spawn import run_ranks


class Shifting(Scaled):
    """Tokens and labels are [L, N]; the first position of the labels does not count."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": token_mean(super().forward(tokens)[:-1], labels[1:])}


def token_sum(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def mean_of_rows(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), labels, reduction="none").sum(1)
    return (losses / (labels != -100).sum(1).clamp(min=1)).mean()


def ignoring_0(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.clamp(min=0).flatten(), ignore_index=0)


def of_targets(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_mean(output, targets)


def contrastive(output: torch.Tensor) -> torch.Tensor:
    rows = output.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def flexible(output: torch.Tensor, labels: torch.Tensor, pair: bool = False) -> Any:
    total, count = sum_and_count(output, labels, labels)
    return (total, count) if pair else total / count


def closing_over(pair: bool) -> Callable[..., Any]:
    return lambda output, labels: flexible(output, labels, pair)


class Fickle:
    """A loss whose kind depends on what nobody sees."""

    pair = True

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return flexible(output, labels, pair=Fickle.pair)


def step_loss(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any = None) -> float:
    """The sum of the ranks' shares; the gradients must be finite."""
    module.zero_grad()
    share = loss_share(module, deal(args, kwargs, dist.get_world_size())[dist.get_rank()], loss).value
    share.backward()
    assert all(item.grad is None or bool(item.grad.isfinite().all()) for item in module.parameters())
    total = share.detach().clone()
    dist.all_reduce(total)
    return float(total)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rows = CASES["token_mean"].rows()
    return rows["tokens"], rows["labels"]


def other_reductions() -> None:
    tokens, labels = data()
    for loss in (token_sum, mean_of_rows, token_mean):
        module = built(Scaled)
        found = step_loss(module, (), {"tokens": Split(tokens), "labels": Split(labels)}, loss)
        assert math.isclose(found, loss(module(tokens), labels).item(), rel_tol=1e-5), loss


def labels_by_position() -> None:
    tokens, labels = data()
    module = built(Counting)
    found = step_loss(module, (Split(tokens), Split(labels)), {})
    assert math.isclose(found, module(tokens, labels)["loss"].item(), rel_tol=1e-5)
    # A loss function that takes the call's positional arguments; its model takes them too.
    module = built(Counting)
    taking = lambda output, tokens, labels: output["loss"]  # noqa: E731
    assert math.isclose(step_loss(module, (Split(tokens), Split(labels)), {}, taking), found, rel_tol=1e-5)


def positions_first() -> None:
    """One row masked but for position 0 must not count, wherever the positions are."""
    tokens, labels = data()
    module = built(Shifting)
    found = step_loss(module, (), {"tokens": Split(tokens.T, dim=1), "labels": Split(labels.T, dim=1)})
    assert math.isclose(found, module(tokens.T, labels.T)["loss"].item(), rel_tol=1e-5)


def unanswered_questions() -> None:
    """Row 0 is ignored, and with it the dummy row; so are all rows of rank 1."""
    ids = data()[0]
    start = torch.tensor([99, 1, 2, 99, 99, 3, 0])
    end = torch.where(start < 99, start + 1, start)
    for num_rows in (7, 2):
        module = built(bert_questions)
        rows = {"input_ids": ids[:num_rows], "start_positions": start[:num_rows], "end_positions": end[:num_rows]}
        found = step_loss(module, (), {name: Split(value) for name, value in rows.items()})
        assert math.isclose(found, module(**rows).loss.item(), rel_tol=1e-5)
    rows = {"input_ids": ids, "start_positions": start, "end_positions": end.clamp(max=3)}
    with pytest.raises(ValueError, match="leave out different rows"):
        step_loss(module, (), {name: Split(value) for name, value in rows.items()})


def kinds_of_one_loss() -> None:
    """The same code returns a pair or a mean, by an argument, a closure, or hidden state."""
    tokens, labels = data()
    module = built(Scaled)
    call: dict[str, Any] = {"tokens": Split(tokens), "labels": Split(labels)}
    want = token_mean(module(tokens), labels).item()
    for pair in (True, False):
        for loss in (functools.partial(flexible, pair=pair), closing_over(pair)):
            assert math.isclose(step_loss(module, (), call, loss), want, rel_tol=1e-5)
    assert math.isclose(step_loss(module, (), call, Fickle()), want, rel_tol=1e-5)
    Fickle.pair = False
    with pytest.raises(ValueError, match="in an earlier call and a mean now"):
        step_loss(module, (), call, Fickle())
    for Fickle.pair in (False, True):
        assert math.isclose(step_loss(module, (), call, Fickle()), want, rel_tol=1e-5)
    if dist.get_rank() == 1:
        forget(module)
    # One rank remembers nothing, so all of them probe again; none is left alone in a forward.
    assert math.isclose(step_loss(module, (), call, token_mean), want, rel_tol=1e-5)


def refused() -> None:
    tokens, labels = data()
    call: dict[str, Any] = {"tokens": Split(tokens)}
    bad: list[tuple[Any, dict[str, Any]]] = [
        (ignoring_0, {"labels": Split(labels)}),
        (of_targets, {"targets": Split(labels)}),
        (contrastive, {}),
    ]
    for loss, more in bad:
        with pytest.raises(ValueError, match=r"labels=, masked by -100, or pass loss= a function that returns \(sum"):
            step_loss(built(Scaled), (), {**call, **more}, loss)
    for extra in ({"num_items_in_batch": 20}, {"num_items_in_batch": None}):
        batch = deal((), {**call, "labels": Split(labels), **extra}, 3)[dist.get_rank()]
        if extra["num_items_in_batch"] is None:
            assert loss_share(built(Counting), batch).weight == int((labels != -100).sum())
            continue
        with pytest.raises(ValueError, match="num_items_in_batch is computed by raysharding"):
            loss_share(built(Counting), batch)


def run_all() -> None:
    other_reductions()
    labels_by_position()
    positions_first()
    unanswered_questions()
    kinds_of_one_loss()
    refused()


@pytest.mark.timeout(60)
def test_shares_add_up_to_one_process_or_are_refused() -> None:
    pytest.importorskip("transformers")
    run_ranks(3, run_all, timeout_s=50)


def test_identity_tells_settings_apart_and_nothing_else() -> None:
    def made(reduction: str, smoothing: float) -> Callable[[], Any]:
        return lambda: (reduction, smoothing)

    assert identity(made("sum", 0.1)) == identity(made("sum", 0.2))
    assert identity(made("sum", 0.1)) != identity(made("mean", 0.1))
    losses = [nn.CrossEntropyLoss(torch.rand(VOCAB), ignore_index=index) for index in (0, 0, 1)]
    assert identity(losses[0]) == identity(losses[1]) != identity(losses[2])
    assert len({identity(loss) for loss in losses}) == 2
    holder: list[Any] = []
    holder.append(lambda: holder)
    hash(identity(holder[0]))
