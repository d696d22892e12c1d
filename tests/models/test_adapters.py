"""LoRA adapters: names and values are peft's, on a model on meta and in files, and so is every bit of their merge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.errors import PlanError
from raysharding.models import (
    Adapted,
    AdapterNames,
    Initialiser,
    adapter_merges,
    build_module,
    map_keys,
    missing_rules,
    plain_names,
)
from tests.models.architectures import ARCHITECTURES
from tests.models.filling import everything

peft = pytest.importorskip("peft")

TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn"],
    "mixtral": ["q_proj", "o_proj"],
    "bert-classifier": ["query", "word_embeddings"],
    "llama-tied": ["q_proj"],
}


def saved(name: str, path: Path) -> Path:
    ARCHITECTURES[name].make().save_pretrained(path)
    return path


def lora(name: str, **fields: Any) -> Any:
    options = {"r": 2, "target_modules": TARGETS[name], "lora_dropout": 0.1, "fan_in_fan_out": name == "gpt2"}
    return peft.LoraConfig(**{**options, **fields})


def built(name: str, path: Path, dtype: torch.dtype | None = None, **fields: Any) -> nn.Module:
    return build_module(Adapted.of(None, lora(name, **fields)), open_checkpoint(saved(name, path)), dtype)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("fields", [{}, {"bias": "all"}, {"bias": "lora_only"}], ids=["plain", "all", "lora_only"])
def test_names_are_those_of_pefts_own_files(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    module = built(name, tmp_path / "base", **fields)
    theirs = peft.get_peft_model(ARCHITECTURES[name].make(), lora(name, **fields))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    with safe_open(tmp_path / "theirs/adapter_model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
    names: Any = AdapterNames.of(module)
    held = everything(module)
    assert {key: tuple(held[fqn].shape) for fqn, key in names.files.items()} == shapes
    trained = {fqn for fqn, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == set(names.files)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS"])
def test_the_head_of_a_task_is_trained_and_saved(task_type: str, tmp_path: Path) -> None:
    """peft's classes for tasks see to that, and they are not used here."""
    fields: dict[str, Any] = {"task_type": task_type}
    names: Any = AdapterNames.of(built("bert-classifier", tmp_path, **fields))
    theirs = peft.get_peft_model(ARCHITECTURES["bert-classifier"].make(), lora("bert-classifier", **fields))
    keys = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert set(names.files.values()) == set(keys) >= {"base_model.model.classifier.weight"}


@pytest.mark.parametrize("name", TARGETS)
def test_the_base_is_fed_as_without_adapters(name: str, tmp_path: Path) -> None:
    module = built(name, tmp_path, modules_to_save=["classifier"] if name == "bert-classifier" else None)
    opened = open_checkpoint(tmp_path)
    names: Any = AdapterNames.of(module)
    keys, plain = (map_keys(one, opened.tensors, None) for one in (module, build_module(None, opened, None)))
    assert not keys.mismatches(strict=True)
    fed = {names.base.get(fqn, fqn): target for fqn, target in keys.targets.items() if fqn not in names.copies}
    assert {fqn: target.runs for fqn, target in fed.items()} == {fqn: one.runs for fqn, one in plain.targets.items()}
    assert set(keys.initialise) == (names.added - set(names.copies)) | set(plain.initialise)
    for twin, original in names.copies.items():
        assert keys.targets[twin].sources == keys.targets[original].sources
    assert bool(names.copies) == (name == "bert-classifier")
    assert missing_rules(module, keys.initialise, 0) == ()


def test_adapters_feed_adapters_once_the_base_is_there(tmp_path: Path) -> None:
    module = built("llama", tmp_path / "base")
    peft.get_peft_model(ARCHITECTURES["llama"].make(), lora("llama")).save_pretrained(tmp_path / "adapters")
    opened = open_checkpoint(tmp_path / "adapters")
    assert opened.adapter is not None
    assert opened.from_json(opened.to_json()) == opened
    names: Any = AdapterNames.of(module)
    keys = map_keys(module, opened.tensors, None)
    assert set(keys.targets) == set(names.files)
    assert "model.embed_tokens.weight" in keys.missing  # adapters alone are no model
    module.to_empty(device="cpu")
    keys = map_keys(module, opened.tensors, None)
    assert not keys.mismatches(strict=True)
    assert set(keys.targets) == set(names.files)
    assert keys.initialise == ()


