"""Which columns of the data a model takes, with a loss or metrics of its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raysharding.data import KnownColumns
from raysharding.distributed.training.losses.calls import call_model, known_arguments


class Anything(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x


def loss(output: Any, target: Any, *, weight: Any = None) -> Any:
    return output


def test_names_of_forward_and_loss() -> None:
    assert known_arguments(nn.Linear(1, 1), [loss]) == frozenset({"input", "target", "weight"})
    assert known_arguments(nn.Linear(1, 1), [loss, lambda output, **batch: output]) is None
    assert known_arguments(Anything(), []) is None


def test_models_of_transformers_take_what_they_name() -> None:
    """Their `**kwargs` are options of attention: the Trainer of transformers decides in the same way."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    known = known_arguments(model, [])
    assert known is not None
    assert {"input_ids", "attention_mask", "labels"} <= known
    assert not {"kwargs", "text", "self"} & known
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    trainer.model, trainer._signature_columns, trainer.label_names = model, None, ["labels"]
    trainer._set_signature_columns_if_needed()
    assert known == set(trainer._signature_columns) - {"kwargs", "label", "label_ids"}


def test_columns_without_names_are_all_but_text() -> None:
    columns = KnownColumns(None)
    assert set(columns([{"x": 1.0, "text": "a", "id": 3}])) == {"x", "id"}
    assert columns.dropped == ("text",)
    with pytest.raises(ValueError, match="rows have the columns text, and the model takes no text"):
        columns([{"text": "a"}])


class Caching(nn.Module):
    """A model that makes a cache unless it is told otherwise."""

    def forward(self, x: torch.Tensor, use_cache: bool | None = None, past_key_values: object = None) -> object:
        return use_cache


def test_no_cache_is_made_unless_the_call_says_otherwise() -> None:
    rows = torch.ones(2)
    assert call_model(Caching(), (rows,), {}) is False
    assert call_model(Caching(), (rows,), {"use_cache": True}) is True
    assert call_model(Caching(), (rows, True), {}) is True
    assert call_model(Caching(), (rows,), {"past_key_values": 1}) is None
    assert torch.equal(call_model(nn.Identity(), (rows,), {}), rows)
