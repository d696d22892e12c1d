"""What the probe finds out about a loss, for losses that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raysharding.batch import RankBatch, Split, deal
from raysharding.distributed.training.labels import find_labels
from raysharding.distributed.training.loss import loss_share
from raysharding.distributed.training.loss_probe import LossTraits, find_traits
from tests.distributed.training.training_cases import (
    CASES,
    Counting,
    Guarded,
    Scaled,
    bert_classifier,
    bert_mlm,
    doubled,
    llama,
    resnet,
    shifted_mean,
    sum_and_count,
    t5,
    token_mean,
)
from tests.spawn import run_ranks


class Balanced(Counting):
    """Honours the count in one part of its loss only, as mixture-of-experts models with a balancing loss do."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        return {**output, "loss": output["loss"] + 0.01}


class Flat(Scaled):
    """An untrained head of zeros: every label costs the same, so a mean does not move with the mask."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(tokens) * 0
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class OtherMask(Scaled):
    """Leaves out label 0 and refuses -100."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten(), ignore_index=0)}


class Maps(nn.Module):
    """Segments images; 255 is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, 4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(x), labels, ignore_index=255)}


FOUND: list[tuple[Callable[[], nn.Module], str, Any, LossTraits]] = [
    (llama, "llama", None, LossTraits(honours_count=True, shifts_labels=True)),
    (llama, "llama", doubled, LossTraits(shifts_labels=True)),
    (t5, "t5", None, LossTraits()),
    (bert_mlm, "bert_mlm", None, LossTraits()),
    (bert_classifier, "bert_classifier", None, LossTraits()),
    (resnet, "resnet", None, LossTraits()),
    (Counting, "counting", None, LossTraits(honours_count=True)),
    (Balanced, "counting", None, LossTraits()),
    (Guarded, "counting", None, LossTraits(shifts_labels=True)),
    (Flat, "counting", None, LossTraits()),
    (Scaled, "token_mean", token_mean, LossTraits()),
    (Scaled, "shifted_mean", shifted_mean, LossTraits(shifts_labels=True)),
    (Scaled, "sum_and_count", sum_and_count, LossTraits(returns_pair=True)),
]


def batch_of(rows: dict[str, torch.Tensor]) -> RankBatch:
    return deal((), {key: Split(value) for key, value in rows.items()}, dist.get_world_size())[dist.get_rank()]


def run_known_losses() -> list[tuple[str, LossTraits, LossTraits]]:
    wrong = []
    for build, name, loss, expected in FOUND:
        torch.manual_seed(0)
        module = build().train()
        state = torch.get_rng_state()
        batch = batch_of(CASES[name].rows())
        traits = find_traits(module, batch, loss, find_labels(module, batch, loss))
        assert all(submodule.training for submodule in module.modules()), "the probe must leave the modes alone"
        assert torch.equal(torch.get_rng_state(), state), "the probe must not consume random numbers"
        if traits != expected:
            wrong.append((f"{build.__name__} with {loss}", traits, expected))
    return wrong


def run_other_masks() -> None:
    rows = CASES["counting"].rows()
    batch = batch_of({**rows, "labels": rows["labels"].clamp(min=1)})
    module = OtherMask()
    assert find_traits(module, batch, None, find_labels(module, batch, None)) == LossTraits()
    labels = torch.randint(0, 4, (7, 3, 3), generator=torch.Generator().manual_seed(0))
    labels[0, 1] = 255
    for masked in (labels, labels.clamp(max=3)):
        batch = batch_of({"x": torch.rand(7, 1, 3, 3), "labels": masked})
        assert loss_share(Maps(), batch).weight == int((masked != 255).sum())


def run_once() -> None:
    """The probe runs once for a model and a loss, also when the loss is a new object with the same code."""
    calls = []
    module = Scaled()
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = CASES["token_mean"].rows()
    losses = [lambda output, labels: token_mean(output, labels) for _ in range(2)]
    loss_share(module, batch_of(rows), losses[0])
    num_calls = len(calls)
    assert num_calls > 1
    loss_share(module, batch_of(rows), losses[1])
    assert len(calls) == num_calls + 1, "the forward itself"


def run_disagreement() -> None:
    """Labels of another dtype on one rank: every rank gets the error, none waits."""
    rank = dist.get_rank()
    labels = torch.ones(2, 3) if rank == 1 else torch.ones(2, 3, dtype=torch.int64)
    batch = RankBatch((), {"tokens": torch.ones(2, 3, dtype=torch.int64), "labels": labels}, 2, (2, 2, 2))
    with pytest.raises(ValueError, match=r"\['tokens', 'float', 'tokens'\]"):
        loss_share(Scaled(), batch)


def run_all() -> Any:
    wrong = run_known_losses()
    run_other_masks()
    run_once()
    run_disagreement()
    return wrong


@pytest.mark.timeout(60)
def test_the_probe_finds_what_losses_do() -> None:
    pytest.importorskip("transformers")
    for wrong in run_ranks(3, run_all, timeout_s=50):
        assert not wrong
