"""Parameters that are frozen and thawed between steps: as if the module were sharded anew after each change."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from raysharding.batch import RankBatch, Split, deal
from raysharding.distributed.optim.factories import make_optimizer
from raysharding.distributed.training.step import train_step
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import build, full, gradients, mine, rows, sharded

NUM_ROWS = 12
SGD = partial(torch.optim.SGD, lr=0.2)


class Adapted(nn.Module):
    """A layer with a low-rank adapter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=dtype)
        self.low = nn.Linear(6, 2, bias=False)
        self.high = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x) + self.high(self.low(x)))
        return out


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(Adapted(dtype), Adapted(dtype), nn.Linear(6, 3))


def tied_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean(dim=1).mean()


def vectors() -> dict[str, torch.Tensor]:
    return {"input": rows(NUM_ROWS, 6), "target": rows(NUM_ROWS, 3, seed=2)}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 31, (NUM_ROWS, 5), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def batch_of(data: Mapping[str, torch.Tensor]) -> RankBatch:
    return deal((), {key: Split(value) for key, value in data.items()}, dist.get_world_size())[dist.get_rank()]


def train_only(module: nn.Module, pattern: str) -> Any:
    """Freeze all parameters but those whose names match."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)
    return module


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter).detach().clone() for name, parameter in module.named_parameters()}


Model = tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], Callable[..., torch.Tensor] | None]
ADAPTED: Model = (adapted, vectors, distance)
LLAMA: Model = (tied_llama, tokens, None)
SCHEDULES: list[tuple[Model, list[str]]] = [
    (ADAPTED, ["^2", "", "low|high", "^2", ""]),
    (ADAPTED, ["low|high", "base", "^0"]),
    (LLAMA, ["norm", "", "embed_tokens", "q_proj", ""]),
]


def equals_fresh_ones(model: Model, patterns: list[str], dtype: torch.dtype, num_parts: int, **fields: Any) -> None:
    """Each step equals that of a module which is sharded with the same weights and the same frozen parameters."""
    make, data, loss = model
    batch = batch_of({key: value.to(dtype) if value.is_floating_point() else value for key, value in data().items()})
    step = partial(train_step, batch=batch, loss=loss, max_grad_norm=0.7, gradient_accumulation_steps=num_parts)
    module = sharded(train_only(build(make).to(dtype), patterns[0]), **fields)
    optimizer, found = SGD(module.parameters()), weights(module)
    for pattern in patterns:
        # After an evaluation, full parameters are registered in place of the root's shards.
        train_only(module, pattern)
        fresh = build(make).to(dtype)
        fresh.load_state_dict(found, strict=False)
        fresh = sharded(train_only(fresh, pattern), **fields)
        metrics, expected = step(module, optimizer), step(fresh, SGD(fresh.parameters()))
        assert metrics == expected, (pattern, metrics, expected)
        found = weights(module)
        for name, value in weights(fresh).items():
            assert torch.equal(found[name], value), (pattern, name)
        assert gradients(module).keys() == gradients(fresh).keys(), pattern
        with torch.no_grad():
            module(**{key: value for key, value in batch.kwargs.items() if key != "target"})


@on_ranks(2, 3, full=(4,))
def test_others_in_another_dtype() -> None:
    """Adapters in fp32 on a base in bf16: either may be trained, but one FSDP group has one dtype of gradients."""
    fields: dict[str, Any] = {"wrap": ["Adapted"], "mixed_precision": "bf16"}
    make = partial(adapted, torch.bfloat16)
    module, batch = sharded(train_only(build(make), "low|high"), **fields), batch_of(vectors())
    optimizer = SGD(module.parameters())
    train_step(module, optimizer, batch, loss=distance)
    before = weights(module)
    train_only(module, "low|high|base")
    with torch.no_grad():
        module(batch.kwargs["input"])
    with pytest.raises(PlanError, match=r"(?s)freeze those of one dtype.*is torch\.bfloat16.*is torch\.float32"):
        train_step(module, optimizer, batch, loss=distance)
    train_only(module, "base")
    fresh = build(make)
    fresh.load_state_dict(before)
    fresh = sharded(train_only(fresh, "base"), **fields)
    for each in (module, fresh):
        train_step(each, SGD(each.parameters()), batch, loss=distance)
    found, expected = weights(module), weights(fresh)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["0.base.weight"], before["0.base.weight"])


@on_ranks(2, 3, full=(4,))
def test_requires_grad_set_while_full_parameters_are_registered() -> None:
    """By names, on the full parameters, or by the shards that a list holds: the later one counts."""
    module, batch = sharded(build(adapted), wrap="none"), mine(rows(NUM_ROWS, 6))
    shards = list(module.parameters())
    for of_shards, is_trained in ((False, False), (True, True), (True, False), (False, True), (False, True)):
        with torch.no_grad():
            module(batch)
        for parameter in shards if of_shards else module.parameters():
            parameter.requires_grad_(is_trained)
        assert module(batch).requires_grad == is_trained
        module.reshard()
        assert all(parameter.requires_grad == is_trained for parameter in shards), (of_shards, is_trained)


@on_ranks(2, 3, full=(4,))
def test_freezing_and_thawing(replicate_size: int) -> None:
    low = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    fields: dict[str, Any] = {"replicate_size": replicate_size}
    for model, patterns in SCHEDULES:
        fields |= {"wrap": "auto" if model is LLAMA else ["Adapted"], "mixed_precision": "bf16"}
        equals_fresh_ones(model, patterns, torch.float32, 1, **fields)
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for precision, dtype in ((low, torch.float32), (reduced, torch.bfloat16)):
        fields |= {"wrap": ["Adapted"], "mixed_precision": precision}
        equals_fresh_ones(ADAPTED, ["^2", ""], dtype, 2, **fields)


def test_an_optimizer_without_the_thawed_parameters() -> None:
    def made(trained: str) -> tuple[Any, torch.optim.Optimizer]:
        module = train_only(build(adapted), trained)
        return module, make_optimizer(module, SGD)

    module, optimizer = made("low|high")
    train_only(module, "")
    with pytest.warns(UserWarning, match=r"6 parameters that were frozen .*\(0\.base\.weight, .*add_param_group"):
        optimizer.step()
    module, optimizer = made("base")
    optimizer.step()
    train_only(module, "base|^2")
    optimizer.add_param_group({"params": module[2].parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
