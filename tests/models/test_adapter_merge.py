"""The merge of LoRA adapters: names and every bit are those of peft's `merge_and_unload`; the module stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models import adapter_merges, plain_names
from tests.models.architectures import ARCHITECTURES

peft = pytest.importorskip("peft")

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


def adapted(name: str, dtype: torch.dtype = torch.float32, wide: bool = True, **fields: Any) -> Any:
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["float32", "bfloat16", "all-bfloat16", "all-float16"],
)
def test_a_merge_is_pefts_bit_for_bit(case: str, dtype: torch.dtype, wide: bool) -> None:
    name, fields = CASES[case]
    wrapped = adapted(name, dtype, wide, **fields)
    model = wrapped.base_model.model
    before = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    found, wanted = merged_here(model), merged_by_peft(wrapped)
    assert {fqn: (tensor.dtype, tensor.shape) for fqn, tensor in found.items()}.items() <= {
        fqn: (tensor.dtype, tensor.shape) for fqn, tensor in wanted.items()
    }.items()
    assert all(torch.equal(found[fqn], wanted[fqn]) for fqn in found)
    assert {tensor.data_ptr() for tensor in wanted.values()} == {wanted[fqn].data_ptr() for fqn in found}
    assert adapter_merges(model), "something was merged"
    assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in model.state_dict().items()), "no live tensor changed"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "q_proj: DoraLinearVariant is not plain LoRA"),
        ("llama-tied", {"target_modules": ["lm_head"]}, "lm_head: its base weight is tied to another layer's"),
        ("convnext", {"target_modules": ["dwconv"]}, "dwconv: its convolution has groups="),
        (
            "llama",
            {"target_modules": ["q_proj"], "trainable_token_indices": [1]},
            "TrainableTokensLayer is not a plain",
        ),
        ("llama", {"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias=True, but the base layer has no bias"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_listed(name: str, fields: dict[str, Any], message: str) -> None:
    fields = {"rank_pattern": {"dwconv": 24}} | fields
    with pytest.raises(PlanError, match="cannot be merged into the base weights") as found:
        adapter_merges(adapted(name, **fields).base_model.model)
    assert message in str(found.value)


def test_adapters_that_are_off_cannot_be_merged() -> None:
    model = adapted("llama", target_modules=["q_proj"]).base_model.model
    model.model.layers[0].self_attn.q_proj.enable_adapters(False)
    with pytest.raises(PlanError, match="q_proj: its active adapter is not 'default' alone"):
        adapter_merges(model)


def test_without_adapters_names_are_kept() -> None:
    model = ARCHITECTURES["llama-tied"].make()
    assert adapter_merges(model) == {}
    names = plain_names(model)
    assert all(name == plain for name, plain in names.items())
    assert "lm_head.weight" not in names
