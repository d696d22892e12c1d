"""Losses composed at random, as text: of forms that are read, and of forms that are refused.

`o` is what `Scores` returns, `r` the rows; `{3}` stands for an expression with a value for each class of each token,
`{2}` for each token, `{1}` for each row, `{0}` for a scalar.
"""

from __future__ import annotations

import random
import re
from typing import Any

import torch
import torch.nn.functional as F

from tests.distributed.training.loss_forms import OF_CLASS, WEIGHT, Rows

GOOD: dict[str, list[str]] = {
    "3": [
        "o",
        "{3}.tanh()",
        "({3} * 0.5)",
        "({3} + {3})",
        "({3} * {3}.sigmoid())",
        "({3} - r.chances)",
        "{3}.log_softmax(-1)",
        "{3}.softmax(2)",
        "F.normalize({3}, dim=-1)",
        "{3}.transpose(0, 1).tanh().transpose(0, 1)",
        "{3}.permute(2, 0, 1).sin().permute(1, 2, 0)",
        "{3}.flatten(0, 1).log_softmax(1).view(o.shape)",
        "torch.stack([{3}, {3}], dim=1).sum(1)",
        "torch.stack([{3}, {3}]).mean(0)",
        "torch.cat([{3}[:, :1], {3}[:, 1:]], dim=1)",
        "{3}.cumsum(1)",
        "({3} + {2}.unsqueeze(-1))",
        "({3} - {1}[:, None, None])",
    ],
    "2": [
        "{3}[..., 0]",
        "{3}.mean(-1)",
        "{3}.logsumexp(-1)",
        "{3}.amax(2)",
        "{3}.gather(2, r.labels.clamp(min=0)[..., None]).squeeze(2)",
        "({2} - r.target)",
        "({2} + {1}.unsqueeze(1))",
        "{2}.square()",
        "{2}.tanh()",
        "F.softplus({2})",
        "F.mse_loss({2}, r.target, reduction='none')",
        "F.cross_entropy({3}.transpose(1, 2), r.labels, reduction='none')",
        "F.cross_entropy({3}.flatten(0, 1), r.labels.flatten(), reduction='none').view(r.labels.shape)",
    ],
    "1": [
        "{2}.mean(1)",
        "{2}.sum(1)",
        "{2}[:, -1]",
        "{3}.mean((1, 2))",
        "{3}.flatten(1).amax(1)",
        "({2} + 0.1).norm(dim=1)",
        "F.cosine_similarity({3}[:, 0], {3}[:, 1], dim=-1)",
        "-F.logsigmoid({1})",
        "({1} - {1})",
        "{1}.tanh()",
    ],
    "0": [
        "{3}.mean()",
        "{2}.mean()",
        "{1}.mean()",
        "torch.mean({2}, dim=(0, 1))",
        "{2}.mean(1).mean(0)",
        "F.mse_loss({2}, r.target)",
        "F.huber_loss({2}, r.target, delta=0.2)",
        "F.mse_loss({2}, r.target, weight=r.target)",
        "F.binary_cross_entropy_with_logits({2}, r.target, weight=r.kept)",
        "F.cross_entropy({3}.flatten(0, 1), r.labels.flatten())",
        "F.cross_entropy({3}.transpose(1, 2), r.labels, weight=OF_CLASS, label_smoothing=0.1)",
        "F.cross_entropy({3}.flatten(0, 1), r.labels.flatten(), weight=WEIGHT)",
        "F.nll_loss({3}.log_softmax(2).flatten(0, 1), r.labels.flatten())",
        "F.cross_entropy({3}.mean(1), r.classes)",
        "F.kl_div({3}.log_softmax(-1), r.chances, reduction='batchmean')",
        "F.soft_margin_loss({1}, r.signs)",
        "F.cosine_embedding_loss({3}[:, 0], {3}[:, 1], r.signs)",
        "({0} + {0})",
        "({0} + {0})",
        "({0} - {0})",
        "0.3 * {0}",
        "{0} / 3",
        "(1 - {0})",
        "({0} + 2)",
        "-{0}",
        "({0} * torch.tensor(0.7, dtype=torch.float64))",
        "torch.stack([{0}, {0}]).mean()",
        "torch.cat([{0}.view(1), {0}.reshape(1)]).sum()",
        "{0}.clone()",
    ],
    "pairs": [
        "({2}.sum(), r.labels.numel())",
        "(({2} * r.kept).sum(), r.kept.sum())",
        "({1}.sum(), len(o))",
        "[({1}.sum(), len(o)), (({2} * r.kept).sum(), r.kept.sum())]",
        "({1}.sum(), None)",
    ],
}
"""Kind → expressions that keep rows apart, or combine them in a way that is read."""
BAD: dict[str, list[str]] = {
    "3": [
        "({3} * r.kept[..., None])",
        "({3} / r.weights[:, None, None])",
        "({3} - {3}.mean(0))",
        "{3}.softmax(0)",
        "{3}.cumsum(0)",
        "{3}.flip(0)",
        "({3} * {3}.roll(1, 0))",
        "{3}[torch.arange(len(o)) * 0]",
        "torch.cat([{3}, {3}])",
        "torch.where(r.kept[..., None] > 0, {3}, 0.0)",
        "({3} + {0})",
        "({3} * {0})",
        "F.dropout({3}, 0.0).unsqueeze(0).sum(1).expand(o.shape)",
        "({3} / (r.labels >= 0).sum())",
    ],
    "2": ["({2} * r.kept)", "({2} / r.weights[:, None])", "({2} @ {2}.T @ {2})", "({2} - {2}.mean(0, keepdim=True))"],
    "1": [
        "({1} * r.signs)",
        "({1}[:, None] - {1}).square().mean(1)",
        "({1}.unsqueeze(0) - {1}.unsqueeze(1)).abs().mean(0)",
        "{1}.sort().values",
        "{1}.softmax(0)",
        "({1}[:, None] - r.weights).mean(1)",
        "{2}.mean(0)",
        "{2}.reshape(o.shape[1], -1).sum(1)",
        "{1}[: (len(o) + 1) // 2]",
    ],
    "0": [
        "{2}.sum()",
        "{1}.sum() / len(o)",
        "({2} * r.kept).sum() / r.kept.sum().clamp(min=1)",
        "{2}.sum() / (r.labels != -100).sum().clamp(min=1)",
        "{3}.mean(0).sum()",
        "{3}.mean(0).square().mean()",
        "{3}.chunk(2)[0].mean()",
        "{1}[0]",
        "{3}[0].mean()",
        "{1}.max()",
        "{2}.std(unbiased=False)",
        "{2}.norm()",
        "F.mse_loss({2}, r.target, reduction='sum')",
        "{0}.exp()",
        "{0}.square()",
        "{0}.abs().sqrt()",
        "({0} * {0})",
        "{0} / (1 + {0}.square())",
        "{0}.mean()",
        "{0}.sum()",
        "{0}.view(1).tanh().mean()",
        "torch.stack([{0}, {0}]).tanh().mean()",
        "torch.maximum({0}, {0})",
        "torch.cat([{1}, {1}]).sum()",
        "torch.stack([{1}, {1}]).sum()",
        "torch.cat([{0}.view(1), {1}]).mean()",
        "F.kl_div({3}.transpose(0, 1).log_softmax(-1), r.chances.transpose(0, 1), reduction='batchmean')",
    ],
    "pairs": [],
}
"""Kind → expressions that are refused, or are not those of one process where they are read by mistake."""


