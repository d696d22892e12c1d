"""Losses whose reduction no first batch shows: equal to one process in each step, or refused in the first."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from raysharding.batch import PerRank, RankBatch, Split, deal
from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.internals import reshard
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.losses import loss_of_batch
from raysharding.distributed.training.step import Accumulation, train_step
from raysharding.errors import UnreadableLossError
from tests.distributed.training.loss_forms import CLASSES, OF_CLASS, Scores, Tensors, value_of
from tests.distributed.training.test_training import full
from tests.distributed.training.training_cases import VOCAB, _bert_config, segformer
from tests.grid import world_sizes
from tests.spawn import device_type, run_ranks

pytestmark = pytest.mark.all_ranks  # most of its modules are not sharded, and have no mesh

TOLERANCE = 1e-6
Loss = Callable[..., Any]


class Run:
    """A sharded module and its one-process twin.

    Args:
        build: Makes the model.
        lr: Of SGD.
    """

    def __init__(self, build: Callable[[], nn.Module] = Scores, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.twin = build()
        self.module = shard_module(copy.deepcopy(self.twin), init_mesh(device_type(), Sharding()), Sharding())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=lr)
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), lr=lr)

    def step(self, own: RankBatch, loss: Loss | None, one_process: Callable[[nn.Module], Any], **options: Any) -> None:
        """A step of both, with the same loss, gradient norm and parameters.

        Args:
            own: This rank's part.
            loss: As for `train_step`.
            one_process: The loss of the twin on all rows.
            options: For `train_step`.
        """
        metrics = train_step(self.module, self.optimizer, own, loss=loss, **options)
        self.twin.train()
        self.twin_optimizer.zero_grad()
        value = value_of(one_process(self.twin))
        value.backward()
        norm = nn.utils.clip_grad_norm_(self.twin.parameters(), 1e9)
        self.twin_optimizer.step()
        assert metrics["loss"] == pytest.approx(value.item(), rel=TOLERANCE, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=5 * TOLERANCE, abs=TOLERANCE)
        reshard(self.module)
        twin = dict(self.twin.named_parameters())
        for name, parameter in self.module.named_parameters():
            assert (full(parameter) - twin[name]).abs().max().item() <= 5 * TOLERANCE, name

    def steps(self, loss: Loss, batches: Sequence[Tensors], rows_per_item: int = 1, **options: Any) -> None:
        """Steps of a loss of the tokens' scores, on all rows."""
        for columns in batches:
            rest = {name: value for name, value in columns.items() if name != "tokens"}
            whole = partial(_of_scores, loss, columns["tokens"], rest)
            self.step(split(columns, rows_per_item), loss, whole, **options)

    def refuses(self, loss: Loss, columns: Tensors, rows_per_item: int = 1) -> None:
        """The first step is refused, on every rank, and names the way out."""
        with pytest.raises(UnreadableLossError, match=r"let loss= return \(sum over the rank's rows, count\)"):
            train_step(self.module, self.optimizer, split(columns, rows_per_item), loss=loss)


def _of_scores(loss: Loss, ids: torch.Tensor, rest: Tensors, twin: nn.Module) -> Any:
    return loss(twin(ids), **rest)


def _own_loss(columns: Tensors, twin: nn.Module) -> torch.Tensor:
    return torch.as_tensor(twin(**columns).loss)


def split(columns: Tensors, rows_per_item: int = 1) -> RankBatch:
    marked = {name: Split(value, rows_per_item=rows_per_item) for name, value in columns.items()}
    return deal((), marked, dist.get_world_size())[dist.get_rank()]