def test_a_base_is_named_by_what_opens_it_again(tmp_path: Path) -> None:
    adapted = Adapted.of(None, lora("llama"))
    saved("llama", tmp_path)
    (tmp_path / "first.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    for given, named in (("", ""), ("model.safetensors", ""), ("first.safetensors", "first.safetensors")):
        names: Any = AdapterNames.of(build_module(adapted, open_checkpoint(tmp_path / given), None))
        assert names.config.base_model_name_or_path == str(tmp_path / named)


COMMIT = "0123456789abcdef" * 2 + "01234567"
OF_EMBEDDING = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
OF_EXPERTS: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
OF_TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [1]}


@pytest.mark.parametrize(
    ("theirs", "mine", "differs"),
    [
        ("{}/a", "{}/b", True),
        ("{}/a", "{}/link", False),
        ("{}/./a/", "{}/a", False),
        ("file://{}/a", "{}/a", False),
        ("/elsewhere/a", "{}/a", False),  # it was moved, or is another machine's
        ("/elsewhere/c", "{}/a", True),
        ("{}/more/a", "{}/a", True),  # checkpoint-100 of two runs
        ("org/a", "{}/a", False),  # a copy of the hub's
        ("org/c", "{}/a", True),
        ("org/a", f"hf://other/a@{COMMIT}", True),
        ("org/a", f"/cache/models--org--a/snapshots/{COMMIT}", False),
        ("org/c", f"/cache/models--org--a/snapshots/{COMMIT}", True),
        (f"/other/models--org--a/snapshots/{COMMIT}", f"hf://org/a@{COMMIT}", False),
        (f"/other/models--org--a/snapshots/{COMMIT[::-1]}", f"hf://org/a@{COMMIT}", True),
        ("s3://bucket/a", "s3://bucket/b", True),
        (None, "{}/a", False),
        ("\0", "{}/a", False),
    ],
)
def test_adapters_of_another_base_are_told_where_that_is_known(
    theirs: str | None, mine: str, differs: bool, tmp_path: Path
) -> None:
    for name in ("a", "b", "more/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    module = Adapted.of(None, lora("llama")).build(lambda _: ARCHITECTURES["llama"].make(), mine.format(tmp_path))
    names: Any = AdapterNames.of(module)
    fields = {"base_model_name_or_path": theirs and theirs.format(tmp_path), "revision": "main"}
    adapters = Checkpoint("there", (), {}, None, {}, fields)
    assert bool(names.other_base(adapters)) == differs


def test_values_are_by_pefts_rule(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    for init, bound in ((True, True), ("gaussian", False), (False, True)):
        initialiser = Initialiser(built("llama", tmp_path / str(init), init_lora_weights=init), 3)
        first, second = (initialiser.value(name.format(part)) for part in "AB")
        assert first.any()
        assert (first.abs().max() <= first.shape[1] ** -0.5) == bound  # a Linear's: uniform within 1/sqrt(in)
        assert bool(second.any()) == (init is False)
        assert torch.equal(first, initialiser.value(name.format("A")))
    module = built("bert-classifier", tmp_path / "embedding")
    prefix = "bert.embeddings.word_embeddings.lora_embedding_"
    assert not Initialiser(module, 3).value(f"{prefix}A.default").any()
    assert Initialiser(module, 3).value(f"{prefix}B.default").any()


def test_adapters_of_a_half_precision_model_are_float32(tmp_path: Path) -> None:
    module = built("llama", tmp_path, torch.bfloat16)
    dtypes = {"lora" in name: parameter.dtype for name, parameter in module.named_parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_qalora": True}, "use_qalora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
        (peft.IA3Config(), r"IA3Config: give a peft\.LoraConfig"),
        ([], "a list: give"),
    ],
)
def test_what_is_no_lora_config_or_needs_whole_base_weights_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Adapted.of(None, lora("llama", **config) if isinstance(config, dict) else config)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llama", {"target_modules": ["nowhere"]}, r"peft cannot add adapters to LlamaForCausalLM: .*'nowhere'"),
        (
            "llama",
            {"trainable_token_indices": [0, 64, -1]},
            r"names \[64, -1\], but model.embed\S+ has 64 rows: resize",
        ),
        ("llama-tied", OF_EMBEDDING, "adapters of embedding and head one memory in two layouts"),
        ("mixtral", OF_EXPERTS, "ParamWrapper does not work with lora_dropout != 0"),
    ],
)
def test_what_peft_cannot_add_is_refused(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        built(name, tmp_path, **fields)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_hostile_configurations_are_refused(tmp_path: Path) -> None:
    opened, fields = open_checkpoint(saved("llama", tmp_path)), Adapted.of(None, lora("llama")).fields
    with pytest.raises(PlanError, match="returned a PeftModel: return the model inside it"):
        build_module(lambda: peft.get_peft_model(ARCHITECTURES["llama"].make(), lora("llama")), opened, None)
    cannot = "mine: (not a LoraConfig|peft cannot add adapters)"
    for hostile, said in (
        ({"target_modules": "("}, cannot),
        ({"rank_pattern": None}, cannot),
        ({"rank_pattern": {"(": 1}}, cannot),
        ({"r": "much"}, cannot),
        ({"peft_type": "IA3"}, "peft_type='IA3': only LORA"),
        ({"layers_to_transform": [0], "target_modules": ".*"}, "not a LoraConfig"),
    ):
        with pytest.raises(PlanError, match=said):
            build_module(Adapted(None, {**fields, **hostile}, "mine"), opened, None)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3, "use_rslora": True}),
    "linear-bias": ("bert", {"target_modules": ["query"], "lora_bias": True}),
    "transposed": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "embedding": ("bert-classifier", {"target_modules": ["word_embeddings"], "modules_to_save": ["classifier"]}),
    "conv": ("convnext", {"target_modules": ["patch_embeddings"], "lora_alpha": 5}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "lora_alpha": 5}),
    "used-twice": ("albert", {"target_modules": ["query"]}),
    "tied-head": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
}


