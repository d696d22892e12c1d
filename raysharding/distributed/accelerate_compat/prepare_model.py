"""Sharding of a model with the groups of accelerate's FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from raysharding.config import Sharding
from raysharding.distributed.accelerate_compat.load import fill
from raysharding.distributed.accelerate_compat.sharding import sharding_of
from raysharding.distributed.accelerate_compat.wrap_policy import fsdp2_prepare_auto_wrap_policy
from raysharding.distributed.comm import current_group, get_rank, init_mesh, mesh_group, using_group
from raysharding.distributed.fully_shard import meta_like, module_tensors, shard_groups, tensor_slots, unwrapped
from raysharding.errors import PlanError
from raysharding.models import input_and_output, wrap_groups


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model by a plugin's settings, in place; collective, with the same model on every rank.

    As accelerate's function of this name, and with its groups: what the wrap policy picks, the input embeddings, the
    last norm with the output embeddings (not freed after forward; with the input embeddings, where they are tied), and
    the root for the rest. What would not be sound is left to the group around it, as in `shard_module`: containers
    without a forward, parameters that two groups would share, dtypes that do not mix.

    Under the plugin's `cpu_ram_efficient_loading` only rank 0's values count. Every rank gets them, non-persistent
    buffers included (accelerate keeps each rank's own of those); the other ranks' may be on meta. Otherwise each rank
    cuts its own values. For activation checkpointing, call `fsdp2_apply_ac` before.

    Under mixed precision, trainable parameters of narrower dtypes are converted to fp32 first, with a UserWarning on
    rank 0.

    Args:
        accelerator: accelerate's `Accelerator`, or an object with `state.fsdp_plugin` (accelerate's plugin or this
            library's; its wrap policy is completed for the model), `device`, and where wanted `mixed_precision`,
            `is_main_process`, `torch_device_mesh` with `parallelism_config.fsdp_dim_names`. Default mesh: all ranks.
        model: Real on every rank, or on rank 0 only under `cpu_ram_efficient_loading`. A sharded model is returned
            unchanged.

    Returns:
        The same model. Wire: under `cpu_ram_efficient_loading` each shard once to each rank that holds it.

    Raises:
        PlanError: (a ValueError) On every rank: settings that do not fit the model, models that differ between the
            ranks, values that rank 0 does not have, or 4-bit parameters of bitsandbytes, which this does not shard.
        ValueError: accelerate's own: the model lacks a class that the plugin, or its `_no_split_modules`, names.
    """
    root = unwrapped(model)
    if isinstance(root, FSDPModule) or isinstance(getattr(root, "_orig_mod", None), FSDPModule):
        return model
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(root)
    _refuse_4_bit(root)
    mesh = _mesh_of(accelerator)
    with using_group(current_group() if mesh is None else mesh_group(mesh)):
        _raise_precision(accelerator, root)
        sharding = replace(
            sharding_of(plugin, root),
            activation_checkpointing=False,
            activation_checkpointing_offload=False,
            sync_module_states=False,
        )
        groups, unfreed = _groups(plugin, root, sharding)
        mesh = mesh or init_mesh(accelerator.device.type, sharding)
        if not plugin.cpu_ram_efficient_loading:
            shard_groups(root, mesh, sharding, groups, unfreed)
            return model
        values = _put_on_meta(root)
        shard_groups(root, mesh, replace(sharding, param_init_fn=None), groups, unfreed)
        fill(root, module_tensors, values)
    return model


def _refuse_4_bit(model: nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "Params4bit"]
    if names:
        raise PlanError(
            f"{names[0]} and {len(names) - 1} more are 4-bit parameters of bitsandbytes: load the model without "
            "quantization_config, or name their modules in ignored_modules and shard with shard_module"
        )


def _raise_precision(accelerator: Any, model: nn.Module) -> None:
    """Convert trainable parameters to fp32 under mixed precision; the policy casts them for the computation."""
    precision = getattr(accelerator, "mixed_precision", None) or "no"
    if precision == "no":
        return
    raised = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.to(torch.float32)
            raised.append(name)
    if raised and getattr(accelerator, "is_main_process", get_rank() == 0):
        warnings.warn(
            f"mixed_precision={precision!r}: {len(raised)} trainable parameters, such as {raised[0]}, are kept in "
            "float32 from here on, and saved so",
            UserWarning,
            stacklevel=3,
        )


def _mesh_of(accelerator: Any) -> DeviceMesh | None:
    """Return the FSDP axes of the accelerator's mesh; `None` if the accelerator has none."""
    mesh: DeviceMesh | None = getattr(accelerator, "torch_device_mesh", None)
    config = getattr(accelerator, "parallelism_config", None)
    return mesh if mesh is None or config is None else mesh[tuple(config.fsdp_dim_names)]


def _groups(
    plugin: Any, model: nn.Module, sharding: Sharding
) -> tuple[tuple[tuple[str, ...], ...], set[tuple[str, ...]]]:
    """Return the groups, and the groups that are not freed after forward."""
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    modules = dict(model.named_modules())
    picked = [name for name, module in modules.items() if name and policy is not None and policy(module)]
    name_of = {module: name for name, module in modules.items()}
    first, last = input_and_output(model)
    tail = [_final_norm(model), last]
    carved = []
    if first is not None and getattr(first, "weight", None) is getattr(last, "weight", first):
        tail.insert(1, first)  # one parameter, one group
    elif first in name_of:
        carved.append((name_of[first],))
    ending = tuple(name for module in tail if (name := name_of.get(module)) and name not in picked)
    groups = wrap_groups(model, sharding, [*((name,) for name in picked), *carved, ending])
    return groups, {names for names in groups if set(names) <= set(ending)}


def _final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last norm among the direct children of the model's body, like accelerate."""
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None) if prefix else model
    children = body.children() if isinstance(body, nn.Module) else ()
    norms = [child for child in children if "Norm" in type(child).__name__]
    return norms[-1] if norms else None


def _put_on_meta(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Put a model's tensors on meta, with ties; return the real tensors by name on rank 0, and free the others."""
    held = module_tensors(model)
    empty: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in held.values():
        empty[tensor] = meta_like(tensor)
        empty[tensor].__dict__.update(tensor.__dict__)
    for table, name, tensor in tensor_slots(model.modules()):
        table[name] = empty[tensor]
    return held if get_rank() == 0 else {}
