"""What is checked on the ranks of `test_accelerate_on_ranks.py`: sharding and loading by accelerate's names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin as OraclePlugin
from accelerate.utils import fsdp_utils as oracle
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.distributed import fsdp2_prepare_model
from raysharding.distributed.fully_shard.internals import is_offloaded
from tests.distributed.accelerate_compat.accelerate_checks import full
from tests.distributed.accelerate_compat.accelerate_loading_checks import accelerator_with, kept_environment, shards_of
from tests.distributed.loading.load_checks import full_state
from tests.models.architectures import ARCHITECTURES

TRANSFORMER: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
NO_WRAP: dict[str, Any] = {"auto_wrap_policy": "no_wrap"}
PAIRS: tuple[tuple[Any, Callable[..., nn.Module]], ...] = (
    (OraclePlugin, oracle.fsdp2_prepare_model),
    (rs.FullyShardedDataParallelPlugin, fsdp2_prepare_model),
)


def groups_of(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def frees_after_forward(model: nn.Module) -> dict[str, bool]:
    """FQN of a parameter → whether its group frees the full parameters after forward."""
    found: dict[str, bool] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            found |= {str(item._param_fqn): bool(group._reshard_after_forward) for item in group.fsdp_params}
    return found


def assert_same_sharding(found: nn.Module, expected: nn.Module, case: object) -> None:
    assert groups_of(found) == groups_of(expected), case
    ours, theirs = shards_of(found), shards_of(expected)
    assert set(ours) == set(theirs), case
    for name, (placements, dtype, local) in theirs.items():
        assert (ours[name][0], ours[name][1]) == (placements, dtype), (case, name)
        assert torch.equal(ours[name][2], local), (case, name)
    for module in (found, expected):
        module(**inputs())
    assert frees_after_forward(found) == frees_after_forward(expected), case


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.arange(21).reshape(3, 7) % 60 + 3
    return {"input_ids": ids, "labels": ids}


def emptied(model: nn.Module, how: str) -> nn.Module:
    """A model that has its values on rank 0 only; on other ranks its parameters are zeros, or all is on meta."""
    if dist.get_rank() and how == "zeros":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    if dist.get_rank() and how == "meta":
        model.to("meta")
        model.tie_weights()  # type: ignore[operator]  # transformers models have it
    return model


def check_same_sharding(root: Path) -> None:
    """Groups, placements, shards, and which groups are freed after forward, as accelerate's."""
    ram, unfreed = {"cpu_ram_efficient_loading": True}, {"reshard_after_forward": False}
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("llama", TRANSFORMER, {}),
        ("llama", TRANSFORMER, unfreed),
        ("llama", NO_WRAP, ram),
        ("llama-tied", TRANSFORMER, ram),
        ("gpt2", TRANSFORMER, {}),
    )
    for name, arguments, options in cases:
        assert_prepared_alike(name, **arguments, **options)


def check_hsdp(root: Path) -> None:
    """The same over two replicas."""
    assert_prepared_alike("llama", replicate_size=2, cpu_ram_efficient_loading=True, **TRANSFORMER)


def assert_prepared_alike(name: str, *, replicate_size: int = 1, **fields: Any) -> None:
    models = []
    for kind, prepare in PAIRS:
        with kept_environment():
            plugin = kind(fsdp_version=2, **fields)
        models.append(prepare(accelerator_with(plugin, replicate_size=replicate_size), ARCHITECTURES[name].make()))
    assert_same_sharding(models[1], models[0], (name, fields))


def check_values_and_gradients(root: Path) -> None:
    """A prepared model computes what one process does, from rank 0's values alone too, with either plugin."""
    for name in ("llama-tied", "bert", "t5"):
        for kind, how in ((rs.FullyShardedDataParallelPlugin, "meta"), (OraclePlugin, "")):
            if not how and name != "llama-tied":
                continue
            with kept_environment():
                plugin: Any = kind(fsdp_version=2, cpu_ram_efficient_loading=bool(how), **TRANSFORMER)
            reference = ARCHITECTURES[name].make()
            model = emptied(ARCHITECTURES[name].make(), how)
            assert fsdp2_prepare_model(accelerator_with(plugin), model) is model
            given = {**inputs(), **({"decoder_input_ids": inputs()["input_ids"]} if name == "t5" else {})}
            results = [module(**given).loss for module in (model, reference)]
            torch.testing.assert_close(results[0], results[1], msg=name)
            for result in results:
                result.backward()
            for fqn, parameter in reference.named_parameters():
                gradient = model.get_parameter(fqn).grad
                assert gradient is not None, (name, fqn)
                torch.testing.assert_close(full(gradient), parameter.grad, msg=f"{name} {fqn}")