def tokens(num_rows: int, seed: int, length: int = 4) -> torch.Tensor:
    return torch.randint(0, 9, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def masks(num_rows: int, length: int = 4) -> list[torch.Tensor]:
    """One that leaves nothing out, and one that leaves out much of the first rows."""
    whole = torch.ones(num_rows, length)
    some = whole.clone()
    some[0, 1:] = some[1, 2:] = some[-1, 0] = 0
    return [whole, some]


def segmentation() -> None:
    """Pixels of 255, which the first batch lacks, in a model's own loss and in a caller's."""
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.rand(5, 3, 32, 32, generator=numbers)
    whole = torch.randint(0, 5, (5, 32, 32), generator=numbers)
    some = whole.clone()
    some[0], some[1, :9] = 255, 255
    run = Run(lambda: segformer(), lr=0.01)
    for labels in (whole, some, whole):
        own = split({"pixel_values": pixels, "labels": labels})
        # Dropout and BatchNorm are not what this is about.
        found = train_step(run.module, run.optimizer, own, training=False)
        loss = run.twin.eval()(pixel_values=pixels, labels=labels).loss
        assert found["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
        loss.backward()
        run.twin_optimizer.step()
        run.twin_optimizer.zero_grad()


def token_mean_of_a_mask() -> None:
    """The mask is an argument of its own: first packed, then padded."""

    def divided(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return per_token(output, labels, kept) / kept.sum()

    def per_token(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(output.transpose(1, 2), labels, reduction="none") * kept).sum()

    def pair(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> Any:
        return per_token(output, labels, kept), kept.sum()

    batches = [
        {"tokens": tokens(5, seed), "labels": tokens(5, seed + 7) % CLASSES, "kept": kept}
        for seed, kept in enumerate(masks(5))
    ]
    for columns in batches:
        Run().refuses(divided, columns)
    Run().steps(pair, [*batches, batches[0]])
    Run().steps(pair, [batches[1], batches[0]], gradient_accumulation_steps=2)


def class_weights() -> None:
    """`CrossEntropyLoss(weight)`: one row a rank, two of one class a rank, two batches of one class and then a mix."""
    criterion = nn.CrossEntropyLoss(weight=OF_CLASS)

    def loss(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return criterion(output.mean(1), classes)

    size = dist.get_world_size()
    one = torch.tensor([0, 2, 1, 3])[:size]
    two = one.repeat_interleave(2)
    for sequence in (
        [one],
        [two],
        [torch.full_like(two, 2), torch.full_like(two, 0), torch.arange(2 * size) % CLASSES],
    ):
        Run().steps(loss, [{"tokens": tokens(len(classes), 3), "classes": classes} for classes in sequence])


def balanced_mixture() -> None:
    """Mixtral: its main term is one process's; the balancing loss is each rank's own, by tokens, counted once."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.3,
    )  # fmt: skip
    run, size = Run(lambda: MixtralForCausalLM(config), lr=0.05), dist.get_world_size()
    for seed in range(2):
        ids = torch.randint(0, VOCAB, (5, 6), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[0, 2:] = labels[1] = -100
        columns = {"input_ids": ids, "labels": labels}
        parts = [one.kwargs for one in deal((), {name: Split(value) for name, value in columns.items()}, size)]

        def whole(twin: nn.Module, columns: Tensors = columns, parts: Any = parts) -> torch.Tensor:
            out = twin(**columns)
            own = [twin(**part).aux_loss * part["input_ids"].numel() for part in parts]
            balance = torch.stack(own).sum() / columns["input_ids"].numel()
            return torch.as_tensor(out.loss - 0.3 * out.aux_loss + 0.3 * balance)

        run.step(split(columns), None, whole)


def balanced_switch() -> None:
    """An evaluation of a mixture with two balancing losses, both of which have no graph there, counts both."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_z_loss_coef=0.1, router_aux_loss_coef=0.3,
        decoder_start_token_id=0, dropout_rate=0.0, router_jitter_noise=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    twin = SwitchTransformersForConditionalGeneration(config).eval()
    module = shard_module(copy.deepcopy(twin), init_mesh(device_type(), Sharding()), Sharding())
    ids = torch.randint(1, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    # The same rows on every rank: its own balancing losses are those of one process.
    columns = {name: torch.cat([ids] * dist.get_world_size()) for name in ("input_ids", "labels")}
    batch = split(columns)
    batch = replace(batch, wrapped_kwargs={**batch.wrapped_kwargs, "output_router_logits": True})
    done = Accumulation()
    done.add(loss_of_batch(module, batch, with_backward=False))
    expected = twin(input_ids=ids, labels=ids, output_router_logits=True).loss.item()
    assert abs(done.loss() - expected) < 1e-4


def similarities(queries: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(queries)) + start, reduction="sum")


def contrastive() -> None:
    """Terms that use other rows: refused as a mean; right where the loss gathers the rows of all ranks."""

    def own_rows(output: torch.Tensor) -> torch.Tensor:
        return similarities(output[:, 0], output[:, 1], 0) / len(output)

    def mean_of_own_rows(output: torch.Tensor) -> torch.Tensor:
        scores = output[:, 0] @ output[:, 1].T
        return F.cross_entropy(scores, torch.arange(len(output)))

    def all_rows(output: torch.Tensor) -> Any:
        keys = torch.cat(all_gather(output[:, 1].contiguous()))
        return similarities(output[:, 0], keys, dist.get_rank() * len(output)), len(output)

    size = dist.get_world_size()
    for num_rows in (size, 2 * size):
        for loss in (own_rows, mean_of_own_rows):
            Run().refuses(loss, {"tokens": tokens(num_rows, 0)})
        run = Run()
        for seed in range(2):
            columns = {"tokens": tokens(num_rows, seed)}
            run.step(split(columns), all_rows, partial(_of_scores, own_rows, columns["tokens"], {}))


class Zero(Scores):
    """Has a head that starts at 0: every token's loss is that of chance."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def heads_of_zero() -> None:
    """A mean over rows of means over their tokens, of all or of those that count."""

    def losses(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), labels, reduction="none")

    def means(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return losses(output, labels).mean(1).mean()

    def rows(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return (losses(output, labels) * kept).sum(1) / kept.sum(1)

    batches = [
        {"tokens": tokens(5, seed), "labels": tokens(5, seed + 7) % CLASSES, "kept": masks(5)[1]} for seed in range(3)
    ]
    Run(Zero).steps(means, batches)
    Run(Zero).refuses(lambda output, labels, kept: rows(output, labels, kept).mean(), batches[0])

    def pair(output: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> Any:
        return rows(output, labels, kept).sum(), len(output)

    Run(Zero).steps(pair, batches)


def masked_mse() -> None:
    """First fully observed."""

    def divided(output: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return ((output[..., 0] - target).square() * kept).sum() / kept.sum()

    def weighted(output: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output[..., 0], target, weight=kept)  # type: ignore[call-arg]  # torch's stub lacks it

    batches = [
        {"tokens": tokens(5, seed), "target": floats(5, 4, seed=seed), "kept": kept}
        for seed, kept in enumerate(masks(5))
    ]
    for columns in batches:
        Run().refuses(divided, columns)
    Run().steps(weighted, [*batches, batches[0]])


def padding_of_zero() -> None:
    """`ignore_index=0`, first without padding."""

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0)

    whole = tokens(5, 1) % (CLASSES - 1) + 1
    some = (whole * masks(5)[1]).long()
    Run().steps(loss, [{"tokens": tokens(5, 0), "labels": labels} for labels in (whole, some, whole)])


def weights_of_rows() -> None:
    """First all 1."""

    def losses(output: torch.Tensor, classes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.mean(1), classes, reduction="none") * weights

    def pair(output: torch.Tensor, classes: torch.Tensor, weights: torch.Tensor) -> Any:
        return losses(output, classes, weights).sum(), weights.sum()

    batches = [
        {"tokens": tokens(5, seed), "classes": tokens(5, seed + 3)[:, 0] % CLASSES, "weights": weights}
        for seed, weights in enumerate([torch.ones(5), torch.tensor([4.0, 0.1, 0.1, 1.0, 0.5])])
    ]
    for columns in batches:
        Run().refuses(lambda output, classes, weights: losses(output, classes, weights).mean(), columns)
        Run().refuses(lambda output, classes, weights: losses(output, classes, weights).sum() / weights.sum(), columns)
    Run().steps(pair, [*batches, batches[0]])


def two_means() -> None:
    """BERT's masked tokens and next sentences: means with counts of their own, also in parts."""
    from transformers import BertForPreTraining

    ids = torch.randint(3, VOCAB, (7, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 1:] = labels[1] = labels[2, :4] = labels[5] = -100
    following = torch.tensor([0, 1, 1, 0, -100, 1, 0])
    run = Run(lambda: BertForPreTraining(_bert_config()))
    for num_parts in (1, 2, 3):
        for kept in (torch.ones_like(labels), (labels != -100).long()):
            columns = {
                "input_ids": ids, "labels": labels.where(kept > 0, -100), "next_sentence_label": following
            }  # fmt: skip
            run.step(
                split(columns),
                None,
                partial(_own_loss, columns),
                gradient_accumulation_steps=num_parts,
            )


def with_kl(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor, beta: Any) -> torch.Tensor:
    divergence = F.kl_div(output.log_softmax(-1), reference, reduction="none").sum(-1).mean(1)
    return F.cross_entropy(output.flatten(0, 1), labels.flatten()) + beta * divergence.mean()


class WithKL:
    """Has its β in an attribute."""

    beta: Any = 0.0

    def __call__(self, output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return with_kl(output, labels, reference, self.beta)


def rising_beta() -> None:
    """A token mean and β times a row mean of a KL, with β from 0 upwards."""
    labels = tokens(5, 2) % CLASSES
    labels[0, 1:] = labels[1] = -100
    columns = {"tokens": tokens(5, 0), "labels": labels, "reference": floats(5, 4, CLASSES).softmax(-1)}
    box = {"beta": 0.0}
    holder, tensor = WithKL(), WithKL()

    def closure(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return with_kl(output, labels, reference, box["beta"])

    runs = [Run() for _ in range(4)]
    for beta in (0.0, 0.1, 0.5, 0.0, 1.0):
        box["beta"] = holder.beta = beta
        tensor.beta = torch.tensor(beta)
        losses: list[Loss] = [partial(with_kl, beta=beta), closure, holder, tensor]
        for run, loss in zip(runs, losses, strict=True):
            run.steps(loss, [columns])
            run.steps(loss, [columns], gradient_accumulation_steps=2)


def log_probs(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).sum(1)


def preferences() -> None:
    """DPO: `chunk(2)` is refused where the reference is the policy, too; pairs side by side stay on one rank."""

    def chunked(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        chosen, rejected = (log_probs(output, labels) - reference).chunk(2)
        return -F.logsigmoid(0.5 * (chosen - rejected)).mean()

    def margins(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        ratios = (log_probs(output, labels) - reference).view(-1, 2)
        return -F.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1]))

    def mean(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return margins(output, labels, reference).mean()

    def pair(output: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> Any:
        return margins(output, labels, reference).sum(), len(output) // 2

    run = Run()
    columns = {"tokens": tokens(8, 0), "labels": tokens(8, 1) % CLASSES}
    with torch.no_grad():
        columns["reference"] = log_probs(run.twin(columns["tokens"]), columns["labels"])
    run.refuses(chunked, columns)
    run.refuses(chunked, columns, rows_per_item=2)
    losses: list[Loss] = [mean, pair]
    for loss in losses:
        for num_parts in (1, 2):
            six = {name: value[:6] for name, value in columns.items()}
            Run().steps(loss, [columns, six, columns], rows_per_item=2, gradient_accumulation_steps=num_parts)


def rows_of_each_rank() -> None:
    """All arguments `PerRank`, with a number of rows for each rank; class weights as many as a rank has rows."""
    size = dist.get_world_size()
    counts = [CLASSES, 2, 1, 3][:size]
    ids = [tokens(count, seed) for seed, count in enumerate(counts)]
    labels = [one % CLASSES for one in ids]
    labels[0][1:, 1:] = -100
    for weight in (None, OF_CLASS):

        def loss(output: torch.Tensor, labels: torch.Tensor, weight: Any = weight) -> torch.Tensor:
            return F.cross_entropy(output.transpose(1, 2), labels, weight=weight)

        run = Run()
        for part in (slice(None), slice(1)):
            own_ids, own_labels = [one[part] for one in ids], [one[part] for one in labels]
            own = deal((), {"tokens": PerRank(own_ids), "labels": PerRank(own_labels)}, size)[dist.get_rank()]
            run.step(
                own,
                loss,
                partial(_of_scores, loss, torch.cat(own_ids), {"labels": torch.cat(own_labels)}),
            )


class Looking(nn.Module):
    """Scores tokens by the mean of images, of which a rank may have another number than it has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()
        self.look = nn.Linear(3, CLASSES)

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(tokens) + self.look(images).mean(0)
        return scores


def images_beside_text() -> None:
    size = dist.get_world_size()
    ids, labels, images = tokens(5, 0), tokens(5, 1) % CLASSES, [floats(rank + 1, 3, seed=rank) for rank in range(size)]
    labels[0, 1:] = -100

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    marked = {"tokens": Split(ids), "labels": Split(labels), "images": PerRank(images)}
    parts = deal((), marked, size)

    def whole(twin: nn.Module) -> torch.Tensor:
        scores = [twin(part.kwargs["tokens"], part.kwargs["images"]) for part in parts if not part.is_dummy]
        return loss(torch.cat(scores), labels)

    run = Run(Looking)
    for _ in range(2):
        run.step(parts[dist.get_rank()], loss, whole)


class Distances(Scores):
    """Its output is the distance of each row from each, by an expansion of both and a reduction."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        means = super().forward(tokens).mean(1)
        one, other = torch.broadcast_tensors(means.unsqueeze(1), means.tanh().unsqueeze(0))
        return (one - other).square().sum(-1)


def rows_compared_in_the_model() -> None:
    def mean(output: torch.Tensor) -> torch.Tensor:
        return output.mean()

    def over_columns(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(-output, torch.arange(len(output)))

    size = dist.get_world_size()
    for num_rows, loss in itertools.product((size, 2 * size, 3 * size + 1), (mean, over_columns)):
        if num_rows > 1:
            Run(Distances).refuses(loss, {"tokens": tokens(num_rows, 0)})


def the_same_rows_on_every_rank() -> None:
    """A sum counts once in a call without `Split`; each rank's, with `PerRank`."""

    def loss(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), None

    def mean(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten()) + output.square().mean()

    def pairs(output: torch.Tensor, labels: torch.Tensor) -> Any:
        return [(output.square().sum(), output.numel()), (output.abs().sum(), None)]

    columns, size = {"tokens": tokens(3, 0), "labels": tokens(3, 1) % CLASSES}, dist.get_world_size()
    run, rest = Run(), {"labels": columns["labels"]}
    for one in (loss, mean, pairs):
        run.step(deal((), columns, size)[dist.get_rank()], one, partial(_of_scores, one, columns["tokens"], rest))
    marked = {name: PerRank([value] * size) for name, value in columns.items()}
    rest = {"labels": torch.cat([columns["labels"]] * size)}
    whole = partial(_of_scores, loss, torch.cat([columns["tokens"]] * size), rest)
    run.step(deal((), marked, size)[dist.get_rank()], loss, whole)


CASES: dict[str, Callable[[], None]] = {
    job.__name__: job
    for job in (
        segmentation,
        token_mean_of_a_mask,
        class_weights,
        balanced_mixture,
        balanced_switch,
        contrastive,
        heads_of_zero,
        masked_mse,
        padding_of_zero,
        weights_of_rows,
        two_means,
        rising_beta,
        preferences,
        rows_of_each_rank,
        images_beside_text,
        rows_compared_in_the_model,
        the_same_rows_on_every_rank,
    )
}


def failures_of(names: Sequence[str]) -> list[str]:
    failures = []
    for name in names:
        try:
            CASES[name]()
        except (Exception, pytest.fail.Exception):
            failures.append(f"{name}:\n{traceback.format_exc()}")
    return failures


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", world_sizes(2, full=(1, 3, 4)))
def test_what_no_first_batch_shows(world_size: int) -> None:
    pytest.importorskip("transformers")
    for rank, failures in enumerate(run_ranks(world_size, failures_of, list(CASES), timeout_s=150)):
        assert not failures, f"rank {rank}: {len(failures)} cases\n" + "\n".join(failures)
