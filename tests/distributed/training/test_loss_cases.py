"""Losses whose reduction no first batch shows: equal to one process in each step, or refused in the first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from raysharding.batch import PerRank, RankBatch, Split, deal
from raysharding.distributed.training.losses import loss_of_batch
from raysharding.distributed.training.step import Accumulation
from tests.distributed.checks import on_ranks
from tests.distributed.training.loss_forms import CLASSES, OF_CLASS, WEIGHTED, Form, Rows, Scores, Tensors, values
from tests.distributed.training.test_losses import FormPair, sharded
from tests.distributed.training.test_training import each
from tests.distributed.training.training_cases import VOCAB, Case, batch_of, bert, part_of, segformer, tiny

pytestmark = pytest.mark.all_ranks  # most of its modules are not sharded, and have no mesh

pytest.importorskip("transformers")

Pair = partial(FormPair, lr=0.1)
on_grid = on_ranks(2, full=(1, 3, 4))


def tokens(num_rows: int, seed: int, length: int = 4) -> torch.Tensor:
    return torch.randint(0, 9, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def own(marked: dict[str, Any]) -> RankBatch:
    """This rank's part of arguments with marks of their own."""
    return deal((), marked, dist.get_world_size())[dist.get_rank()]


@on_grid
def test_segmentation() -> None:
    """Pixels of 255, which the first batch lacks, in a model's own loss."""
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.rand(5, 3, 32, 32, generator=numbers)
    whole = torch.randint(0, 5, (5, 32, 32), generator=numbers)
    some = whole.clone()
    some[0], some[1, :9] = 255, 255
    # Dropout and BatchNorm are not what this is about.
    pair, case = FormPair(segformer), Case(segformer, training=False)
    for labels in (whole, some, whole):
        pair.step(case, {"pixel_values": pixels, "labels": labels})


class Zero(Scores):
    """Has a head that starts at 0: every token's loss is that of chance."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def of_tokens(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), rows.labels, reduction="none")


def masked(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return (of_tokens(output, rows) * rows.kept).sum()


def of_rows(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Means over the tokens of a row that count."""
    return (of_tokens(output, rows) * rows.kept).sum(1) / rows.kept.sum(1)