def wrapped_by_peft(name: str, dtype: torch.dtype = torch.float32, wide: bool = True, **fields: Any) -> Any:
    """A `PeftModel` with adapters of random values, in float32 (`wide`) or in the model's dtype."""
    options: dict[str, Any] = {"autocast_adapter_dtype": wide}
    wrapped = peft.get_peft_model(ARCHITECTURES[name].make(dtype), peft.LoraConfig(r=2, **fields), **options)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    return wrapped


def merged_by_peft(wrapped: Any) -> dict[str, torch.Tensor]:
    """FQN → tensor after peft's own merge of a copy, under every name."""
    merged = copy.deepcopy(wrapped).merge_and_unload()
    return dict(merged.named_parameters(remove_duplicate=False)) | dict(merged.named_buffers(remove_duplicate=False))


def merged_here(model: nn.Module) -> dict[str, torch.Tensor]:
    """FQN → tensor of the merged model, one tensor at a time."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    merges, merged = adapter_merges(model), {}
    for fqn, plain in plain_names(model).items():
        merged[plain] = held[fqn].detach().clone()
        if fqn in merges:
            assert merges[fqn].name == plain
            merged[plain] += merges[fqn].delta({name: held[name].detach().clone() for name in merges[fqn].factors})
    return merged


DTYPES = [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "wide"), DTYPES, ids=["float32", "bfloat16", "all-bfloat16", "all-float16"])
def test_a_merge_is_pefts_bit_for_bit(case: str, dtype: torch.dtype, wide: bool) -> None:
    name, fields = CASES[case]
    wrapped = wrapped_by_peft(name, dtype, wide, **fields)
    model = wrapped.base_model.model
    before = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    found, wanted = merged_here(model), merged_by_peft(wrapped)
    for fqn, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[fqn].dtype, wanted[fqn].shape), fqn
        assert torch.equal(tensor, wanted[fqn]), fqn
    assert {tensor.data_ptr() for tensor in wanted.values()} == {wanted[fqn].data_ptr() for fqn in found}
    assert adapter_merges(model), "something was merged"
    assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in model.state_dict().items()), "no live tensor changed"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "q_proj: DoraLinearVariant is not plain LoRA"),
        ("llama-tied", {"target_modules": ["lm_head"]}, "lm_head: its base weight is tied to another layer's"),
        ("convnext", {"target_modules": ["dwconv"]}, "dwconv: its convolution has groups="),
        ("llama", OF_TOKENS, "TrainableTokensLayer is not a plain"),
        ("llama", {"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias=True, but the base layer has no bias"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_listed(name: str, fields: dict[str, Any], message: str) -> None:
    fields = {"rank_pattern": {"dwconv": 24}} | fields
    with pytest.raises(PlanError, match="cannot be merged into the base weights") as found:
        adapter_merges(wrapped_by_peft(name, **fields).base_model.model)
    assert message in str(found.value)


def test_adapters_that_are_off_cannot_be_merged() -> None:
    model = wrapped_by_peft("llama", target_modules=["q_proj"]).base_model.model
    model.model.layers[0].self_attn.q_proj.enable_adapters(False)
    with pytest.raises(PlanError, match="q_proj: its active adapter is not 'default' alone"):
        adapter_merges(model)


def test_without_adapters_names_are_kept() -> None:
    model = ARCHITECTURES["llama-tied"].make()
    assert adapter_merges(model) == {}
    names = plain_names(model)
    assert all(name == plain for name, plain in names.items())
    assert "lm_head.weight" not in names
