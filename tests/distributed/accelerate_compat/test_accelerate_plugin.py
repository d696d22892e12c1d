"""`FullyShardedDataParallelPlugin`: accelerate's own, as this library's `Sharding`."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import accelerate.utils.dataclasses as oracle
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin as OraclePlugin
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from raysharding.config import Sharding
from raysharding.distributed import FullyShardedDataParallelPlugin
from raysharding.distributed.accelerate_compat import sharding as accelerate_sharding
from raysharding.distributed.fully_shard import module_hooks

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """No `FSDP_` variable at the start, and all of them as before at the end."""
    kept = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(kept)


def test_it_is_accelerates_own() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert isinstance(plugin, OraclePlugin), "an Accelerator takes no other"
    plugins = (plugin, OraclePlugin(fsdp_version=2, mixed_precision_policy="bf16"))
    found, expected = ({key: one for key, one in vars(each).items() if key != "cpu_offload"} for each in plugins)
    assert found == expected


def test_without_accelerate_all_but_the_plugin_can_be_imported() -> None:
    code = "import sys; sys.modules['accelerate'] = None\n"
    for module in ("raysharding.distributed", "raysharding.distributed.accelerate_compat"):
        code += (
            f"from {module} import *; fsdp2_prepare_model; del fsdp2_prepare_model\n"
            f"try: from {module} import FullyShardedDataParallelPlugin\n"
            "except ImportError as error: assert 'accelerate' in str(error), error\n"
            "else: raise AssertionError\n"
        )
    subprocess.run([sys.executable, "-c", code], check=True)


class Block(nn.Linear):
    """Named in `_no_split_modules`."""


class Model(nn.Module):
    """Two kinds of blocks."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(2, 2), Block(2, 2)])
        self.head = nn.Linear(2, 2)


# --- to this library's Sharding ---------------------------------------------------------------------------------------


def initialise(module: nn.Module) -> None:
    """A user's function."""


def test_version_2_as_sharding() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.to_sharding() == Sharding(wrap="none")
    module_hooks._warned.clear()
    with pytest.warns(UserWarning, match="limit_all_gathers=False"):
        FullyShardedDataParallelPlugin(fsdp_version=2, limit_all_gathers=False).to_sharding()
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    alike: dict[str, Any] = {"reshard_after_forward": False, "cpu_offload": True, "ignored_modules": "head"}
    alike |= {"activation_checkpointing_offload": True, "param_init_fn": initialise}
    theirs: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    theirs |= {"mixed_precision_policy": policy, "activation_checkpointing": True, "cpu_ram_efficient_loading": True}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **alike, **theirs)
    ours: dict[str, Any] = {"wrap": ["Block"], "mixed_precision": policy, "activation_checkpointing": ["Block"]}
    assert plugin.to_sharding() == Sharding(sync_module_states=True, **alike, **ours)
    found = plugin.to_sharding(model)
    assert callable(found.wrap)
    assert found.activation_checkpointing is found.wrap
    assert [name for name, module in model.named_modules() if found.wrap(module)] == ["blocks.0", "blocks.1"]
    assert pickle.loads(pickle.dumps(found.wrap))(model.blocks[0])  # travels to Ray's workers


def test_wrap_policies_as_sharding() -> None:
    model, default = Model(), 100_000_000
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    cases: tuple[tuple[Any, dict[str, Any], Any, int], ...] = (
        ("transformer_based_wrap", {}, "auto", default),
        ("size_based_wrap", {"min_num_params": 7}, "size", 7),
        ("size_based_wrap", {}, "none", default),
        (size_based_auto_wrap_policy, {}, "size", default),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=9), {}, "size", 9),
        (by_class, {}, ["Block"], default),
    )
    for policy, fields, wrap, size in cases:
        for version in (1, 2):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy=policy, **fields)
            sharding = plugin.to_sharding()
            assert (sharding.wrap, sharding.min_num_params) == (wrap, size), (policy, fields)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy({Block}))
    with pytest.raises(ValueError, match=r"give the model, to_sharding\(model\)"):
        plugin.to_sharding()
    sharding = plugin.to_sharding(model)
    assert callable(sharding.wrap)
    assert [name for name, module in model.named_modules() if sharding.wrap(module)] == ["blocks.0", "blocks.1"]


def test_version_1_as_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: tuple[tuple[str, bool | None, int], ...] = (
        ("FULL_SHARD", None, 1),
        ("SHARD_GRAD_OP", False, 1),
        ("NO_SHARD", True, 8),
        ("HYBRID_SHARD", None, 2),
        ("HYBRID_SHARD_ZERO2", False, 2),
    )
    for name, resharded, replicas in cases:
        for arguments in ({"sharding_strategy": name}, {"reshard_after_forward": name}):
            plugin = FullyShardedDataParallelPlugin(**arguments)
            sharding = plugin.to_sharding(world_size=8, ranks_per_node=4)
            assert (sharding.reshard_after_forward, sharding.replicate_size) == (resharded, replicas), arguments
            monkeypatch.setenv("WORLD_SIZE", "8")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
            assert plugin.to_sharding() == sharding
            monkeypatch.undo()
    with pytest.raises(ValueError, match="ranks_per_node"):
        FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD").to_sharding(world_size=8)
    monkeypatch.setattr(oracle, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fields: dict[str, Any] = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"}
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True, sync_module_states=True, **fields)
    sharding = plugin.to_sharding()
    assert (sharding.forward_prefetch, sharding.backward_prefetch) == (True, BackwardPrefetch.BACKWARD_PRE)
    assert (sharding.cpu_offload, sharding.sync_module_states, sharding.param_init_fn) == (True, True, None)
    assert FullyShardedDataParallelPlugin().to_sharding().backward_prefetch is None


def test_fsdp1_mixed_precision_as_sharding() -> None:
    module_hooks._warned.clear()
    ignored = (nn.LayerNorm,)
    given = MixedPrecision(BF16, None, BF16, keep_low_precision_grads=True, _module_classes_to_ignore=ignored)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=given, limit_all_gathers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sharding = plugin.to_sharding()
    # FSDP1 reduces in the dtype of the parameters unless told otherwise, and leaves outputs as they are.
    assert sharding.mixed_precision == MixedPrecisionPolicy(BF16, BF16, None, True)
    said = [str(warning.message) for warning in caught]
    assert sharding.keep_low_precision_grads
    assert len(said) == 3, "each once"
    for word in ("buffer_dtype", "LayerNorm", "limit_all_gathers"):
        assert any(word in message for message in said), word
    plain = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecision(param_dtype=FP16, reduce_dtype=FP32))
    assert plain.to_sharding().mixed_precision == MixedPrecisionPolicy(FP16, FP32, None, True)


def test_accelerates_own_plugin_as_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    theirs = OraclePlugin(sync_module_states=True, auto_wrap_policy="size_based_wrap", min_num_params=3)
    sharding = accelerate_sharding.sharding_of(theirs)
    assert (sharding.param_init_fn, sharding.sync_module_states) == (None, True), "their function only allocates"
    assert (sharding.wrap, sharding.min_num_params) == ("size", 3)
