"""The page docs/pages/losses.md: what it calls refused is refused, and what it gives instead is one process's."""

from __future__ import annotations

import copy
import itertools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from raysharding.batch import RankBatch, Split, deal
from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.internals import reshard
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.step import Accumulation, forward_backward, optim_step, train_step, zero_grad
from raysharding.errors import UnreadableLossError
from tests.docs.blocks import blocks_of
from tests.grid import world_sizes
from tests.spawn import run_ranks

PAGE = "docs/pages/losses.md"
FORMS = [block.text for block in blocks_of(PAGE) if "# refused" in block.text]
CODE = "\n".join(block.text for block in blocks_of(PAGE) if block.is_run and "ShardedModelGroup" not in block.text
                 and "AutoTokenizer" not in block.text)  # fmt: skip
"""The functions of the other blocks."""
TOLERANCE = 1e-5
NUM_ROWS, LENGTH, VOCAB = 5, 6, 11
Rows = dict[str, torch.Tensor]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, VOCAB)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


class Sums(Tokens):
    """A number for each row."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens).square().sum((1, 2))


class Penalty(Tokens):
    def forward(self, tokens: torch.Tensor) -> Any:
        return {"prediction": super().forward(tokens), "penalty": self.head.weight.square().sum()}


class FusedCrossEntropy(torch.autograd.Function):
    """As a kernel computes it: the gradient is ready in the forward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        with torch.enable_grad():
            given = logits.detach().requires_grad_()
            loss = F.cross_entropy(given, labels, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, given)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0], None, None


def plain(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction=reduction)


def checkpointed(*args: Any) -> torch.Tensor:
    return checkpoint(plain, *args, use_reentrant=True)


@dataclass(frozen=True)
class Form:
    """What a form of the page is run with."""

    model: type[Tokens]
    columns: tuple[str, ...]
    rows_per_item: int = 1
    by_parts: bool = True
    """False where accumulation gives the loss of each part."""
    has_several_counts: bool = False
    """True if accumulation runs forwards for the counts."""
    names: tuple[str, ...] = ("",)
    """Functions that the page's `fused_cross_entropy` may be."""


VALUES = ("target",)
FORM_OF = {
    "masked_mean": Form(Tokens, ("labels", "mask")),
    "masked_error": Form(Tokens, ("target", "mask3")),
    "sum_by_rows": Form(Tokens, ("labels",)),
    "bare_sum": Form(Tokens, ("labels",)),
    "weighted_rows": Form(Tokens, ("labels", "weights")),
    "centred_target": Form(Tokens, ("target", "centred")),
    "dr_grpo": Form(Tokens, ("labels", "advantages", "mask")),
    "sum_of_means": Form(Tokens, VALUES),
    "chunked_dpo": Form(Sums, ("reference",), rows_per_item=2),
    "every_other": Form(Tokens, VALUES, rows_per_item=2),
    "selected": Form(Tokens, ("labels", "mask")),
    "filled": Form(Tokens, ("labels", "mask")),
    "chosen_by_where": Form(Tokens, ("target", "mask3")),
    "fused": Form(Tokens, ("ignored",), names=("function", "compiled", "checkpointed")),
    "penalised": Form(Penalty, VALUES, has_several_counts=True),
    "log_of_mean": Form(Tokens, VALUES, by_parts=False),
    "tokens_and_rows": Form(Tokens, ("labels", "mask", "weights"), has_several_counts=True),
}


def rows_of(form: Form) -> Rows:
    """Rows whose masks count unevenly: row 4, or pair 4, has the most, row 0 the fewest."""
    numbers = torch.Generator().manual_seed(0)
    num_rows = NUM_ROWS * form.rows_per_item
    tokens = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=numbers)
    labels = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=numbers)
    mask = torch.arange(LENGTH) < torch.tensor([1, 2, 1, 6, 5])[torch.arange(num_rows) % NUM_ROWS, None]
    columns = {
        "labels": labels,
        "ignored": labels.masked_fill(~mask, -100),
        "mask": mask,
        "mask3": mask[..., None].expand(-1, -1, VOCAB),
        "target": torch.randn(num_rows, LENGTH, VOCAB, generator=numbers),
        "weights": torch.rand(num_rows, generator=numbers),
        "advantages": torch.randn(num_rows, generator=numbers),
        "reference": torch.rand(num_rows, generator=numbers),
    }
    columns["centred"] = columns["target"] - columns["target"].mean()
    names = {"mask3": "mask", "ignored": "labels"}
    return {"tokens": tokens} | {names.get(name, name): columns[name] for name in form.columns}


