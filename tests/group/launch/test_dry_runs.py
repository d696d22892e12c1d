"""Groups with random weights: config.json is all that is read, and the weights are the same everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from raysharding import PlanError, ShardedModelGroup, Split
from raysharding.checkpoint import open_config
from raysharding.models import build_module, override_config
from tests.hub import HubServer, hub
from tests.models.architectures import ARCHITECTURES

__all__ = ["hub"]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

IDS = torch.arange(32).reshape(4, 8)
DRY: dict[str, Any] = {"random_weights": True, "config_overrides": {"num_hidden_layers": 1}}


def group_of(given: Any, world_size: int = 2, **options: Any) -> ShardedModelGroup:
    """Make a dry run on CPUs."""
    return ShardedModelGroup.from_checkpoint(given, world_size=world_size, device="cpu", **(DRY | options))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config.json of two layers, without weights."""
    (tmp_path / "model").mkdir()
    ARCHITECTURES["llama"].make().config.save_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.full
def test_a_dry_run_trains_saves_and_is_the_same_at_every_world_size(model: Path, tmp_path: Path) -> None:
    with group_of(model, optimizer=torch.optim.AdamW) as group:
        begun = group.state_dict()
        assert group.restart(world_size=1).checkpoint == str(model)
        torch.testing.assert_close(group.state_dict(), begun, rtol=0, atol=0)
        batch = Split({"input_ids": IDS, "labels": IDS})
        assert group.train_step(batch)["loss"] > 0
        group.save(tmp_path / "saved")
        logits = group.forward(Split({"input_ids": IDS})).logits
        alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        assert alone.config.num_hidden_layers == 1
        torch.testing.assert_close(alone(IDS).logits, logits, rtol=1e-4, atol=1e-5)
        # From now on a reload is one of weights that were saved.
        assert group.restart(world_size=2).checkpoint == str(tmp_path / "saved")
        torch.testing.assert_close(group.forward(Split({"input_ids": IDS})).logits, logits, rtol=1e-4, atol=1e-5)


def test_weights_are_as_transformers_draws_them_and_none_are_read(hub: HubServer, tmp_path: Path) -> None:
    whole = ARCHITECTURES["llama"].make()
    whole.save_pretrained(tmp_path / "whole")
    hub.push("org/llama", tmp_path / "whole")
    plan = ShardedModelGroup.plan("org/llama", world_size=2, device="cpu", **DRY)
    assert plan.num_parameters < ShardedModelGroup.plan("org/llama", world_size=2, device="cpu").num_parameters
    hub.log.clear()
    with group_of("org/llama") as group:
        ours = group.state_dict()
        assert group.load_report.read_bytes == 0
    assert hub.num_bytes(".safetensors") == 0
    whole.config.num_hidden_layers = 1
    theirs = type(whole)(whole.config).state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        assert float(ours[name].std()) == pytest.approx(float(value.std()), rel=0.25), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"random_weights": 1}, "random_weights=1: give True or False"),
        (
            {"config_overrides": {"num_hiden_layers": 1}},
            "no field 'num_hiden_layers'; did you mean 'num_hidden_layers'",
        ),
        ({"config_overrides": {"dtype": "bf17"}}, r"config_overrides\['dtype'\]='bf17': give a floating dtype"),
        ({"config_overrides": {"eos_token_id": {1}}}, r"config_overrides\['eos_token_id'\]=\{1\}: config.json cannot"),
        ({"config_overrides": [1]}, "give a mapping"),
        ({"model": torch.nn.Identity}, "config_overrides with a callable model"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str, model: Path) -> None:
    with pytest.raises(ValueError, match=says):
        group_of(model, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16"])
def test_a_dtype_among_the_overrides_is_the_models(model: Path, dtype: Any) -> None:
    """By its older name, too, which config.json may hold as well."""
    for given in ("dtype", "torch_dtype"):
        for fields in ({}, {"dtype": "float32", "torch_dtype": "float32"}):
            opened = open_config(model)
            opened = replace(opened, config={**(opened.config or {}), **fields})
            dry = override_config(opened, {given: dtype})
            assert build_module(None, dry.from_json(dry.to_json()), None).dtype == torch.bfloat16


def test_an_override_that_makes_no_model(model: Path) -> None:
    with pytest.raises(PlanError, match=r"hidden_size|attention heads"):
        group_of(model, config_overrides={"hidden_size": 15})


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("spelled", [("n_layer",), ("num_hidden_layers",), ("n_layer", "num_hidden_layers")])
def test_an_override_counts_however_the_file_spells_the_field(
    tmp_path: Path, field: str, spelled: tuple[str, ...]
) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **dict.fromkeys(spelled, 4)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dry = override_config(open_config(tmp_path), {field: 2})
    module: Any = build_module(None, dry, None)
    assert len(module.transformer.h) == 2
