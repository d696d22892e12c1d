"""`ParamGroups`: hyperparameters by names equal those of param groups made by hand in one process."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raysharding import ParamGroups
from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.footprint import footprints, tensor_footprints
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.optim.factories import bound, make_optimizer
from raysharding.distributed.optim.snapshot import OptimizerSnapshot
from raysharding.distributed.training.step import train_step
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair, batch_of
from tests.distributed.training.training_cases import CASES
from tests.spawn import device_type

pytest.importorskip("transformers")

ADAM = partial(torch.optim.AdamW, eps=1e-5)


def is_scale(name: str) -> bool:
    return name == "scale"


RULES: dict[Any, dict[str, Any]] = {r"bias$": {"weight_decay": 0.0}, is_scale: {"lr": 1e-4}}


def by_hand(module: nn.Module) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    biases = [one for name, one in named.items() if name.endswith("bias")]
    rest = [one for name, one in named.items() if not name.endswith("bias") and name != "scale"]
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0},
        {"params": [named["scale"]], "lr": 1e-4},
        {"params": rest},
    ]
    return ADAM(groups, lr=1e-2, weight_decay=0.1)


@on_ranks(2)
def test_a_step_equals_one_with_groups_made_by_hand() -> None:
    case = CASES["token_mean"]
    pair = Pair(case.build, "adamw")
    factory = pickle.loads(pickle.dumps(ParamGroups(ADAM, RULES, lr=1e-2)))
    pair.optimizer = make_optimizer(pair.module, factory, {"weight_decay": 0.1})
    pair.twin_optimizer = by_hand(pair.twin)
    for _ in range(3):
        pair.step(case, case.rows(), 0.5)
    pair.compare()
    groups = OptimizerSnapshot.of(pair.module, pair.optimizer).groups
    assert [group["params"] for group in groups[:2]] == [["blocks.0.bias", "blocks.1.bias", "head.bias"], ["scale"]]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-2, 0.0), (1e-4, 0.1), (1e-2, 0.1)]


@on_ranks(1)
def test_names_are_those_before_anything_was_wrapped() -> None:
    case = CASES["llama"]
    sharding = Sharding(activation_checkpointing=True)
    module = shard_module(case.build(), init_mesh(device_type(), sharding), sharding)
    optimizer = make_optimizer(module, ParamGroups(ADAM, {r"layers\.0\.self_attn\.q_proj": {"lr": 1.0}}))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, len(list(module.parameters())) - 1]
    train_step(module, optimizer, batch_of(case.rows()))


@on_ranks(1)
def test_a_plan_counts_what_it_makes() -> None:
    sharding = Sharding()
    module = shard_module(CASES["token_mean"].build(), init_mesh(device_type(), sharding), sharding)
    tensors = tensor_footprints(module)
    factories = ADAM, ParamGroups(ADAM, RULES), ParamGroups(torch.optim.SGD, {"bias": {"momentum": 0.9}})
    all_of_it, grouped, biases = (footprints(tensors, [0], factory)[0].optimizer_bytes or 0 for factory in factories)
    assert all_of_it == grouped
    assert 0 < biases < all_of_it / 4


class Asserting(torch.optim.SGD):
    """An optimizer that refuses tensors without memory in its own way."""

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("not on meta")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_a_plan_counts_what_a_capturable_optimizer_makes(optimizer: Any) -> None:
    tensors = tensor_footprints(nn.Linear(4, 4))
    usual, capturable = (
        footprints(tensors, [0], partial(optimizer, **options))[0].optimizer_bytes
        for options in ({}, {"capturable": True})
    )
    assert usual == capturable
    assert usual is not None
    assert footprints(tensors, [0], Asserting)[0].optimizer_bytes is None


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "no rules"),
        ({"(": {"lr": 1.0}}, r"'\(' is no regular expression"),
        ({"bias": 0.1}, r"'bias': 0.1; give a dict of hyperparameters"),
        ({"bias": {"params": []}}, r"without 'params'"),
        ({3: {}}, "3: give a regular expression, or a function"),
    ],
)
def test_rules_that_are_none_are_refused(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParamGroups(ADAM, rules)


def test_a_rule_that_takes_nothing_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no parameter is left for 'biass': of 4 that are trained, 0.weight, 0.bias"):
        ParamGroups(ADAM, {"biass": {}})(module.named_parameters())
    with pytest.raises(ValueError, match=r"no parameter is left for '0.bias'.*earlier rules"):
        ParamGroups(ADAM, {"bias": {}, "0.bias": {}})(module.named_parameters())
    with pytest.raises(ValueError, match=r"call it with module\.named_parameters"):
        ParamGroups(ADAM, {"bias": {}})(module.parameters())  # type: ignore[arg-type]


def test_keywords_that_come_later_win() -> None:
    module = nn.Linear(2, 2)
    factory = bound(ParamGroups(ADAM, {"bias": {"lr": 3.0}}, lr=1.0, weight_decay=0.5), {"lr": 2.0})
    assert isinstance(factory, ParamGroups)
    assert repr(factory).endswith("{'bias': {'lr': 3.0}}, lr=2.0, weight_decay=0.5)")
    groups = factory(module.named_parameters()).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(3.0, 0.5), (2.0, 0.5)]
    assert bound(ADAM, {}) is ADAM
