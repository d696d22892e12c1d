"""Tiny models with a batch of rows and, where needed, a loss: what the training tests compare with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raysharding.batch import RankBatch, Split, deal

NUM_ROWS = 7
LENGTH = 6
VOCAB = 31
Rows = dict[str, torch.Tensor]


def _tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def _masked_labels() -> torch.Tensor:
    """Labels masked unevenly: rows 0, 5 and 6 fully (at W = 3 and 4 a rank has none), row 3 but for position 0."""
    labels = _tokens(1)
    labels[0] = labels[5] = labels[6] = -100
    labels[1, 2:] = -100
    labels[2, 0] = -100
    labels[3, 1:] = -100
    return labels


def tiny(name: str, **fields: Any) -> nn.Module:
    """A model of a class of transformers, by the class's name and fields of its configuration."""
    import transformers

    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**fields))
    return model


LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
BERT = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def llama() -> nn.Module:
    return tiny("LlamaForCausalLM", num_hidden_layers=2, **LLAMA)


def llama_classifier() -> nn.Module:
    """Takes the scores at the last token by an index; at W=2 a rank has as many rows as there are classes."""
    return tiny("LlamaForSequenceClassification", num_hidden_layers=1, num_labels=3, pad_token_id=0, **LLAMA)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    return tiny("T5ForConditionalGeneration", dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, **sizes)


def bert(task: str, **fields: Any) -> Callable[[], nn.Module]:
    return partial(tiny, f"BertFor{task}", **BERT, **fields)


bert_questions = bert("QuestionAnswering")


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1]}
    return tiny("ResNetForImageClassification", layer_type="basic", num_labels=3, **sizes)


class Scaled(nn.Module):
    """A plain module with a 0-dim parameter, which stays replicated, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, VOCAB)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits: torch.Tensor = self.head(hidden) * self.scale
        return logits


class Counting(nn.Module):
    """Honours `num_items_in_batch` without shifting, and has a `.loss` in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: int | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.inner(tokens)
        if labels is None:
            return {"logits": logits}
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels != -100).sum()), "logits": logits}


def token_mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def shifted_mean(output: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sum_and_count(output: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, int((labels != -100).sum())


def row_mean(output: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    return (output.mean(dim=(1, 2)) - kwargs["target"]).square().mean()


def doubled(output: Any) -> torch.Tensor:
    loss: torch.Tensor = 2 * output.loss
    return loss


def value_of(result: Any) -> torch.Tensor:
    """The loss that a function returned: a tensor, or pairs of sum and count."""
    if not isinstance(result, list | tuple):
        return torch.as_tensor(result)
    pairs = [result] if len(result) == 2 and not isinstance(result[0], list | tuple) else result
    parts = [total if count is None else total / count for total, count in pairs]
    return torch.stack(parts).sum()


def turned(rows: Rows, dim: int) -> Rows:
    """The columns with their rows in another dim, without those that lack it."""
    return {name: value.transpose(0, dim) for name, value in rows.items() if value.ndim > dim}


def part_of(rows: Rows, start: int, end: int) -> Rows:
    return {name: value[start:end] for name, value in rows.items()}


def batch_of(rows: Rows, dim: int = 0, rows_per_item: int = 1) -> RankBatch:
    """This rank's part."""
    marked = {name: Split(value, dim, rows_per_item) for name, value in turned(rows, dim).items()}
    return deal((), marked, dist.get_world_size())[dist.get_rank()]


@dataclass(frozen=True)
class Case:
    """One model, its rows, and how one process computes the loss."""

    build: Callable[[], nn.Module]
    rows: Callable[[], Rows] = dict
    loss: Callable[..., Any] | None = None
    training: bool = True
    dim: int = 0
    """Where a batch has its rows."""
    rows_per_item: int = 1

    def reference(self, module: nn.Module, rows: Rows) -> torch.Tensor:
        """The loss of one process on all rows."""
        rows = turned(rows, self.dim)
        if self.loss is None or self.loss is doubled:
            loss: torch.Tensor = module(**rows)["loss"]
            return loss if self.loss is None else 2 * loss
        rest = rows if self.loss is sum_and_count else {key: value for key, value in rows.items() if key != "tokens"}
        return value_of(self.loss(module(rows["tokens"]), **rest))


def _inputs(labels: Callable[[], torch.Tensor]) -> Callable[[], Rows]:
    return lambda: {"input_ids": _tokens(), "labels": labels()}


def _plain(**others: Callable[[], torch.Tensor]) -> Callable[[], Rows]:
    return lambda: {"tokens": _tokens(), **{key: make() for key, make in others.items()}}


def _classes() -> torch.Tensor:
    return torch.tensor([2, 0, -100, 1, 1, -100, -100])


def _floats(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


CASES = {
    "llama": Case(llama, _inputs(_masked_labels)),
    "llama_callable": Case(llama, _inputs(_masked_labels), doubled),
    "t5": Case(t5, _inputs(_masked_labels)),
    "bert_classifier": Case(bert("SequenceClassification", num_labels=3), _inputs(_classes)),
    "llama_classifier": Case(llama_classifier, _inputs(_classes)),
    "bert_regression": Case(
        bert("SequenceClassification", num_labels=1, problem_type="regression"), _inputs(lambda: _floats(NUM_ROWS))
    ),
    "bert_multi_label": Case(
        bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        _inputs(lambda: _floats(NUM_ROWS, 3)),
    ),
    "bert_mlm": Case(bert("MaskedLM"), _inputs(_masked_labels)),
    "bert_tagger": Case(bert("TokenClassification", num_labels=4), _inputs(lambda: _masked_labels().clamp(max=3))),
    "bert_questions": Case(
        bert_questions,
        lambda: {
            "input_ids": _tokens(),
            "start_positions": torch.arange(NUM_ROWS) % LENGTH,
            "end_positions": torch.arange(NUM_ROWS).flip(0) % LENGTH,
        },
    ),
    "resnet": Case(
        resnet, lambda: {"pixel_values": _floats(NUM_ROWS, 3, 32, 32), "labels": _classes()}, training=False
    ),
    "counting": Case(Counting, _plain(labels=_masked_labels)),
    "token_mean": Case(Scaled, _plain(labels=_masked_labels), token_mean),
    "shifted_mean": Case(Scaled, _plain(labels=_masked_labels), shifted_mean),
    "sum_and_count": Case(Scaled, _plain(labels=_masked_labels), sum_and_count),
    "row_mean": Case(Scaled, _plain(target=lambda: _floats(NUM_ROWS)), row_mean),
}


def tagger_ignoring(index: int) -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=index)

    return loss


def gathering(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -output.log_softmax(-1).gather(-1, labels[..., None]).mean()


def segformer() -> nn.Module:
    return tiny(
        "SegformerForSemanticSegmentation",
        num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 8], num_attention_heads=[1, 1], sr_ratios=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8, num_labels=5,
    )  # fmt: skip


def images() -> Rows:
    numbers = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (4, 32, 32), generator=numbers)
    labels[0], labels[1, :9] = 255, 255
    return {"pixel_values": torch.rand(4, 3, 32, 32, generator=numbers), "labels": labels}


def tags() -> Rows:
    return {
        "tokens": CASES["token_mean"].rows()["tokens"],
        "labels": torch.arange(NUM_ROWS * LENGTH).view(-1, LENGTH) % 9,
    }