MARKS = ("# refused", "# instead", "# or")


def taking(text: str, mark: str) -> str:
    """A form with the lines of one mark, and those without a mark."""
    others = tuple(other for other in MARKS if other != mark)
    return "\n".join(line for line in text.splitlines() if not line.endswith(others))


def fused_functions() -> Mapping[str, Callable[..., Any]]:
    return {
        "": plain,
        "function": FusedCrossEntropy.apply,
        "compiled": torch.compile(plain, backend="aot_eager"),
        "checkpointed": checkpointed,
    }


def defined(text: str, **names: Any) -> dict[str, Any]:
    namespace = {"torch": torch, "F": F, **names}
    exec(text, namespace)
    return namespace


class Twins:
    """A sharded module and one of a single process, with the same weights and optimizers."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.twin = build()
        self.module = shard_module(copy.deepcopy(self.twin), init_mesh("cpu", Sharding()), Sharding())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.1)
        self.num_forwards = 0
        self.module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_forwards += 1

    def batch(self, rows: Rows, rows_per_item: int = 1) -> RankBatch:
        columns = {name: Split(value, rows_per_item=rows_per_item) for name, value in rows.items()}
        return deal((), columns, dist.get_world_size())[dist.get_rank()]

    def step(self, rows: Rows, loss: Any, rows_per_item: int = 1, num_parts: int = 1) -> dict[str, float]:
        batch = self.batch(rows, rows_per_item)
        return train_step(self.module, self.optimizer, batch, loss=loss, gradient_accumulation_steps=num_parts)

    def compare(self, metrics: dict[str, float], loss: torch.Tensor) -> None:
        """Take the twin's step by its loss, and compare loss, norm and weights."""
        self.twin_optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.twin.parameters(), math.inf).item()
        self.twin_optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=TOLERANCE, rel=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm, abs=TOLERANCE, rel=TOLERANCE)
        reshard(self.module)
        twin = dict(self.twin.named_parameters())
        for name, parameter in self.module.named_parameters():
            have = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            torch.testing.assert_close(have, twin[name].detach(), atol=TOLERANCE, rtol=TOLERANCE)


def check_form(text: str, name: str, function: str) -> None:
    form = FORM_OF[name]
    rows = rows_of(form)
    fused = {"fused_cross_entropy": fused_functions()[function]}
    before, *rewrites = (defined(taking(text, mark), **fused)[name] for mark in MARKS if mark in text)
    twins = Twins(form.model)
    for after, num_parts in itertools.product(rewrites, (1, 2) if form.by_parts else (1,)):
        error = None
        try:
            twins.step(rows, before, form.rows_per_item, num_parts)
        except UnreadableLossError as raised:
            error = raised
        assert isinstance(error, ValueError), f"{name} was read"
        assert "(sum" in str(error)
        twins.num_forwards = 0
        metrics = twins.step(rows, after, form.rows_per_item, num_parts)
        assert twins.num_forwards == num_parts + form.has_several_counts * (num_parts - 1)
        whole = rows
        if name == "chunked_dpo":  # its first half are the chosen answers
            whole = {key: torch.cat([value[::2], value[1::2]]) for key, value in rows.items()}
        columns = {key: value for key, value in whole.items() if key != "tokens"}
        twins.compare(metrics, before(twins.twin(whole["tokens"]), **columns))


def check_forms(texts: Mapping[str, str]) -> list[str]:
    """Run every form; return what is wrong."""
    warnings.simplefilter("ignore")  # of `checkpoint`, and of parts that run twice
    failures = []
    for name, text in texts.items():
        for function in FORM_OF[name].names:
            try:
                check_form(text, name, function)
            except Exception:
                failures.append(f"{name} {function}:\n{traceback.format_exc()}")
    return failures


def by_name() -> dict[str, str]:
    return {re.findall(r"^def (\w+)\(", text, re.MULTILINE)[-1]: text for text in FORMS}


def test_refused_forms_and_their_rewrites() -> None:
    texts = by_name()
    assert set(texts) == set(FORM_OF)
    assert all(text.count("# refused") == text.count("# instead") == 1 for text in texts.values())
    for rank, failures in enumerate(run_ranks(2, check_forms, texts)):
        assert not failures, f"rank {rank}: {len(failures)} forms\n" + "\n".join(failures)


