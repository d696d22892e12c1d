"""Losses by form: those that are read at every step and those that are refused, and batches for them.

Every loss takes the scores of `Scores`, [rows, length, classes], and the rows; one process computes it on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training.training_cases import Case
from tests.distributed.training.training_cases import Rows as Tensors

CLASSES = 5
NUM_ROWS = 7


class Scores(nn.Module):
    """Scores of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return scores


class Rows:
    """The columns of a batch by name, as a loss gets them."""

    labels: torch.Tensor  # -100 does not count
    classes: torch.Tensor  # one a row; -100 does not count
    target: torch.Tensor  # above 0, below 1
    kept: torch.Tensor  # 1.0 where a label counts
    signs: torch.Tensor  # 1.0 or -1.0, one a row
    chances: torch.Tensor  # of each class
    weights: torch.Tensor  # one a row
    word: torch.Tensor  # two classes a row, none of them 0

    def __init__(self, columns: Tensors) -> None:
        vars(self).update(columns)


def batch(kind: str, seed: int = 0) -> Tensors:
    """Seven rows: `open` without masks; `uneven`, masked in part; `sparse`, in which nothing of the first five counts.

    They differ in length, too. `equal`: all rows are the same, and nothing is masked.
    """
    numbers = torch.Generator().manual_seed(100 * seed + sum(map(ord, kind)))
    length = {"open": 4, "equal": 4, "uneven": 5, "sparse": 3}[kind]

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (NUM_ROWS, *shape), generator=numbers)

    labels, classes = whole(0, CLASSES, length), whole(0, CLASSES)
    if kind == "uneven":
        labels[0, 1:] = labels[1, :2] = labels[5] = labels[6, 0] = -100
        classes[1] = classes[4] = classes[5] = -100
    if kind == "sparse":
        labels[:5] = labels[6, :1] = classes[:5] = -100
    columns = {
        "tokens": whole(0, 9, length),
        "labels": labels,
        "classes": classes,
        "target": torch.rand(NUM_ROWS, length, generator=numbers) * 0.9 + 0.05,
        "signs": whole(0, 2).float() * 2 - 1,
        "chances": torch.randn(NUM_ROWS, length, CLASSES, generator=numbers).softmax(-1),
        "weights": torch.ones(NUM_ROWS) if kind in ("open", "equal") else torch.rand(NUM_ROWS, generator=numbers) + 0.5,
        "word": whole(1, CLASSES, 2),
    }
    if kind == "equal":
        columns = {name: value[:1].repeat(NUM_ROWS, *[1] * (value.ndim - 1)) for name, value in columns.items()}
    # The last rows count in every batch, so that fewer rows have something that does.
    return {**columns, "kept": (columns["labels"] != -100).float()}


def last_rows(columns: Tensors, num_rows: int) -> Tensors:
    return {name: value[-num_rows:] for name, value in columns.items()}


Loss = Callable[[torch.Tensor, Rows], Any]


@dataclass(frozen=True)
class Form:
    """A loss."""

    of: Loss
    dim: int = 0
    """Where the batch has its rows."""
    several: bool = False
    """True for terms with counts of their own, whose ratio is not the same in all parts of a batch."""
    is_pairs: bool = False
    """True for one that returns pairs of sum and count."""

    def __call__(self, output: torch.Tensor, **columns: torch.Tensor) -> Any:
        return self.of(output, Rows(columns))

    @property
    def case(self) -> Case:
        """The loss of scores."""
        return Case(Scores, loss=self, dim=self.dim)


def forms(losses: dict[str, Loss | Form]) -> dict[str, Form]:
    return {name: loss if isinstance(loss, Form) else Form(loss) for name, loss in losses.items()}


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.0, 0.7])
"""Of each class; one of them does not count."""
OF_CLASS = torch.tensor([0.5, 1.5, 1.0, 2.0, 0.25])
POSITIVE = torch.tensor(3.0)


def weight(output: torch.Tensor) -> torch.Tensor:
    return WEIGHT.to(output.device)


def of_class(output: torch.Tensor) -> torch.Tensor:
    return OF_CLASS.to(output.device)


def ce(output: torch.Tensor, rows: Rows, **options: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), rows.labels.flatten(), **options)


