"""Translation of accelerate's plugin to this library's `Sharding`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from raysharding.config import Sharding
from raysharding.distributed.accelerate_compat.wrap_policy import fsdp2_prepare_auto_wrap_policy, min_num_params
from raysharding.distributed.comm import get_world_size
from raysharding.distributed.fully_shard import warn_once
from raysharding.torch_internals import BatchNorm


def sharding_of(
    plugin: Any, model: nn.Module | None = None, *, world_size: int | None = None, ranks_per_node: int | None = None
) -> Sharding:
    """Translate a plugin, accelerate's or ours, into a `Sharding`; a `UserWarning` says what FSDP2 ignores."""
    ignored = plugin.ignored_modules
    if not plugin.limit_all_gathers:
        warn_once("limit_all_gathers=False: FSDP2 always limits them")
    fields: dict[str, Any] = {
        **_wrap(plugin, model),
        "mixed_precision": fsdp2_precision(plugin.mixed_precision_policy),
        "keep_low_precision_grads": getattr(plugin.mixed_precision_policy, "keep_low_precision_grads", False),
        "cpu_offload": _offloads(plugin.cpu_offload),
        "ignored_modules": ignored if isinstance(ignored, str) else tuple(ignored or ()),
        "param_init_fn": _init_fn(plugin),
        "sync_module_states": bool(plugin.cpu_ram_efficient_loading or plugin.sync_module_states),
    }
    if plugin.activation_checkpointing:
        wrap = fields["wrap"]  # what is wrapped is checkpointed
        fields["activation_checkpointing"] = True if isinstance(wrap, str) else wrap
        fields["activation_checkpointing_offload"] = bool(plugin.activation_checkpointing_offload)
    if plugin.fsdp_version == 2:
        # accelerate leaves the root's parameters gathered from forward to backward, which `None` means.
        return Sharding(reshard_after_forward=None if plugin.reshard_after_forward else False, **fields)
    fields["forward_prefetch"] = bool(plugin.forward_prefetch)
    fields["backward_prefetch"] = plugin.backward_prefetch
    strategy: ShardingStrategy = plugin.reshard_after_forward or plugin.sharding_strategy
    if world_size is None:
        world_size = get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if ranks_per_node is None and (found := os.environ.get("LOCAL_WORLD_SIZE")):
        ranks_per_node = int(found)
    return Sharding.from_strategy(strategy, world_size, ranks_per_node, **fields)


def _wrap(plugin: Any, model: nn.Module | None) -> dict[str, Any]:
    """Return `Sharding.wrap` and related fields."""
    policy = plugin.auto_wrap_policy
    if policy is None:
        return {"wrap": "none"}
    base = getattr(policy, "func", policy)
    if base is size_based_auto_wrap_policy and (model is None or plugin.fsdp_version != 2):
        # FSDP1's own rule is `wrap="size"`; accelerate's on FSDP2 counts parameters of inner groups, too.
        size = min_num_params(plugin)
        return {"wrap": "size", "min_num_params": size} if size > 0 else {"wrap": "none"}
    if model is not None:
        predicate = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert predicate is not None, "there is a policy"
        return {"wrap": predicate}
    if base is transformer_auto_wrap_policy:
        classes = getattr(policy, "keywords", {}).get("transformer_layer_cls", ())
        names = plugin.transformer_cls_names_to_wrap
        return {"wrap": "auto" if names is None and not classes else names or [kind.__name__ for kind in classes]}
    raise ValueError(
        f"auto_wrap_policy={policy!r}: give the model, to_sharding(model): a policy is asked about modules"
    )


def fsdp2_precision(policy: MixedPrecision | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    """Return FSDP1's mixed precision as FSDP2's; an option without counterpart is a UserWarning, once."""
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy
    if policy.buffer_dtype not in (None, torch.float32):
        warn_once(f"buffer_dtype={policy.buffer_dtype}: buffers keep the dtype they are stored in under FSDP2")
    others = [kind.__name__ for kind in policy._module_classes_to_ignore if not issubclass(kind, BatchNorm)]
    if others:
        warn_once(f"_module_classes_to_ignore: {', '.join(others)} compute in low precision; only BatchNorm does not")
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype or policy.param_dtype,
        cast_forward_inputs=policy.cast_forward_inputs or policy.cast_root_forward_inputs,
    )


def _offloads(offload: Any) -> bool:
    if isinstance(offload, CPUOffload):
        return bool(offload.offload_params)
    if isinstance(offload, CPUOffloadPolicy) and not offload.pin_memory:
        warn_once("CPUOffloadPolicy(pin_memory=False): shards in host memory are pinned where there is CUDA")
    return isinstance(offload, CPUOffloadPolicy)


def _init_fn(plugin: Any) -> Callable[[nn.Module], Any] | None:
    """Return the user's function; `None` for accelerate's own, which only allocates, as sharding does anyway."""
    function: Callable[[nn.Module], Any] | None = plugin.param_init_fn
    accelerates = "FullyShardedDataParallelPlugin.__post_init__.<locals>.<lambda>"
    return None if getattr(function, "__qualname__", "") == accelerates else function