SIZES: Any = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=16, **SIZES))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=31, max_position_embeddings=16, **SIZES, **drop), add_pooling_layer=False)


def dpo_of_one_process(policy: nn.Module, frozen: nn.Module, rows: Rows) -> torch.Tensor:
    """The mean over the pairs of -log σ(β (Δ chosen - Δ rejected)), a pair at a time."""

    def log_prob(model: nn.Module, row: int) -> torch.Tensor:
        ids, counted = rows["input_ids"][row], rows["answer_mask"][row]
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        found = [scores[place - 1, ids[place]] for place in range(1, len(ids)) if counted[place]]
        return torch.stack(found).sum()

    def ahead(row: int) -> torch.Tensor:
        return log_prob(policy, row) - log_prob(frozen, row).detach()

    pairs = range(0, len(rows["input_ids"]), 2)
    return torch.stack([-F.logsigmoid(0.1 * (ahead(row) - ahead(row + 1))) for row in pairs]).mean()


def scores_of_one_process(model: nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, mask = model(**rows).last_hidden_state, rows["attention_mask"]
    means = [states[counted.bool()].mean(0) for states, counted in zip(hidden, mask, strict=True)]
    vectors = F.normalize(torch.stack(means), dim=-1)
    scores = vectors[::2] @ vectors[1::2].T / 0.05
    return scores, torch.arange(len(scores))


def text_rows(num_rows: int) -> Rows:
    numbers = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(3, 31, (num_rows, 8), generator=numbers)
    lengths = torch.randint(3, 9, (num_rows, 1), generator=numbers)
    return {"input_ids": ids, "attention_mask": (torch.arange(8) < lengths).long()}


def train_dpo(code: str) -> None:
    names = defined(code)
    twins = Twins(llama)
    frozen = copy.deepcopy(twins.twin)
    for num_rows, num_parts in ((10, 1), (8, 2), (6, 1)):
        rows = text_rows(num_rows)
        rows["answer_mask"] = rows.pop("attention_mask") * (torch.arange(8) > 1)
        with torch.no_grad():
            logits = frozen(input_ids=rows["input_ids"]).logits
        reference = names["answer_log_probs"](logits, rows["input_ids"], rows["answer_mask"])
        metrics = twins.step({**rows, "reference": reference}, names["dpo"], 2, num_parts)
        twins.compare(metrics, dpo_of_one_process(twins.twin, frozen, rows))


def train_info_nce(code: str) -> None:
    names = defined(code)
    twins = Twins(bert)
    for num_rows in (10, 14, 6):
        rows = text_rows(num_rows)
        metrics = twins.step(rows, names["info_nce"], 2)
        twins.compare(metrics, F.cross_entropy(*scores_of_one_process(twins.twin, rows)))


def train_clip(code: str) -> None:
    """In both directions, as the page says in words."""
    of_all_ranks = defined(code)["of_all_ranks"]

    def clip(output: Any, attention_mask: torch.Tensor) -> tuple[torch.Tensor, int]:
        vectors = F.normalize(output.last_hidden_state[:, 0], dim=-1)
        queries, keys = vectors.unflatten(0, (-1, 2)).unbind(1)
        (all_queries, first), (all_keys, _) = of_all_ranks(queries), of_all_ranks(keys)
        own = first + torch.arange(len(queries))
        losses = [F.cross_entropy(20 * one @ all_.T, own, reduction="sum")
                  for one, all_ in ((queries, all_keys), (keys, all_queries))]  # fmt: skip
        return losses[0] + losses[1], 2 * len(queries)

    twins = Twins(bert)
    for num_rows in (10, 14, 6):
        rows = text_rows(num_rows)
        metrics = twins.step(rows, clip, 2)
        vectors = F.normalize(twins.twin(**rows).last_hidden_state[:, 0], dim=-1)
        scores, own = 20 * vectors[::2] @ vectors[1::2].T, torch.arange(num_rows // 2)
        twins.compare(metrics, (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2)


@pytest.mark.parametrize("world_size", world_sizes(2, full=(1, 3)))
@pytest.mark.parametrize("job", [train_dpo, train_info_nce, train_clip])
def test_pairs_and_contrastive_losses_equal_one_process(job: Callable[[str], None], world_size: int) -> None:
    pytest.importorskip("transformers")
    run_ranks(world_size, job, CODE)


def accumulate_by_hand(text: str) -> str:
    """The pass after which the counts of tokens and rows have another ratio is an error, and leaves no gradients."""
    form = FORM_OF["tokens_and_rows"]
    loss = defined(taking(text, "# instead"))["tokens_and_rows"]
    twins, rows, done = Twins(form.model), rows_of(form), Accumulation()
    same, other = ({key: value[rows_] for key, value in rows.items()} for rows_ in (slice(0, 3), slice(3, 5)))
    zero_grad(twins.module, twins.optimizer)
    for sync in (False, False):
        forward_backward(twins.module, twins.batch(same), done, loss=loss, sync=sync)
    with pytest.raises(ValueError, match="terms with counts of their own") as raised:
        forward_backward(twins.module, twins.batch(other), done, loss=loss)
    assert all(parameter.grad is None for parameter in twins.module.parameters())
    # Equal ratios are those of one process.
    done = Accumulation()
    zero_grad(twins.module, twins.optimizer)
    for sync in (False, True):
        forward_backward(twins.module, twins.batch(same), done, loss=loss, sync=sync)
    metrics = optim_step(twins.module, twins.optimizer, done)
    before = defined(taking(text, "# refused"))["tokens_and_rows"]
    columns = {key: value for key, value in same.items() if key != "tokens"}
    twins.compare(metrics, before(twins.twin(same["tokens"]), **columns))
    return str(raised.value)


def test_accumulation_by_hand_of_terms_with_counts_of_their_own() -> None:
    run_ranks(2, accumulate_by_hand, by_name()["tokens_and_rows"])


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: Any = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
        "initializer_range": 0.5,
    }
    config = MixtralConfig(vocab_size=31, num_key_value_heads=2, **SIZES, **experts, output_router_logits=True)
    return MixtralForCausalLM(config)


def balance() -> None:
    warnings.simplefilter("ignore")
    twins, world_size = Twins(mixtral), dist.get_world_size()
    rows = text_rows(5)
    rows["labels"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    metrics = train_step(twins.module, twins.optimizer, twins.batch(rows))
    parts = [{key: value[start:end] for key, value in rows.items()} for start, end in ((0, 3), (3, 5))][:world_size]
    own = sum(len(part["labels"]) * twins.twin(**part).aux_loss for part in parts) / 5
    output = twins.twin(**rows)
    assert abs(float(own - output.aux_loss)) > 100 * TOLERANCE  # not that of one process
    twins.compare(metrics, output.loss - 0.5 * output.aux_loss + 0.5 * own)


def test_the_balancing_term_of_a_mixture_is_the_mean_of_the_ranks() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, balance)


def step_by_mapping() -> None:
    """Each rank gives its own rows, 3 and 2 of 5, by name."""
    twins, rows = Twins(Tokens), rows_of(FORM_OF["fused"])
    mine = {key: value[3:] if dist.get_rank() else value[:3] for key, value in rows.items()}

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return plain(logits.mT, labels, "mean")

    metrics = train_step(twins.module, twins.optimizer, mine, loss=loss)
    twins.compare(metrics, F.cross_entropy(twins.twin(rows["tokens"]).mT, rows["labels"]))


def test_a_mapping_is_this_ranks_rows() -> None:
    run_ranks(2, step_by_mapping)


FUSED = next(block.text for block in blocks_of(PAGE) if "class SummedLoss" in block.text)


def fused_head_equals_one_process() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = defined(FUSED)
    torch.manual_seed(0)
    module = names["FusedLlama"](LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **SIZES))
    plain = LlamaForCausalLM(module.config)
    plain.load_state_dict(module.state_dict())
    ids = torch.randint(0, VOCAB, (4, LENGTH))
    labels = ids.clone()
    labels[0, :4] = -100
    shard_module(module, init_mesh("cpu"))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]
    part = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(2):
        batch = {"input_ids": ids[part], "labels": labels[part]}
        found = train_step(module, optimizers[0], batch, loss=names["passed_on"])["loss"]
        optimizers[1].zero_grad()
        loss = plain(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizers[1].step()
        assert abs(found - loss.item()) < TOLERANCE


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_head_with_its_loss_equals_one_process(world_size: int) -> None:
    run_ranks(world_size, fused_head_equals_one_process)