def composed(numbers: random.Random, *, only_good: bool) -> str:
    """Return a loss."""
    kind = "pairs" if only_good and numbers.random() < 0.1 else "0"
    text = "{" + kind + "}"
    for depth in range(40):
        place = re.search(r"\{(\w+)\}", text)
        if place is None:
            return text
        kind = place[1]
        choices = GOOD[kind]
        if not only_good and BAD[kind] and numbers.random() < 0.15:
            choices = BAD[kind]
        elif depth > 8:  # come to an end
            choices = [one for one in choices if one.count("{") == min(other.count("{") for other in choices)]
        chosen = numbers.choice(choices)
        if kind in "01" and re.search(r"^-| [*/] ", chosen):
            chosen = f"({chosen})"
        text = text[: place.start()] + chosen + text[place.end() :]
    for kind, simplest in {"3": "o", "2": "o[..., 1]", "1": "o[:, 0, 1]", "0": "o.mean()"}.items():
        text = text.replace("{" + kind + "}", simplest)
    return text


def evaluated(text: str, output: torch.Tensor, columns: dict[str, torch.Tensor]) -> Any:
    """Compute a loss that `composed` returned."""
    names = {"F": F, "torch": torch, "o": output, "r": Rows(columns)}
    return eval(text, {**names, "OF_CLASS": OF_CLASS.double(), "WEIGHT": WEIGHT.double()})
