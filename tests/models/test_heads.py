"""A head that the checkpoint lacks is new; anything else that is missing is an error, which names its cure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from raysharding import Loading
from raysharding.checkpoint import open_checkpoint
from raysharding.distributed import init_mesh, load_checkpoint, shard_module
from raysharding.errors import PlanError
from raysharding.group.launch.spec import fitted_module
from raysharding.models import Adapted, InputBounds, KeyMap, build_module, map_keys, override_config
from tests.models.architectures import ENCODER, T5
from tests.models.filling import rewrite
from tests.spawn import run_ranks

_SIZE: dict[str, Any] = {key: value for key, value in ENCODER.items() if key != "pad_token_id"}
_T5 = {key: value for key, value in T5.items() if "token" not in key}
_VIT = {**_SIZE, "image_size": 16, "patch_size": 8}
_TEXT = {**_SIZE, "head_dim": 8, "num_key_value_heads": 1}
_PATCHES = {**_SIZE, "image_size": 28, "patch_size": 14}
_GEMMA = {"text_config": _TEXT, "vision_config": _PATCHES, "mm_tokens_per_image": 4}
_CLASSIFIER = "AutoModelForSequenceClassification"


class OwnLlama(transformers.LlamaForCausalLM): ...


def own_llama() -> nn.Module:
    return OwnLlama(transformers.LlamaConfig(**_SIZE))


def saved(folder: Path, model: str, **config: Any) -> dict[str, torch.Tensor]:
    """Save a tiny model of transformers; return its tensors as they are in the file."""
    cls = getattr(transformers, model)
    cls(cls.config_class(**(config or _SIZE))).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def fitted(folder: Path, model: Any = _CLASSIFIER, **loading: Any) -> nn.Module:
    return fitted_module(model, override_config(open_checkpoint(folder), {"num_labels": 3}), Loading(**loading))


def mapped(folder: Path, model: str) -> KeyMap:
    opened = open_checkpoint(folder)
    return map_keys(fitted(folder, model), opened.tensors, None, opened.config)


@pytest.mark.parametrize(
    ("source", "config", "model"),
    [
        ("BertForMaskedLM", {}, _CLASSIFIER),  # without the pooler that a classifier has
        ("BertForPreTraining", {}, _CLASSIFIER),
        ("BertForPreTraining", {}, "AutoModelForTokenClassification"),  # with a pooler that this one lacks
        ("BertModel", {}, _CLASSIFIER),
        ("BertModel", {}, "AutoModelForTokenClassification"),
        ("RobertaForMaskedLM", {}, _CLASSIFIER),
        ("LlamaForCausalLM", {}, _CLASSIFIER),
        ("LlamaModel", {}, _CLASSIFIER),
        ("LlamaModel", {}, "AutoModelForCausalLM"),
        ("LlamaForCausalLM", {}, "AutoModel"),
        ("DebertaV2ForMaskedLM", {}, _CLASSIFIER),  # whose pooler is no part of the base
        ("T5ForConditionalGeneration", _T5, _CLASSIFIER),
        ("ViTModel", _VIT, "AutoModelForImageClassification"),
        ("Gemma3ForConditionalGeneration", _GEMMA, _CLASSIFIER),
    ],
)
def test_a_head_is_new_as_for_transformers(source: str, config: dict[str, Any], model: str, tmp_path: Path) -> None:
    saved(tmp_path, source, **config)
    keys = mapped(tmp_path, model)
    _, info = getattr(transformers, model).from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert set(keys.missing) == set(info["missing_keys"])
    assert set(keys.unexpected) == set(info["unexpected_keys"])
    assert keys.heads == {*keys.missing, *keys.unexpected}
    assert keys.missing or model == "AutoModel"
    assert {*keys.missing} <= {*keys.initialise}


@pytest.mark.parametrize(
    ("source", "lost", "model", "says"),
    [
        ("BertForMaskedLM", r"bert\.encoder\.layer\.1\.", _CLASSIFIER, "missing .* bert.encoder.layer.1.attention"),
        ("BertForMaskedLM", r"bert\.embeddings\.LayerNorm", _CLASSIFIER, "missing .* bert.embeddings.LayerNorm.weight"),
        ("LlamaModel", r"norm\.weight", _CLASSIFIER, "missing .* model.norm.weight"),
        ("LlamaForCausalLM", r"lm_head", "AutoModelForCausalLM", "missing .* lm_head.weight"),
        ("LlamaForCausalLM", r"lm_head", None, "missing .* lm_head.weight"),
        ("BertModel", r"pooler", "AutoModel", "missing .* pooler.dense.weight"),
        ("BertForPreTraining", r"cls\.seq", "AutoModelForPreTraining", "missing .* cls.seq_relationship.weight"),
        ("BertForMaskedLM", r"cls\.predictions\.bias", "AutoModelForPreTraining", "missing .* cls.predictions.bias"),
        ("LlamaForCausalLM", "lm_head", own_llama, "missing .* lm_head.weight"),
        ("BertForMaskedLM", "more", _CLASSIFIER, r"unexpected .*encoder\.layer\.2\."),
        ("BertModel", "more", _CLASSIFIER, r"unexpected .*encoder\.layer\.2\."),
    ],
)
def test_what_is_lost_or_more_is_no_new_head(source: str, lost: str, model: Any, says: str, tmp_path: Path) -> None:
    """A layer, a part of one, a head of the very class that was saved or of a subclass, a part of a head."""
    tensors = saved(tmp_path, source)
    rest = {key: value for key, value in tensors.items() if not re.match(lost, key)}
    if lost == "more":
        rest |= {key.replace("layer.1.", "layer.2."): value for key, value in tensors.items()}
    assert len(rest) != len(tensors)
    rewrite(tmp_path, rest)
    with pytest.raises(PlanError, match=says):
        fitted(tmp_path, model)


def cured(error: pytest.ExceptionInfo[PlanError]) -> Loading:
    """Return the options that an error says to give."""
    assert "strict=False" not in str(error.value)
    found: Loading = eval(re.search(r"Loading\(.*?\)(?=\))", str(error.value))[0])  # type: ignore[index]
    return found


def test_layers_that_are_overridden_are_missing_or_unexpected(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaForCausalLM")
    for number, says in ((1, r"unexpected .* model\.layers\.1"), (3, r"missing .* model\.layers\.2")):
        opened = override_config(open_checkpoint(tmp_path), {"num_hidden_layers": number})
        for model in (None, _CLASSIFIER):
            with pytest.raises(PlanError, match=says):
                fitted_module(model, opened, Loading())


@pytest.mark.parametrize("source", ["BertForMaskedLM", "LlamaForCausalLM", "LlamaModel"])
def test_the_error_for_a_prefix_too_much_holds_its_cure(source: str, tmp_path: Path) -> None:
    rewrite(tmp_path, {f"module.{key}": value for key, value in saved(tmp_path, source).items()})
    for model, strict in ((None, True), (_CLASSIFIER, True), (None, False), (_CLASSIFIER, False)):
        with pytest.raises(PlanError, match=r"begin with 'module\.'") as caught:
            fitted(tmp_path, model, strict=strict)
        assert cured(caught) == Loading(key_mapping={r"^module\.": ""})
        fitted(tmp_path, model, key_mapping=cured(caught).key_mapping)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_the_error_for_a_prefix_too_little_holds_its_cure(tmp_path: Path) -> None:
    rewrite(tmp_path, Wrapped().model.state_dict())
    with pytest.raises(PlanError, match=r"the model's names, and not the keys, begin with 'model\.'") as caught:
        fitted_module(Wrapped, open_checkpoint(tmp_path), Loading())
    fitted_module(Wrapped, open_checkpoint(tmp_path), cured(caught))


def test_the_error_for_added_tokens_holds_its_cure(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZE))
    model.resize_token_embeddings(70, mean_resizing=False)
    model.config.vocab_size = 64
    model.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"added tokens and resize_token_embeddings") as caught:
        fitted(tmp_path, None)
    assert "strict=False" not in str(caught.value)
    overrides = eval(re.search(r"config_overrides=({.*?})", str(caught.value))[1])  # type: ignore[index]
    module: Any = fitted_module(None, override_config(open_checkpoint(tmp_path), overrides), Loading())
    assert module.config.vocab_size == InputBounds.of(module).num_ids["input_ids"] == 70


OF_TWO, OF_THREE = {0: "low", 1: "high"}, {0: "low", 1: "mid", 2: "high"}


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"num_labels": 3}, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}),
        ({"id2label": OF_THREE}, OF_THREE),
        ({"id2label": OF_TWO, "num_labels": 2, "label2id": {"low": 0, "high": 1}}, OF_TWO),
    ],
)
def test_labels_are_named_as_transformers_does(overrides: dict[str, Any], names: Any, tmp_path: Path) -> None:
    saved(tmp_path, "BertModel")
    opened = override_config(open_checkpoint(tmp_path), {**overrides, "problem_type": "multi_label_classification"})
    config: Any = build_module(_CLASSIFIER, opened.from_json(opened.to_json()), None).config
    assert (config.num_labels, config.id2label) == (len(names), names)
    assert config.label2id == {name: index for index, name in names.items()}
    assert config.problem_type == "multi_label_classification"
    again = override_config(opened, {"num_labels": len(names)})
    assert again.config == opened.config


def test_an_attention_is_chosen(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaForCausalLM")
    opened = override_config(open_checkpoint(tmp_path), {"attn_implementation": "eager"})
    module: Any = build_module(None, opened, None)
    assert module.config._attn_implementation == "eager"
    assert "attn_implementation" not in module.config.to_dict()


def test_new_parts_beside_adapters_are_those_that_are_saved_with_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved(tmp_path, "BertForMaskedLM")

    def mapped_with(modules_to_save: list[str]) -> KeyMap:
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], modules_to_save=modules_to_save)
        opened = override_config(open_checkpoint(tmp_path), {"num_labels": 3})
        module = build_module(Adapted.of(_CLASSIFIER, config), opened, None)
        return map_keys(module, opened.tensors, None, opened.config)

    problems = mapped_with(["classifier"]).mismatches(strict=True)
    assert [line.partition(":")[0] for line in problems] == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    assert "modules_to_save" in problems[0]
    keys = mapped_with(["classifier", "pooler"])
    assert not keys.mismatches(strict=True)
    assert "bert.pooler.original_module.dense.weight" in keys.heads


def keep_a_trained_head(folder: str) -> None:
    opened = override_config(open_checkpoint(folder), {"num_labels": 3})
    module: Any = shard_module(build_module(_CLASSIFIER, opened, torch.float32), init_mesh("cpu"))
    load_checkpoint(module, opened)
    trained = module.classifier.weight.full_tensor() + 1
    with torch.no_grad():
        module.classifier.weight.add_(1)
    with pytest.raises(PlanError, match=r"keeps the model's own .*classifier.weight, .* nothing is changed"):
        load_checkpoint(module, folder)
    report = load_checkpoint(module, folder, loading=Loading(strict=False))
    assert "keeps the model's own" in report.warnings[0]
    assert torch.equal(module.classifier.weight.full_tensor(), trained)


@pytest.mark.timeout(120)
def test_a_later_load_says_what_became_of_a_trained_head(tmp_path: Path) -> None:
    saved(tmp_path, "BertForMaskedLM")
    run_ranks(2, keep_a_trained_head, str(tmp_path), timeout_s=100)