def nll(output: torch.Tensor, rows: Rows, **options: Any) -> torch.Tensor:
    return F.nll_loss(output.log_softmax(-1).flatten(0, 1), rows.labels.flatten(), **options)


def image(output: torch.Tensor) -> torch.Tensor:
    """Scores as those of an image's pixels: [rows, classes, height, width]."""
    return output.transpose(1, 2).unsqueeze(-1)


def values(output: torch.Tensor) -> torch.Tensor:
    return output[..., 0]


def chances(output: torch.Tensor) -> torch.Tensor:
    return output[..., 0].sigmoid()


def ctc(output: torch.Tensor, rows: Rows, reduction: str) -> torch.Tensor:
    num_rows, length = output.shape[:2]
    lengths = torch.full((num_rows,), length), rows.word[:, 0] % 2 + 1
    scores = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, rows.word, *lengths, reduction=reduction, zero_infinity=True)


def triplet(output: torch.Tensor, rows: Rows, **options: Any) -> torch.Tensor:
    return F.triplet_margin_loss(output[:, 0], output[:, 1], output[:, 2], **options)


def multi_labels(rows: Rows) -> torch.Tensor:
    """Classes of each row, then -1."""
    return F.pad(rows.word, (0, CLASSES - 2), value=-1)


# torch's stubs lack the weights of these.
WEIGHTED: dict[str, Callable[..., torch.Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


def in_place(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    loss = ce(output, rows) * 1.0
    loss += values(output).square().mean()
    loss *= 2
    loss -= 0.5
    loss /= 4
    return loss


def from_zero(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    loss = output.new_zeros(())
    loss += ce(output, rows)
    loss += values(output).square().mean()
    return loss


def python_sum(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    means = [ce(output, rows), F.mse_loss(values(output), rows.target), output.square().mean()]
    return torch.as_tensor(sum(means) / len(means))


def changed_later(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    constant = torch.ones(())
    loss = F.mse_loss(values(output), rows.target) + constant
    constant += 5
    return loss


def none_then_means(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    losses = ce(output, rows, reduction="none").view(rows.labels.shape)
    return losses.sum(1).mean()


def masked_sum(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return (values(output).square() * rows.kept).sum()


def weighted_ce(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Sum over the rows that count, each with a weight of its own."""
    losses = F.cross_entropy(output.mean(1), rows.classes, reduction="none")
    return (losses * rows.weights).sum()


_READ: dict[str, Loss | Form] = {
    # torch's loss functions.
    "cross_entropy": ce,
    "cross_entropy of a module": lambda o, r: nn.CrossEntropyLoss()(o.transpose(1, 2), r.labels),
    "cross_entropy of rows": lambda o, r: F.cross_entropy(o.mean(1), r.classes),
    "cross_entropy, shifted": lambda o, r: F.cross_entropy(o[:, :-1].transpose(1, 2), r.labels[:, 1:]),
    "cross_entropy, ignore_index=0": Form(
        lambda o, r: F.cross_entropy(o.flatten(0, 1), r.labels.clamp(min=0).flatten(), ignore_index=0)
    ),
    "cross_entropy, weight": lambda o, r: ce(o, r, weight=weight(o)),
    "cross_entropy, weight, rows": lambda o, r: F.cross_entropy(o.mean(1), r.classes, weight=of_class(o)),
    "cross_entropy, smoothing": lambda o, r: ce(o, r, label_smoothing=0.1),
    "cross_entropy, weight, smoothing": lambda o, r: ce(o, r, weight=of_class(o), label_smoothing=0.2),
    "cross_entropy, weight 0, smoothing": lambda o, r: ce(o, r, weight=weight(o), label_smoothing=0.2),
    "cross_entropy, images": lambda o, r: F.cross_entropy(image(o), r.labels.unsqueeze(-1)),
    "cross_entropy, images, 255": Form(
        lambda o, r: F.cross_entropy(image(o), torch.where(r.labels < 0, 255, r.labels).unsqueeze(-1), ignore_index=255)
    ),
    "cross_entropy, images, weight, smoothing": Form(
        lambda o, r: F.cross_entropy(image(o), r.labels.unsqueeze(-1), weight=of_class(o), label_smoothing=0.1)
    ),
    "cross_entropy, probabilities": lambda o, r: F.cross_entropy(o.flatten(0, 1), r.chances.flatten(0, 1)),
    "cross_entropy, probabilities, weight, smoothing": Form(
        lambda o, r: F.cross_entropy(
            o.transpose(1, 2), r.chances.transpose(1, 2), weight=of_class(o), label_smoothing=0.1
        )
    ),
    "nll_loss": nll,
    "nll_loss, weight": lambda o, r: nll(o, r, weight=weight(o)),
    "nll_loss, images": lambda o, r: F.nll_loss(image(o).log_softmax(1), r.labels.unsqueeze(-1)),
    "mse_loss": lambda o, r: F.mse_loss(values(o), r.target),
    "mse_loss, weight": lambda o, r: WEIGHTED["mse"](values(o), r.target, weight=r.target),
    "mse_loss, masked by weight": lambda o, r: WEIGHTED["mse"](values(o), r.target, weight=r.kept),
    "mse_loss, both with a gradient": lambda o, r: F.mse_loss(o[..., 0], o[..., 1]),
    "l1_loss": lambda o, r: F.l1_loss(values(o), r.target),
    "l1_loss, weight": lambda o, r: WEIGHTED["l1"](values(o), r.target, weight=r.target),
    "smooth_l1_loss": lambda o, r: F.smooth_l1_loss(values(o), r.target, beta=0.3),
    "huber_loss": lambda o, r: F.huber_loss(values(o), r.target, delta=0.3),
    "huber_loss, weight": lambda o, r: WEIGHTED["huber"](values(o), r.target, delta=0.3, weight=r.target),
    "binary_cross_entropy": lambda o, r: F.binary_cross_entropy(chances(o), r.target),
    "binary_cross_entropy, weight": lambda o, r: F.binary_cross_entropy(chances(o), r.target, weight=r.kept),
    "binary_cross_entropy_with_logits": lambda o, r: F.binary_cross_entropy_with_logits(values(o), r.target),
    "binary_cross_entropy_with_logits, pos_weight": Form(
        lambda o, r: F.binary_cross_entropy_with_logits(values(o), r.target.round(), pos_weight=POSITIVE)
    ),
    "binary_cross_entropy_with_logits, weight": Form(
        lambda o, r: F.binary_cross_entropy_with_logits(values(o), r.target, weight=r.kept, pos_weight=POSITIVE)
    ),
    "kl_div": lambda o, r: F.kl_div(o.log_softmax(-1), r.chances),
    "kl_div, batchmean": lambda o, r: F.kl_div(o.log_softmax(-1), r.chances, reduction="batchmean"),
    "kl_div, batchmean of tokens": Form(
        lambda o, r: F.kl_div(
            o.log_softmax(-1).flatten(0, 1), r.chances.flatten(0, 1).log(), reduction="batchmean", log_target=True
        )
    ),
    "poisson_nll_loss": lambda o, r: F.poisson_nll_loss(values(o), r.word.sum(1, keepdim=True).expand_as(r.labels)),
    "poisson_nll_loss, full": lambda o, r: F.poisson_nll_loss(chances(o), r.target * 5, log_input=False, full=True),
    "gaussian_nll_loss": lambda o, r: F.gaussian_nll_loss(o[..., 0], r.target, o[..., 1].exp()),
    "gaussian_nll_loss, full, one variance a row": Form(
        lambda o, r: F.gaussian_nll_loss(o[..., 0], r.target, o[..., 1].exp().mean(1), full=True)
    ),
    "soft_margin_loss": lambda o, r: F.soft_margin_loss(o[:, 0, 0], r.signs),
    "hinge_embedding_loss": lambda o, r: F.hinge_embedding_loss(o[:, 0, 0], r.signs),
    "margin_ranking_loss": lambda o, r: F.margin_ranking_loss(o[:, 0, 0], o[:, 0, 1], r.signs, margin=0.3),
    "multilabel_soft_margin_loss": Form(
        lambda o, r: F.multilabel_soft_margin_loss(o[:, 0], r.chances[:, 0].round(), weight=of_class(o))
    ),
    "multilabel_margin_loss": lambda o, r: F.multilabel_margin_loss(o[:, 0], multi_labels(r)),
    "multi_margin_loss": lambda o, r: F.multi_margin_loss(o[:, 0], r.word[:, 0], p=2, margin=0.7, weight=of_class(o)),
    "cosine_embedding_loss": lambda o, r: F.cosine_embedding_loss(o[:, 0], o[:, 1], r.signs, margin=0.2),
    "triplet_margin_loss": triplet,
    "triplet_margin_loss, swap": lambda o, r: triplet(o, r, margin=0.4, swap=True),
    "triplet_margin_with_distance_loss": lambda o, r: F.triplet_margin_with_distance_loss(o[:, 0], o[:, 1], o[:, 2]),
    "ctc_loss": lambda o, r: ctc(o, r, "mean"),
    "ctc_loss, sum": lambda o, r: ctc(o, r, "sum"),
    "ctc_loss, mean of none": lambda o, r: ctc(o, r, "none").mean(),
    "cross_entropy().mean()": lambda o, r: ce(o, r).mean(),
    # mean() over what keeps rows apart.
    "squares": lambda o, r: (values(o) - r.target).square().mean(),
    "mean of means": lambda o, r: (o.mean(dim=(1, 2)) - r.target[:, 0]).square().mean(),
    "mean over all dims": lambda o, r: o.square().mean((0, 1, 2)),
    "mean over one dim after another": lambda o, r: o.square().mean(2).mean(1).mean(0),
    "torch.mean": lambda o, r: torch.mean(o.abs(), dim=(0, 1, 2), keepdim=True).squeeze(),
    "gather": lambda o, r: -o.log_softmax(-1).gather(-1, r.word[:, :1, None]).mean(),
    "gather, sums of tokens": Form(
        lambda o, r: -o.log_softmax(-1).gather(2, r.labels.clamp(min=0)[..., None]).squeeze(2).sum(1).mean()
    ),
    "none, sums, mean": none_then_means,
    "none, mean": lambda o, r: F.cross_entropy(o.transpose(1, 2), r.labels, reduction="none").mean(),
    "normalize": lambda o, r: (1 - (F.normalize(o[:, 0], dim=-1) * F.normalize(o[:, 1], dim=-1)).sum(-1)).mean(),
    "cosine_similarity": lambda o, r: 1 - F.cosine_similarity(o[:, 0], o[:, 1], dim=-1).mean(),
    "softplus": lambda o, r: F.softplus(o[:, 0, 0] - o[:, 1, 0]).mean(),
    "logsigmoid": lambda o, r: -F.logsigmoid(0.1 * (o[:, 0].sum(-1) - o[:, 1].sum(-1))).mean(),
    "entropy": lambda o, r: -(o.softmax(-1) * o.log_softmax(-1)).sum(-1).mean(),
    "logsumexp": lambda o, r: o.logsumexp(-1).square().mean(),
    "norm": lambda o, r: o.flatten(1).norm(dim=1).mean(),
    "amax": lambda o, r: (o.amax(-1) - o.amin(-1)).mean(),
    "max, topk": lambda o, r: (o.max(-1).values.sum(1) - o.topk(2, dim=-1).values[..., 1].mean(1)).mean(),
    "cumsum": lambda o, r: values(o).cumsum(1).square().mean(),
    "shifts": lambda o, r: (o[:, 1:] - o[:, :-1]).abs().mean(),
    "halves of the length": lambda o, r: (o[..., :2].mean(-1) - o[..., 2:4].mean(-1)).square().mean(),
    "transposes": lambda o, r: o.transpose(0, 1).transpose(1, 2).softmax(1).square().mean(),
    "permute, flatten": lambda o, r: o.permute(1, 0, 2).flatten(0, 1).logsumexp(1).mean(),
    "flatten": lambda o, r: o.flatten().square().mean(),
    "views": lambda o, r: o.reshape(-1, CLASSES).log_softmax(-1).view(len(o), -1, CLASSES).sum(1).square().mean(),
    "stack of rows": lambda o, r: torch.stack([o[:, 0], o[:, 1]], dim=1).square().sum(1).mean(),
    "cat of rows": lambda o, r: torch.cat([o[:, :1], o[:, 1:].tanh()], dim=1).square().mean(),
    "time first": lambda o, r: (o.transpose(0, 1) - 0.5).square().sum(0).mean(),
    "rows in dim 1": Form(lambda o, r: (values(o) - r.target).square().mean(), dim=1),
    "rows in dim 1, cross_entropy": Form(ce, dim=1),
    "rows in dim 1, sums over time": Form(lambda o, r: o.square().sum(0).sqrt().mean(), dim=1),
    "a cast": lambda o, r: (o.float() - r.chances.float()).square().mean(),
    # Linear combinations.
    "a factor": lambda o, r: 0.3 * ce(o, r),
    "a quotient": lambda o, r: ce(o, r) / 7,
    "a 0-dim factor": lambda o, r: ce(o, r) * torch.tensor(0.3),
    "a 0-dim quotient": lambda o, r: ce(o, r) / torch.tensor(0.7),
    "a factor inside": lambda o, r: (torch.tensor(0.3) * (values(o) - r.target)).square().mean(),
    "a constant": lambda o, r: ce(o, r) + 3,
    "a constant before": lambda o, r: torch.tensor(2.0) - ce(o, r) * 2,
    "rsub": lambda o, r: 1 - values(o).tanh().mean(),
    "add with alpha": lambda o, r: torch.add(ce(o, r), torch.tensor(0.5), alpha=3),
    "sub with alpha": Form(lambda o, r: torch.sub(ce(o, r), values(o).square().mean(), alpha=0.3), several=True),
    "a sum": Form(lambda o, r: ce(o, r) + 0.1 * F.mse_loss(values(o), r.target), several=True),
    "a difference": Form(lambda o, r: values(o).square().mean() - 0.5 * nll(o, r, weight=weight(o)), several=True),
    "python's sum": Form(python_sum, several=True),
    "stack, mean": Form(lambda o, r: torch.stack([ce(o, r), values(o).square().mean()]).mean(), several=True),
    "stack, sum": Form(lambda o, r: torch.stack([ce(o, r), o.abs().mean()]).sum(), several=True),
    "cat, sum": Form(lambda o, r: torch.cat([ce(o, r).view(1), o.abs().mean().reshape(1)]).sum(), several=True),
    "in place": Form(in_place, several=True),
    "from a zero, in place": Form(from_zero, several=True),
    "a constant that is changed later": changed_later,
    "one term twice": lambda o, r: (lambda mean: mean + 0.5 * mean)(ce(o, r)),
    "terms that have the same count": lambda o, r: values(o).square().mean() + (o[..., 1] - r.target).abs().mean(),
    "double": lambda o, r: ce(o, r).double() * 2,
    "of shape [1]": lambda o, r: ce(o, r).reshape(1),
    "a detached factor's own value": lambda o, r: ce(o, r) * torch.tensor(0.5, requires_grad=True).detach(),
    # What the caller says.
    "(sum, count)": Form(lambda o, r: (masked_sum(o, r), r.kept.sum()), is_pairs=True),
    "(sum, number)": Form(lambda o, r: (values(o).square().sum(), r.target.numel()), is_pairs=True),
    "(sum, count of whole numbers)": Form(
        lambda o, r: (ce(o, r, reduction="sum"), (r.labels != -100).sum()), is_pairs=True
    ),
    "(sum, None)": Form(lambda o, r: (masked_sum(o, r), None), is_pairs=True),
    "weights of rows": Form(lambda o, r: (weighted_ce(o, r), r.weights.sum()), is_pairs=True),
    "pairs": Form(
        lambda o, r: [(ce(o, r, reduction="sum"), r.kept.sum()), (0.1 * o.square().sum(), len(o))],
        several=True,
        is_pairs=True,
    ),
    "a pair and a sum": Form(
        lambda o, r: [(masked_sum(o, r), r.kept.sum()), (0.01 * o.abs().sum(), None)], several=True, is_pairs=True
    ),
}
READ = forms(_READ)
"""Form → loss, which is that of one process at any number of ranks."""


class Doubled(torch.autograd.Function):
    """A custom function: nobody can see what it does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def doubled(value: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Doubled.apply(value)  # type: ignore[no-untyped-call]
    return out


def infonce(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    queries, keys = F.normalize(output[:, 0], dim=-1), F.normalize(output[:, 1], dim=-1)
    return F.cross_entropy(queries @ keys.T / 0.3, torch.arange(len(output)))


def pairwise_cosine(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    scores = F.cosine_similarity(output[:, 0, None], output[None, :, 1], dim=-1)
    return F.cross_entropy(scores / 0.3, torch.arange(len(output)))


def reentrant(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return torch.as_tensor(checkpoint(lambda scores: ce(scores, rows), output, use_reentrant=True))


def of_a_pair(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    """As DPO's, with the rows of the chosen before those of the rejected."""
    parts = output.log_softmax(-1).mean(dim=(1, 2)).chunk(2)
    return -F.logsigmoid(parts[0][: len(parts[-1])] - parts[-1]).mean()


_REFUSED: dict[str, Loss | Form] = {
    # A sum, whatever divides it.
    "sum / mask.sum()": lambda o, r: ce(o, r, reduction="sum") / (r.labels != -100).sum(),
    "sum / mask.sum().clamp(min=1)": lambda o, r: masked_sum(o, r) / r.kept.sum().clamp(min=1),
    "sum / len": lambda o, r: o.square().sum() / len(o),
    "sum / numel": lambda o, r: o.square().sum() / o.numel(),
    "sum / constant": lambda o, r: o.square().sum() / 1000,
    "sum * constant": lambda o, r: 1e-3 * o.square().sum(),
    "bare sum": lambda o, r: (values(o) - r.target).square().sum(),
    "sum of sums": lambda o, r: o.square().sum(2).sum(1).sum(0),
    "sum of means": lambda o, r: o.square().mean(2).mean(1).sum(),
    "reduction='sum'": lambda o, r: F.mse_loss(values(o), r.target, reduction="sum"),
    "mean + sum": lambda o, r: ce(o, r) + 0.01 * o.abs().sum(),
    "sum of the mean's loss": lambda o, r: F.cross_entropy(o.mean(1), r.word[:, 0], reduction="sum") / len(o),
    "stack of row means, sum": lambda o, r: torch.stack([o.mean((1, 2)), o.abs().mean((1, 2))]).sum(),
    "cat of row means, sum": lambda o, r: torch.cat([o.mean((1, 2)), o.abs().mean((1, 2))]).sum(),
    "cat of a mean and row means": lambda o, r: torch.cat([o.mean().view(1), o.abs().mean((1, 2))]).mean(),
    # Weights, masks and advantages.
    "masked mean": lambda o, r: (values(o).square() * r.kept).mean(),
    "masked mean / mean of the mask": lambda o, r: (values(o).square() * r.kept).mean() / r.kept.mean(),
    "weights": lambda o, r: (F.cross_entropy(o.mean(1), r.word[:, 0], reduction="none") * r.weights).mean(),
    "weights / their mean": lambda o, r: (o.square().mean((1, 2)) * (r.weights / r.weights.mean())).mean(),
    "advantages": lambda o, r: -(o.log_softmax(-1)[:, 0, 0] * r.signs).mean(),
    "division by weights": lambda o, r: (o.square().mean((1, 2)) / r.weights).mean(),
    "sum of means over what counts": Form(
        lambda o, r: ((values(o).square() * r.kept).sum(1) / r.kept.sum(1).clamp(min=1)).mean()
    ),
    "where": lambda o, r: torch.where(r.kept > 0, values(o).square(), 0.0).mean(),
    "masked_fill": lambda o, r: values(o).square().masked_fill(r.kept == 0, 0.0).mean(),
    "whole numbers inside": lambda o, r: (values(o).square().sum(1) / (r.labels != -100).sum()).mean(),
    # What combines rows before the last reduction.
    "softmax of a squeezed row": lambda o, r: o.mean(1).squeeze(0).log_softmax(0).mean(),
    "cumsum of a squeezed row": lambda o, r: o.mean(1).squeeze().cumsum(0).mean(),
    "mean(0).sum()": lambda o, r: o.square().mean(0).sum(),
    "mean(0).square().mean()": lambda o, r: o.mean(0).square().mean(),
    "sum(0).mean()": lambda o, r: o.square().sum(0).mean(),
    "softmax over rows": lambda o, r: o.log_softmax(0).square().mean(),
    "logsumexp over rows": lambda o, r: o.logsumexp(0).mean(),
    "cumsum over rows": lambda o, r: o.cumsum(0).square().mean(),
    "flip": lambda o, r: (o.flip(0) * o).mean(),
    "roll": lambda o, r: (o.roll(1, 0) - o).square().mean(),
    "sort of rows": lambda o, r: (o[:, 0, 0].sort().values - 1).square().mean(),
    "std of rows": lambda o, r: o.flatten(1).var(0, unbiased=False).mean(),
    "centred": lambda o, r: (o - o.mean(0)).square().mean(),
    "infonce": infonce,
    "similarities": lambda o, r: (o[:, 0] @ o[:, 1].T).square().mean(),
    "cdist": lambda o, r: torch.cdist(o[:, 0], o[:, 1]).mean(),
    "einsum": lambda o, r: torch.einsum("rc,sc->rs", o[:, 0], o[:, 1]).mean(),
    "pairwise differences": lambda o, r: (o[:, 0, None] - o[None, :, 0]).square().mean(),
    "pairwise cosine": pairwise_cosine,
    "rows in front of rows": lambda o, r: o.unsqueeze(0).sum(1).abs().mean(),
    "a view in front of the rows": lambda o, r: o.reshape(1, len(o), -1).amax(1).mean(),
    "a view that mixes rows": lambda o, r: values(o).reshape(o.shape[1], -1).sum(1).square().mean(),
    "a column less a row": lambda o, r: (o.mean((1, 2))[:, None] - r.target[:, 0]).square().mean(),
    "batch_norm": lambda o, r: F.batch_norm(o.transpose(1, 2), None, None, training=True).square().mean(),
    "cat along the rows": lambda o, r: torch.cat([o, o.tanh()]).square().mean(),
    # Parts of the rows.
    "chunk": of_a_pair,
    "unbind": lambda o, r: o.unbind(0)[0].square().mean(),
    "select": lambda o, r: o[0].square().mean(),
    "slice": lambda o, r: o[: (len(o) + 1) // 2].square().mean(),
    "every other row": lambda o, r: o[::2].square().mean(),
    "a mask of rows": lambda o, r: values(o)[r.kept > 0].square().mean(),
    "an index of rows": lambda o, r: o[[0, 0]].square().mean(),
    # Not linear.
    "exp": lambda o, r: ce(o, r).exp(),
    "batchmean with the rows in dim 1": Form(
        lambda o, r: F.kl_div(o.log_softmax(-1), r.chances, reduction="batchmean"), dim=1
    ),
    "a number of several rows": lambda o, r: (o - r.chances.mean().item()).square().mean(),
    "numbers of all rows": lambda o, r: (o - float(r.chances.numpy().mean())).square().mean(),
    "rows in another order": lambda o, r: (o - r.chances.flip(0)).square().mean(),
    "class counts": Form(
        lambda o, r: F.cross_entropy(
            o.mean(1), r.classes, weight=1 / (1 + torch.bincount(r.classes.clamp(min=0), minlength=5))
        )
    ),
    "statistics with a graph": lambda o, r: (o - o.mean(0).detach()).square().mean(),
    "exp().mean()": lambda o, r: ce(o, r).exp().mean(),
    "view(1).exp().mean()": lambda o, r: ce(o, r).view(1).exp().mean(),
    "rows + mean": lambda o, r: (o.square().mean((1, 2)) + ce(o, r)).mean(),
    "sqrt": lambda o, r: F.mse_loss(values(o), r.target).sqrt(),
    "square": lambda o, r: (o.mean() - 0.3).square(),
    "abs": lambda o, r: o.mean().abs(),
    "product of means": lambda o, r: ce(o, r) * o.square().mean(),
    "quotient of means": lambda o, r: ce(o, r) / o.square().mean(),
    "1 / mean": lambda o, r: 1 / o.square().mean(),
    "max of means": lambda o, r: torch.maximum(ce(o, r), o.square().mean()),
    "clamp of a mean": lambda o, r: ce(o, r).clamp(min=0.1),
    "max of rows": lambda o, r: o.mean((1, 2)).max(),
    "norm of all": lambda o, r: o.norm(),
    "std of all": lambda o, r: o.std(),
    # What hides the loss.
    "a custom function": lambda o, r: doubled(ce(o, r)),
    "a custom function of rows": lambda o, r: doubled(values(o).square()).mean(),
    "reentrant checkpoint": reentrant,
}
REFUSED = forms(_REFUSED)
"""Form → loss that is refused on the first step, whatever the batch."""