def weighted(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return F.cross_entropy(output.mean(1), rows.classes, reduction="none") * rows.weights


def padded_by_0(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    labels = (rows.labels % (CLASSES - 1) + 1) * rows.kept.long()
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0)


def masked_error(output: torch.Tensor, rows: Rows) -> torch.Tensor:
    return ((values(output) - rows.target).square() * rows.kept).sum() / rows.kept.sum()


LATER: dict[str, tuple[list[Callable[[torch.Tensor, Rows], Any]], ...]] = {
    "token mean of a mask": (
        [lambda o, r: (masked(o, r), r.kept.sum())],
        [lambda o, r: masked(o, r) / r.kept.sum()],
    ),
    "mean of means": (
        [lambda o, r: of_tokens(o, r).mean(1).mean(), lambda o, r: (of_rows(o, r).sum(), len(o))],
        [lambda o, r: of_rows(o, r).mean()],
    ),
    "masked mse": ([lambda o, r: WEIGHTED["mse"](values(o), r.target, weight=r.kept)], [masked_error]),
    "padding of 0": ([padded_by_0], []),
    "weights of rows": (
        [lambda o, r: (weighted(o, r).sum(), r.weights.sum())],
        [lambda o, r: weighted(o, r).mean(), lambda o, r: weighted(o, r).sum() / r.weights.sum()],
    ),
}
"""Losses that are read, and those that are refused, of masks and weights that leave nothing out in the first batch."""


def columns_of(seed: int, is_whole: bool) -> Tensors:
    kept = torch.ones(5, 4)
    if not is_whole:
        kept[0, 1:] = kept[1, 2:] = kept[-1, 0] = 0
    return {
        "tokens": tokens(5, seed),
        "labels": tokens(5, seed + 7) % CLASSES,
        "classes": tokens(5, seed + 3)[:, 0] % CLASSES,
        "target": floats(5, 4, seed=seed),
        "kept": kept,
        "weights": torch.ones(5) if is_whole else torch.tensor([4.0, 0.1, 0.1, 1.0, 0.5]),
    }


def check_later(name: str, build: Callable[[], nn.Module]) -> None:
    read, refused = LATER[name]
    whole, some = columns_of(0, True), columns_of(1, False)
    for form, columns in itertools.product(map(Form, refused), (whole, some)):
        Pair(build).refuses(form.case, columns)
    for form in map(Form, read):  # what counts in part comes first, in one part
        pair = Pair(build)
        for columns in (some, columns_of(2, False), whole):
            pair.take(form.case, columns)
    for form, num_parts in itertools.product(map(Form, read), (1, 2)):
        pair = Pair(build)
        # In parts, what counts in part comes first.
        for columns in (whole, some, columns_of(2, False), whole)[num_parts - 1 :]:
            pair.take(form.case, columns, num_parts=num_parts)


@on_grid
def test_masks_and_weights_of_later_batches() -> None:
    each(check_later, itertools.product(LATER, (Scores, Zero)))


def of_classes(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss(weight=OF_CLASS)(output.mean(1), classes)


@on_grid
def test_class_weights() -> None:
    """One row a rank, two of one class a rank, two batches of one class and then a mix."""
    size = dist.get_world_size()
    one = torch.tensor([0, 2, 1, 3])[:size]
    two = one.repeat_interleave(2)
    mixed = [torch.full_like(two, 2), torch.full_like(two, 0), torch.arange(2 * size) % CLASSES]
    for sequence in ([one], [two], mixed):
        pair = Pair()
        for classes in sequence:
            pair.take(Case(Scores, loss=of_classes), {"tokens": tokens(len(classes), 3), "classes": classes})


@on_grid
def test_balanced_mixture() -> None:
    """Mixtral: its main term is one process's; the balancing loss is each rank's own, by tokens, counted once."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    pair, size = (
        FormPair(partial(tiny, "MixtralForCausalLM", **sizes, **heads, **router), lr=0.05),
        dist.get_world_size(),
    )

    def whole(twin: nn.Module, columns: Tensors) -> torch.Tensor:
        parts = [one.kwargs for one in deal((), {name: Split(value) for name, value in columns.items()}, size)]
        out = twin(**columns)
        balance = sum(twin(**part).aux_loss * part["input_ids"].numel() for part in parts)
        return torch.as_tensor(out.loss + 0.3 * (balance / columns["input_ids"].numel() - out.aux_loss))

    for seed in range(2):
        ids = torch.randint(0, VOCAB, (5, 6), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[0, 2:] = labels[1] = -100
        pair.take(Whole(Scores, whole=whole), {"input_ids": ids, "labels": labels})


@dataclass(frozen=True)
class Whole(Case):
    """Has the loss of one process, of a module and all rows."""

    whole: Callable[[nn.Module, Tensors], torch.Tensor] | None = None

    def reference(self, module: nn.Module, rows: Tensors) -> torch.Tensor:
        assert self.whole is not None
        return self.whole(module, rows)


@on_grid
def test_balanced_switch() -> None:
    """An evaluation of a mixture with two balancing losses, both of which have no graph there, counts both."""
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2}
    experts = {"num_heads": 2, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    router = {"router_z_loss_coef": 0.1, "router_aux_loss_coef": 0.3, "router_jitter_noise": 0.0}
    fields = {**sizes, **experts, **router, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    torch.manual_seed(0)
    twin = tiny("SwitchTransformersForConditionalGeneration", **fields).eval()
    ids = torch.randint(1, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    # The same rows on every rank: its own balancing losses are those of one process.
    batch = batch_of({name: torch.cat([ids] * dist.get_world_size()) for name in ("input_ids", "labels")})
    batch = replace(batch, wrapped_kwargs={**batch.wrapped_kwargs, "output_router_logits": True})
    done = Accumulation()
    done.add(loss_of_batch(sharded(twin), batch, with_backward=False))
    expected = twin(input_ids=ids, labels=ids, output_router_logits=True).loss.item()
    assert abs(done.loss() - expected) < 1e-4


def similarities(queries: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(queries)) + start, reduction="sum")


@on_grid
def test_contrastive() -> None:
    """Terms that use other rows: refused as a mean; right where the loss gathers the rows of all ranks."""

    def own_rows(output: torch.Tensor) -> torch.Tensor:
        return similarities(output[:, 0], output[:, 1], 0) / len(output)

    def mean_of_own_rows(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output)))

    def all_rows(output: torch.Tensor) -> Any:
        keys = torch.cat(all_gather(output[:, 1].contiguous()))
        return similarities(output[:, 0], keys, dist.get_rank() * len(output)), len(output)

    def whole(twin: nn.Module, columns: Tensors) -> torch.Tensor:
        return own_rows(twin(columns["tokens"]))

    size = dist.get_world_size()
    for num_rows in (size, 2 * size):
        for loss in (own_rows, mean_of_own_rows):
            Pair().refuses(Case(Scores, loss=loss), {"tokens": tokens(num_rows, 0)})
        pair = Pair()
        for seed in range(2):
            pair.take(Whole(Scores, loss=all_rows, whole=whole), {"tokens": tokens(num_rows, seed)})


@on_grid
def test_two_means() -> None:
    """BERT's masked tokens and next sentences: means with counts of their own, also in parts."""
    ids = torch.randint(3, VOCAB, (7, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 1:] = labels[1] = labels[2, :4] = labels[5] = -100
    rest = {"input_ids": ids, "next_sentence_label": torch.tensor([0, 1, 1, 0, -100, 1, 0])}
    build = bert("PreTraining")
    pair = Pair(build)
    for num_parts, counted in itertools.product((1, 2, 3), (labels, ids)):
        pair.take(Case(build), {**rest, "labels": counted}, num_parts=num_parts)


def with_kl(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor, beta: Any) -> torch.Tensor:
    divergence = F.kl_div(output.log_softmax(-1), reference, reduction="none").sum(-1).mean(1)
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()) + beta * divergence.mean()


class WithKL:
    """Has its β in an attribute."""

    beta: Any = 0.0

    def __call__(self, output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return with_kl(output, labels, reference, self.beta)


@on_grid
def test_rising_beta() -> None:
    """A token mean and β times a row mean of a KL, with β from 0 upwards."""
    labels = tokens(5, 2) % CLASSES
    labels[0, 1:] = labels[1] = -100
    columns = {"tokens": tokens(5, 0), "labels": labels, "reference": floats(5, 4, CLASSES).softmax(-1)}
    box = {"beta": 0.0}
    holder, tensor = WithKL(), WithKL()

    def closure(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return with_kl(output, labels, reference, box["beta"])

    pairs = [Pair() for _ in range(4)]
    for beta in (0.0, 0.1, 0.5, 0.0, 1.0):
        box["beta"] = holder.beta = beta
        tensor.beta = torch.tensor(beta)
        losses: list[Callable[..., Any]] = [partial(with_kl, beta=beta), closure, holder, tensor]
        for (pair, loss), num_parts in itertools.product(zip(pairs, losses, strict=True), (1, 2)):
            pair.take(Case(Scores, loss=loss), columns, num_parts=num_parts)


def log_probs(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).sum(1)


@on_grid
def test_preferences() -> None:
    """DPO: `chunk(2)` is refused where the reference is the policy, too; pairs side by side stay on one rank."""

    def chunked(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        chosen, rejected = (log_probs(output, labels) - reference).chunk(2)
        return -F.logsigmoid(0.5 * (chosen - rejected)).mean()

    def margins(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        ratios = (log_probs(output, labels) - reference).view(-1, 2)
        return -F.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1]))

    def mean(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return margins(output, labels, reference).mean()

    def pair_of_sum(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> Any:
        return margins(output, labels, reference).sum(), len(output) // 2

    columns = {"tokens": tokens(8, 0), "labels": tokens(8, 1) % CLASSES}
    with torch.no_grad():
        columns["reference"] = log_probs(Pair().twin(columns["tokens"]), columns["labels"])
    for rows_per_item in (1, 2):
        Pair().refuses(Case(Scores, loss=chunked, rows_per_item=rows_per_item), columns)
    for loss, num_parts in itertools.product((mean, pair_of_sum), (1, 2)):
        pair = Pair()
        for rows in (columns, part_of(columns, 0, 6), columns):
            pair.take(Case(Scores, loss=loss, rows_per_item=2), rows, num_parts=num_parts)


@on_grid
def test_rows_of_each_rank() -> None:
    """All arguments `PerRank`, with a number of rows for each rank; class weights as many as a rank has rows."""
    counts = [CLASSES, 2, 1, 3][: dist.get_world_size()]
    ids = [tokens(count, seed) for seed, count in enumerate(counts)]
    labels = [one % CLASSES for one in ids]
    labels[0][1:, 1:] = -100

    def loss(output: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), labels, weight=weight)

    for weight in (None, OF_CLASS):
        pair, case = Pair(), Case(Scores, loss=partial(loss, weight=weight))
        for num_rows in (None, 1):
            parts = {"tokens": [one[:num_rows] for one in ids], "labels": [one[:num_rows] for one in labels]}
            whole = {name: torch.cat(values) for name, values in parts.items()}
            pair.take(case, whole, batch=own({name: PerRank(values) for name, values in parts.items()}))


class Looking(nn.Module):
    """Scores tokens by the mean of images, of which a rank may have another number than it has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()
        self.look = nn.Linear(3, CLASSES)

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(tokens) + self.look(images).mean(0)
        return scores


def of_labels(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


@on_grid
def test_images_beside_text() -> None:
    size = dist.get_world_size()
    ids, labels, images = tokens(5, 0), tokens(5, 1) % CLASSES, [floats(rank + 1, 3, seed=rank) for rank in range(size)]
    labels[0, 1:] = -100
    marked = {"tokens": Split(ids), "labels": Split(labels), "images": PerRank(images)}

    def whole(twin: nn.Module, columns: Tensors) -> torch.Tensor:
        parts = [part.kwargs for part in deal((), marked, size) if not part.is_dummy]
        return of_labels(torch.cat([twin(part["tokens"], part["images"]) for part in parts]), labels)

    pair = Pair(Looking)
    for _ in range(2):
        pair.take(Whole(Looking, loss=of_labels, whole=whole), {}, batch=own(marked))


class Distances(Scores):
    """Its output is the distance of each row from each, by an expansion of both and a reduction."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        means = super().forward(tokens).mean(1)
        one, other = torch.broadcast_tensors(means.unsqueeze(1), means.tanh().unsqueeze(0))
        return (one - other).square().sum(-1)


def mean_of_all(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def over_columns(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(-output, torch.arange(len(output)))


@on_grid
def test_rows_compared_in_the_model() -> None:
    size = dist.get_world_size()
    for num_rows, loss in itertools.product((size, 2 * size, 3 * size + 1), (mean_of_all, over_columns)):
        if num_rows > 1:
            Pair(Distances).refuses(Case(Distances, loss=loss), {"tokens": tokens(num_rows, 0)})


@on_grid
def test_the_same_rows_on_every_rank() -> None:
    """A sum counts once in a call without `Split`; each rank's, with `PerRank`."""

    def total(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), None

    def mean(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return of_labels(output, labels) + output.square().mean()

    def pairs(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return [(output.square().sum(), output.numel()), (output.abs().sum(), None)]

    columns, size = {"tokens": tokens(3, 0), "labels": tokens(3, 1) % CLASSES}, dist.get_world_size()
    pair = Pair()
    for loss in (total, mean, pairs):
        pair.take(Case(Scores, loss=loss), columns, batch=own(columns))
    whole = {name: torch.cat([value] * size) for name, value in columns.items()}
    marked = {name: PerRank([value] * size) for name, value in columns.items()}
    pair.take(Case(Scores, loss=total), whole, batch=own(marked))
