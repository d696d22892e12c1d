"""`map_keys`: prefixes, heads, ties, other people's key names, and every kind of mismatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.format.tensor_info import TensorInfo
from raysharding.errors import PlanError
from raysharding.models import KeyMap, build_module, map_keys
from tests.models.architectures import ARCHITECTURES, ENCODER
from tests.models.filling import everything, load_values, rewrite


def headers(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Header entries as a checkpoint of these tensors has them."""
    return {name: TensorInfo(name, value.dtype, tuple(value.shape), 0, 0) for name, value in tensors.items()}


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a tiny model; its tensors as published."""
    ARCHITECTURES[name].make().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check(folder: Path, model: str, key_mapping: dict[str, str] | None = None) -> KeyMap:
    """Load as `model`; compare with its `from_pretrained`, values and missing keys."""
    import transformers

    kind = getattr(transformers, model)
    reference, info = kind.from_pretrained(folder, output_loading_info=True, key_mapping=key_mapping)
    checkpoint = open_checkpoint(folder)
    fields = {**(checkpoint.config or {}), "architectures": [model]}
    ours = build_module(None, replace(checkpoint, config=fields), None)
    keys, values = load_values(ours, checkpoint, key_mapping)
    assert keys.problems == ()
    assert set(keys.missing) == set(info["missing_keys"])
    assert len(keys.unexpected) == len(info["unexpected_keys"])
    for fqn, tensor in everything(reference).items():
        if fqn not in info["missing_keys"]:
            assert torch.equal(values[fqn], tensor), fqn
    return keys


EXPERT, LAYER = "model.layers.0.block_sparse_moe.experts.2.w1.weight", "model.layers.1"


# --- key names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "fqn", "operations"),
    [
        ("mixtral", EXPERT, "model.layers.0.mlp.experts.gate_up_proj", "MergeModulelist+Concatenate"),
        ("qwen3-moe", f"{LAYER}.mlp.experts.2.down_proj.weight", f"{LAYER}.mlp.experts.down_proj", "MergeModulelist"),
        ("vit", "vit.encoder.layer.1.attention.attention.query.weight", "vit.layers.1.attention.q_proj.weight", ""),
    ],
)
def test_published_names_feed_the_fused_parameters_by_ranges(
    name: str, key: str, fqn: str, operations: str, tmp_path: Path
) -> None:
    assert key in saved(name, tmp_path)
    keys = check(tmp_path, ARCHITECTURES[name].model)
    target: Any = keys.targets[fqn]
    assert key in target.sources
    assert target.operations == operations
    assert key in {run.source for run in target.runs}


def test_more_experts_than_ten_are_stacked_in_number_order(tmp_path: Path) -> None:
    import transformers

    config = ARCHITECTURES["mixtral"].fields | {"num_local_experts": 12}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)).save_pretrained(tmp_path)
    check(tmp_path, "MixtralForCausalLM")


def qwen3_vl_moe() -> Any:
    import transformers

    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    text = ARCHITECTURES["qwen3-moe"].fields | {"moe_intermediate_size": 12, "rope_parameters": rope}
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    vision = sizes | {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def test_an_operation_that_moves_single_elements_runs_on_the_sources(tmp_path: Path) -> None:
    qwen3_vl_moe().save_pretrained(tmp_path)
    key = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    as_in_memory: Any = check(tmp_path, "Qwen3VLMoeForConditionalGeneration").targets[key]
    assert as_in_memory.operations == "Transpose"
    assert len(as_in_memory.runs) == 1, "transformers looks at the shape and does not transpose"

    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {name: value.mT if ".experts." in name else value for name, value in tensors.items()})
    transposed = check(tmp_path, "Qwen3VLMoeForConditionalGeneration").targets[key]
    assert transposed.runs is None
    assert transposed.sources == (key,)


def test_a_fused_projection_is_split_by_ranges(tmp_path: Path) -> None:
    import transformers

    fields = ENCODER | {"head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
    transformers.NomicBertModel(transformers.NomicBertConfig(**fields)).save_pretrained(tmp_path)
    keys = check(tmp_path, "NomicBertModel")
    split: list[Any] = [target for target in keys.targets.values() if target.operations == "Chunk"]
    assert len(split) == 2 * 3, "two layers' q, k and v"
    assert all(len(target.runs) == 1 for target in split)
    assert len({target.sources for target in split}) == 2


@pytest.mark.parametrize(
    ("name", "model", "missing"),
    [
        ("bert-classifier", "BertModel", set()),
        ("bert", "BertForSequenceClassification", {"classifier.weight", "classifier.bias"}),
        ("vit", "ViTModel", None),
        ("llama", "LlamaModel", set()),
    ],
)
def test_a_model_with_another_head(name: str, model: str, missing: set[str] | None, tmp_path: Path) -> None:
    saved(name, tmp_path)
    keys = check(tmp_path, model)
    if missing is not None:
        assert {fqn for fqn in keys.missing if "pooler" not in fqn} == missing


@pytest.mark.parametrize(("name", "prefix"), [("bert-classifier", "bert."), ("gpt2", "transformer.")])
def test_a_base_models_checkpoint_feeds_the_model_with_a_head(name: str, prefix: str, tmp_path: Path) -> None:
    tensors = saved(name, tmp_path)
    bare = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    rewrite(tmp_path, bare)
    keys = check(tmp_path, ARCHITECTURES[name].model)
    assert set(keys.missing) == {key for key in tensors if not key.startswith(prefix)}


def test_a_key_mapping_of_the_user_comes_first(tmp_path: Path) -> None:
    tensors = saved("llama", tmp_path)
    # A key that is right as it is stays where a renaming spoils it.
    assert check(tmp_path, "LlamaForCausalLM", {r"^model\.": "language_model.model."}).missing == ()
    rewrite(tmp_path, {key.replace("model.layers", "trunk.blocks"): value for key, value in tensors.items()})
    assert check(tmp_path, "LlamaForCausalLM", {r"^trunk\.blocks": "model.layers"}).missing == ()


# --- ties, and what is allowed to be there, or not -----------------------------------------------------------------

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("held", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_tied_names_load_once_from_either(held: tuple[str, ...], tmp_path: Path) -> None:
    tensors = saved("llama-tied", tmp_path)
    table = tensors.pop(EMBEDDING)
    rewrite(tmp_path, tensors | dict.fromkeys(held, table))
    keys = check(tmp_path, "LlamaForCausalLM")
    assert keys.aliases == {HEAD: EMBEDDING}
    assert HEAD not in keys.targets
    assert keys.targets[EMBEDDING].sources == held[:1]
    assert (keys.ignored, keys.unexpected, keys.missing) == (held[1:], (), ())


STRANGE = "model.layers.0.block_sparse_moe.shared.w1.weight"


@pytest.mark.parametrize(
    ("name", "more", "is_ignored"),
    [
        ("bert", ["bert.embeddings.position_ids"], True),
        ("llama", [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)], True),
        ("mixtral", [STRANGE], False),  # named as in the file
    ],
)
def test_more_keys_are_ignored_or_unexpected(name: str, more: list[str], is_ignored: bool, tmp_path: Path) -> None:
    rewrite(tmp_path, saved(name, tmp_path) | dict.fromkeys(more, torch.ones(2)))
    keys = check(tmp_path, ARCHITECTURES[name].model)
    assert set(keys.ignored if is_ignored else keys.unexpected) == set(more)


# --- plain modules ----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.second = nn.Linear(4, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3), persistent=False)


def plain_tensors() -> dict[str, torch.Tensor]:
    state = Plain().state_dict()
    del state["second.weight"]
    return state


def test_a_plain_module_matches_by_name() -> None:
    tensors = plain_tensors()
    keys = map_keys(Plain(), headers(tensors), None)
    assert set(keys.targets) == set(tensors)
    assert list(keys.targets)[:3] == ["scale", "first.weight", "first.bias"]
    assert keys.aliases == {"second.weight": "first.weight"}
    assert keys.targets["norm.num_batches_tracked"].kind == "buffer"
    assert (keys.missing, keys.unexpected, keys.initialise, keys.problems) == ((), (), (), ())


def test_a_plain_module_with_renamed_keys() -> None:
    tensors = {f"net.{key}".replace("weight", "kernel"): value for key, value in plain_tensors().items()}
    keys = map_keys(Plain(), headers(tensors), {r"^net\.(.*)": r"\1", "kernel$": "weight"})
    assert keys.targets["first.weight"].sources == ("net.first.kernel",)
    assert (keys.missing, keys.unexpected) == ((), ())


def test_a_plain_modules_missing_unexpected_and_ignored() -> None:
    tensors = plain_tensors()
    del tensors["norm.running_mean"], tensors["first.weight"]
    tensors |= {"table": torch.arange(3), "first._extra_state": torch.ones(1), "head.weight": torch.ones(2)}
    keys = map_keys(Plain(), headers(tensors), None)
    assert keys.missing == ("first.weight", "norm.running_mean")
    assert keys.unexpected == ("first._extra_state", "head.weight")
    assert keys.ignored == ("table",)
    assert keys.initialise == (), "a real module keeps what it has"
    with torch.device("meta"):
        on_meta = map_keys(Plain(), headers(tensors), None)
    assert on_meta.initialise == ("table", "first.weight", "norm.running_mean")


# --- mismatches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("first.weight", torch.ones(6, 5), ("(6, 5)", "(6, 4)")),
        ("first.bias", torch.ones(6, dtype=torch.int64), ("torch.int64", "torch.float32")),
        ("norm.num_batches_tracked", torch.tensor(1.0), ("torch.float32", "torch.int64")),
        ("old.first.bias", torch.ones(6), ("first.bias", "'old.first.bias'")),
    ],
)
def test_a_mismatch_is_a_problem(key: str, value: torch.Tensor, parts: tuple[str, ...]) -> None:
    keys = map_keys(Plain(), headers(plain_tensors() | {key: value}), {r"^old\.": ""})
    (problem,) = keys.problems
    assert all(part in problem for part in (key, *parts))
    assert (keys.missing, keys.unexpected) == ((), ())


def test_all_problems_are_listed() -> None:
    wrong = {"first.weight": torch.ones(6, 5), "first.bias": torch.ones(5), "scale": torch.tensor(1)}
    assert len(map_keys(Plain(), headers(plain_tensors() | wrong), None).problems) == 3


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("more", [{EXPERT: None}, {EXPERT: torch.ones(5, 16)}, {FUSED: torch.ones(4, 48, 16)}])
def test_experts_that_do_not_add_up_are_a_problem(more: dict[str, torch.Tensor | None], tmp_path: Path) -> None:
    """One is missing, or smaller; or they are there in both formats."""
    tensors = {key: value for key, value in (saved("mixtral", tmp_path) | more).items() if value is not None}
    rewrite(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    keys = map_keys(build_module(None, checkpoint, None), checkpoint.tensors, None)
    assert keys.problems
    assert all(FUSED in line for line in keys.problems)


@pytest.mark.parametrize("mapping", [{"(": "x"}, {"a": r"\3"}])
def test_a_malformed_key_mapping_is_a_plan_error(mapping: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="key_mapping"):
        map_keys(Plain(), headers({"a": torch.ones(1)}), mapping)


# --- sharded modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "vit", "llama-tied", "bert-classifier"])
def test_a_sharded_module_maps_as_the_plain_one(name: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    saved(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    module = build_module(None, checkpoint, None)
    plain = map_keys(module, checkpoint.tensors, None)
    fully_shard(module, mesh=mesh)
    sharded, values = load_values(module, checkpoint)
    assert sharded == plain
    reference = ARCHITECTURES[name].make()
    assert all(torch.equal(values[fqn], tensor) for fqn, tensor in everything(reference).items())
