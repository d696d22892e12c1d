"""`build_module`: from config.json, auto classes and callables; dtypes, ties and errors."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.errors import PlanError
from raysharding.models import build_module, config_files, make_contiguous
from raysharding.models.build import parameters_on_meta
from tests.models.architectures import ARCHITECTURES


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("bert")
    ARCHITECTURES["bert"].make().save_pretrained(folder)
    return open_checkpoint(folder)


def with_config(checkpoint: Checkpoint, drop: tuple[str, ...] = (), **changes: Any) -> Checkpoint:
    fields = {key: value for key, value in {**(checkpoint.config or {}), **changes}.items() if key not in drop}
    return replace(checkpoint, config=fields)


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()}


def _fails() -> nn.Module:
    raise RuntimeError("no such luck")


# --- from config.json -------------------------------------------------------------------------------------------------


CLASSES = {None: "ForMaskedLM", "AutoModel": "Model", "AutoModelForSequenceClassification": "ForSequenceClassification"}


@pytest.mark.parametrize("auto", CLASSES)
def test_the_class_comes_from_config_json_or_an_auto_class(auto: str | None, bert: Checkpoint) -> None:
    module = build_module(auto, bert, None)
    assert type(module).__name__ == f"Bert{CLASSES[auto]}"
    assert all(parameter.is_meta for parameter in module.parameters())
    if auto is None:
        tied = module.get_parameter("bert.embeddings.word_embeddings.weight")
        assert module.get_parameter("cls.predictions.decoder.weight") is tied


def test_one_part_of_a_composite_checkpoint(tmp_path: Path) -> None:
    ARCHITECTURES["clip"].make().save_pretrained(tmp_path)
    checkpoint = with_config(open_checkpoint(tmp_path), architectures=["CLIPTextModelWithProjection"])
    module: Any = build_module(None, checkpoint, None)
    assert module.config.hidden_size == ARCHITECTURES["clip"].fields["text_config"]["hidden_size"]


def test_floats_that_json_cannot_hold(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(**ARCHITECTURES["bert"].fields, extra_limit=[0.0, float("inf")])
    transformers.BertModel(config).save_pretrained(tmp_path)
    module: Any = build_module(None, open_checkpoint(tmp_path), None)
    assert module.config.extra_limit == [0.0, float("inf")]


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "neither"])
def test_defaults_of_generate_are_those_of_from_pretrained(where: str, tmp_path: Path) -> None:
    model = ARCHITECTURES["bart"].make()
    model.save_pretrained(tmp_path)
    values = {"eos_token_id": [2, 5], "repetition_penalty": 1.3, "max_length": 33, "do_sample": False, "top_p": 0.7}
    own, config = tmp_path / "generation_config.json", tmp_path / "config.json"
    own.unlink()
    if where == own.name:  # top_p without do_sample: a flaw that only a changed config may not have
        own.write_text(json.dumps(values))
    elif where == config.name:
        config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    checkpoint = Checkpoint.from_json(open_checkpoint(tmp_path).to_json())
    module: Any = build_module(None, checkpoint, None)
    reference = type(model).from_pretrained(tmp_path).generation_config
    assert module.generation_config.to_dict() == reference.to_dict()
    assert (module.generation_config.repetition_penalty == 1.3) is (where != "neither")
    assert "generation_config.json" in config_files(module)


def test_a_generation_config_that_transformers_refuses_is_a_plan_error(tmp_path: Path) -> None:
    ARCHITECTURES["bart"].make().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"cache_implementation": "none such"}')
    with pytest.raises(PlanError, match=r"generation_config\.json: ValueError"):
        build_module(None, open_checkpoint(tmp_path), None)


@pytest.mark.parametrize(
    ("change", "model", "match"),
    [
        ({"architectures": ["NoSuchModel"]}, None, "no model class 'NoSuchModel'"),
        ({"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "m.M"}}, None, "auto_map"),
        ({"architectures": None}, None, "architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, None, "gptq"),
        ({"num_hidden_layers": "many"}, None, "not a valid BertConfig"),
        ({"num_attention_heads": 5}, None, "BertForMaskedLM cannot be built"),
        ({"model_type": "no-such-type"}, "AutoModel", "no-such-type"),
        ({}, "AutoModelForNothing", "AutoModelForCausalLM"),
        ({}, "BertModel", "not a transformers auto class"),
        ({}, "AutoModelForImageClassification", "no model for model_type 'bert'"),
        (None, None, "pass as model="),
        ({"architectures": None, "model_type": None}, "AutoModel", "model_type None"),
        ({}, _fails, "_fails raised RuntimeError: no such luck"),
        ({}, lambda: 3, "returned a int"),
        ({}, 3, "callable"),
    ],
)
def test_what_cannot_be_built_is_a_plan_error(change: Any, model: Any, match: str, bert: Checkpoint) -> None:
    with pytest.raises(PlanError, match=match):
        build_module(model, replace(bert, config=None) if change is None else with_config(bert, **change), None)
    assert nn.Linear(2, 2).weight.device.type == "cpu", "the patch is undone"


# --- dtypes -----------------------------------------------------------------------------------------------------------


def test_dtype_given_or_of_config_json_or_of_the_files(bert: Checkpoint, tmp_path: Path) -> None:
    assert dtypes(build_module(None, with_config(bert, dtype="bfloat16"), None)) == {torch.bfloat16}
    old = with_config(bert, drop=("dtype",), torch_dtype="float16")
    assert dtypes(build_module(None, old, None)) == {torch.float16}
    save_file({"a": torch.ones(2, dtype=torch.int64), "b": torch.ones(2).bfloat16()}, tmp_path / "model.safetensors")
    files = replace(open_checkpoint(tmp_path / "model.safetensors"), config=with_config(bert, drop=("dtype",)).config)
    assert dtypes(build_module(None, files, None)) == {torch.bfloat16}
    for dtype in (torch.float16, "fp16"):
        module: Any = build_module(None, bert, dtype)
        assert dtypes(module) == {module.config.dtype} == {torch.float16}
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_what_the_class_keeps_in_float32(dtype: torch.dtype, kept: torch.dtype, tmp_path: Path) -> None:
    model = ARCHITECTURES["t5"].make()
    model.save_pretrained(tmp_path)
    reference = type(model).from_pretrained(tmp_path, dtype=dtype)
    module = build_module(None, open_checkpoint(tmp_path), dtype)
    assert module.get_parameter("encoder.block.0.layer.1.DenseReluDense.wo.weight").dtype == kept
    expected = {fqn: parameter.dtype for fqn, parameter in reference.named_parameters()}
    assert {fqn: parameter.dtype for fqn, parameter in module.named_parameters()} == expected


# --- callables --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = weight
        self.second.weight = weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_callable_gets_parameters_on_meta_and_real_buffers(is_made_before: bool, bert: Checkpoint) -> None:
    existing = Net()
    module: Any = build_module((lambda: existing) if is_made_before else Net, bert, None)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.first.weight is module.second.weight
    assert module.frozen.requires_grad is False
    assert module.table.tolist() == [0, 1, 2]
    assert module.norm.running_var.device.type == "cpu"
    assert module.training is True
    assert type(module.first.weight) is nn.Parameter


def test_a_dtype_converts_a_callables_model_as_module_to_does(bert: Checkpoint) -> None:
    module: Any = build_module(Net, bert, torch.bfloat16)
    assert dtypes(module) == {torch.bfloat16}
    assert module.table.dtype == torch.bfloat16
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.first.weight is module.second.weight


class Strided(nn.Module):
    """Tensors that are not laid out row-major, made before and after they were registered."""

    columns: torch.Tensor
    repeated: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.again = self.turned
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("columns", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("repeated", torch.arange(3.0).expand(2, 3), persistent=False)
        self.rows = self.columns


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_tensor_is_contiguous(device: str, bert: Checkpoint) -> None:
    def make() -> nn.Module:
        with torch.device(device):
            return Strided()

    module: Any = build_module(make, bert, None)
    assert all(tensor.is_contiguous() for tensor in (*module.parameters(), *module.buffers()))
    assert (module.turned.shape, module.turned.is_meta) == ((6, 4), True)
    assert module.turned is module.again
    assert module.rows is module.columns
    if device == "cpu":
        assert torch.equal(module.columns, Strided().columns)
        assert module.repeated.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_real_module_can_be_made_contiguous() -> None:
    module = Strided()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert make_contiguous(module) is module
    assert all(value.is_contiguous() for value in module.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_other_threads_build_real_modules_meanwhile() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        assert nn.Linear(2, 2).weight.device.type == "meta"
    assert next(built[0].parameters()).device.type == "cpu"