def check_accelerate_on_other_models(root: Path) -> None:
    """Where accelerate's own fails: buffers, a parameter in two groups, models without embeddings."""
    with kept_environment():
        plugin: Any = OraclePlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    with pytest.raises(AttributeError, match="device_mesh"):
        oracle.fsdp2_prepare_model(accelerator_with(plugin), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    fsdp2_prepare_model(accelerator_with(plugin), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    plugin = OraclePlugin(fsdp_version=2)
    model = oracle.fsdp2_prepare_model(accelerator_with(plugin), ARCHITECTURES["bert"].make())
    with pytest.raises((RuntimeError, ValueError, AssertionError, TypeError)):
        model(**inputs())  # the decoder's bias is in two groups
    for name in ("vit", "clip", "resnet"):
        model = ARCHITECTURES[name].make()
        expected = copy.deepcopy(model)(**ARCHITECTURES[name].inputs())
        fsdp2_prepare_model(accelerator_with(rs.FullyShardedDataParallelPlugin(fsdp_version=2, **TRANSFORMER)), model)
        found = model(**ARCHITECTURES[name].inputs())
        key = "logits" if "logits" in expected else "logits_per_image"
        torch.testing.assert_close(found[key], expected[key])


def check_mixed_precision(root: Path) -> None:
    """Trainable parameters become fp32, frozen ones stay, one warning on rank 0; as accelerate's but for float64."""
    models: list[Any] = []
    PartialState(cpu=True)  # accelerate's own messages want it
    for kind, prepare in PAIRS:
        plugin: Any = kind(fsdp_version=2, **TRANSFORMER)
        plugin.set_mixed_precision("bf16")
        model: Any = ARCHITECTURES["llama"].make(torch.bfloat16)
        model.model.embed_tokens.weight.requires_grad_(False)
        accelerator = accelerator_with(plugin, "bf16")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            models.append(prepare(accelerator, model))
        said = [str(one.message) for one in caught if "are kept in float32" in str(one.message)]
        assert len(said) == (kind is rs.FullyShardedDataParallelPlugin and dist.get_rank() == 0)
    assert_same_sharding(models[1], models[0], "bf16")
    assert models[1](**inputs()).logits.dtype == torch.bfloat16
    assert torch.equal(models[1](**inputs()).logits, models[0](**inputs()).logits)
    rs.reshard(models[1])
    assert models[1].model.embed_tokens.weight.dtype == torch.bfloat16, "frozen"
    assert models[1].lm_head.weight.dtype == torch.float32


def check_checkpointed(root: Path) -> None:
    """Activation checkpointing before sharding: accelerate's groups, and one process's gradients."""
    for ram, offload in ((False, True), (True, False)):
        models: list[Any] = []
        for (kind, prepare), apply in zip(PAIRS, (oracle.fsdp2_apply_ac, rs.fsdp2_apply_ac), strict=True):
            with kept_environment():
                options = {"activation_checkpointing": True, "activation_checkpointing_offload": offload}
                plugin = kind(fsdp_version=2, cpu_ram_efficient_loading=ram, **options, **TRANSFORMER)
            accelerator = accelerator_with(plugin)
            model: Any = ARCHITECTURES["llama"].make()
            plugin.set_auto_wrap_policy(model)
            models.append(prepare(accelerator, apply(accelerator, model)))
        assert_same_sharding(models[1], models[0], offload)
        reference = ARCHITECTURES["llama"].make()
        for model in (models[1], reference):
            model.train()
            model(**inputs(), use_cache=False).loss.backward()
        found = {name.replace("_checkpoint_wrapped_module.", ""): item for name, item in models[1].named_parameters()}
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(full(found[name].grad), parameter.grad, msg=name)
    check_saved_under_clean_names(models[1], reference, root / "checkpointed")


def check_saved_under_clean_names(model: nn.Module, reference: nn.Module, path: Path) -> None:
    """Wrappers are no part of a checkpoint's names."""
    import transformers

    rs.save_checkpoint(model, path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rs.load_checkpoint(model, path)
    state = full_state(model)
    if dist.get_rank() == 0:
        reopened = transformers.AutoModelForCausalLM.from_pretrained(path)
        for name, tensor in reference.state_dict().items():
            assert torch.equal(reopened.state_dict()[name], tensor), name
            assert torch.equal(state[name], tensor), name


def check_settings(root: Path) -> None:
    """Ignored modules stay whole, offload is known, a sharded model comes back, mistakes are everybody's errors."""
    model: Any = ARCHITECTURES["llama"].make()
    fields = TRANSFORMER | {"cpu_offload": True, "ignored_modules": "lm_head"}
    plugin = rs.FullyShardedDataParallelPlugin(fsdp_version=2, **fields)
    accelerator = accelerator_with(plugin)
    expected = copy.deepcopy(model)(**inputs()).loss
    assert id(fsdp2_prepare_model(accelerator, model)) == id(model)
    assert not isinstance(model.lm_head.weight, DTensor)
    assert is_offloaded(model)
    torch.testing.assert_close(model(**inputs()).loss, expected)
    groups = groups_of(model)
    assert id(fsdp2_prepare_model(accelerator, model)) == id(model)
    assert groups_of(model) == groups
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        fields = TRANSFORMER | {"mixed_precision_policy": "bf16"}
        first = rs.FullyShardedDataParallelPlugin(sharding_strategy=strategy, **fields)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "buffer_dtype=torch.bfloat16")
            model = fsdp2_prepare_model(accelerator_with(first), ARCHITECTURES["llama"].make())
        weight: Any = model.get_parameter("lm_head.weight")
        num_shards = 1 if strategy == "NO_SHARD" else dist.get_world_size()
        assert len(weight._local_tensor) == -(-64 // num_shards) or dist.get_rank() == dist.get_world_size() - 1
        assert model(**inputs()).logits.dtype == torch.bfloat16
    fields = TRANSFORMER | {"transformer_cls_names_to_wrap": ["Absent"]}
    missing = rs.FullyShardedDataParallelPlugin(fsdp_version=2, **fields)
    with pytest.raises(ValueError, match="Absent"):
        fsdp2_prepare_model(accelerator_with(missing), ARCHITECTURES["llama"].make())


def check_real_accelerator(root: Path) -> None:
    """`accelerator.prepare(model, optimizer)` with this library's functions in accelerate's places trains alike."""
    losses: list[list[float]] = []
    for ours in (False, True):
        with kept_environment():
            fields = TRANSFORMER | {"cpu_ram_efficient_loading": True, "activation_checkpointing": True}
            plugin: Any = OraclePlugin(fsdp_version=2, **fields)
        accelerator: Any = Accelerator(cpu=True)
        accelerator.state._shared_state["fsdp_plugin"] = plugin
        accelerator.state._shared_state["distributed_type"] = accelerate.accelerator.DistributedType.FSDP
        model: Any = emptied(ARCHITECTURES["llama"].make(), "zeros")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        patch = pytest.MonkeyPatch()
        if ours:
            for function in (fsdp2_prepare_model, rs.fsdp2_apply_ac, rs.fsdp2_switch_optimizer_parameters):
                patch.setattr(accelerate.accelerator, function.__name__, function)
        try:
            model, prepared = accelerator.prepare(model, optimizer)
        finally:
            patch.undo()
        losses.append([])
        for _ in range(4):
            prepared.zero_grad()
            loss = model(**inputs(), use_cache=False).loss
            accelerator.backward(loss)
            prepared.step()
            losses[-1].append(loss.item())
        accelerator.free_memory()
        type(accelerator.state)._reset_state(True)
    assert losses[0] == losses[1], losses
    assert losses[1][-1] < losses[1][0] - 0.1
