"""Methods of PyTorch's FullyShardedDataParallel (FSDP1), as functions that take the root module."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.distributed.fsdp.optim_state_dict import (
    full_optim_state_dict,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
)
from raysharding.distributed.fsdp.optimizer_state_forms import (
    optim_state_dict,
    optim_state_dict_to_load,
    sharded_optim_state_dict,
)
from raysharding.distributed.fsdp.state_dict_type import get_state_dict_type, set_state_dict_type, state_dict_type
from raysharding.distributed.fsdp.summon_full_params import apply, summon_full_params
from raysharding.distributed.fully_shard import clip_grad_norm_, fsdp_modules, no_sync, shard_module, show_shards
from raysharding.models import clean_name

__all__ = [
    "apply",
    "apply_fsdp2",
    "clip_grad_norm_",
    "fsdp_modules",
    "full_optim_state_dict",
    "get_state_dict_type",
    "named_buffers",
    "named_parameters",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "params_with_grad",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_state_dict_type",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
    "summon_full_params",
]


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over a mesh in place: `fully_shard` on each block, then on the root; every rank calls this.

    Blocks are the modules that `Sharding(wrap="auto")` finds; `shard_module` takes other rules and options.

    Args:
        model: A module or `DistModule`, on meta or on the mesh's device.
        mesh: 1-D, or 2-D (replicate, shard) for HSDP, over all ranks.

    Raises:
        PlanError: On every rank, if a part is sharded already, or a group would mix dtypes.
    """
    shard_module(model, mesh)


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return (FQN, parameter) of a module. Not collective.

    As FSDP1's `FullyShardedDataParallel.named_parameters`, but always with clean FQNs: those of the unsharded module,
    without the prefixes of activation checkpointing and torch.compile.

    Args:
        module: Any module. If a forward left full parameters registered, the shards are registered again first.
        prefix: Put before every name.
        recurse: Also those of submodules.
        remove_duplicate: True to return tied parameters once, under their first name; False for every name.

    Returns:
        An iterator over DTensors (`Shard(0)`, global shape) and plain 0-dim parameters; inside `summon_full_params`
        over the full ones.
    """
    show_shards(module)
    pairs = module.named_parameters(prefix, recurse, remove_duplicate)
    return ((clean_name(name), parameter) for name, parameter in pairs)


def named_buffers(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (FQN, buffer) of a module, persistent or not. Not collective.

    As FSDP1's `FullyShardedDataParallel.named_buffers`, but always with clean FQNs.

    Args:
        module: Any module.
        prefix: Put before every name.
        recurse: Also those of submodules.
        remove_duplicate: True to return a buffer that is registered twice once, under its first name.

    Returns:
        An iterator over this rank's plain tensors.
    """
    pairs = module.named_buffers(prefix, recurse, remove_duplicate)
    return ((clean_name(name), buffer) for name, buffer in pairs)


def params_with_grad(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, each once, in module order. Not collective.

    As the property of that name of fairscale's FSDP, from which FSDP1 comes. A parameter with an empty shard on this
    rank is included, unlike in FSDP1: the list is the same on every rank.

    Args:
        module: The sharded root module, after backward.

    Returns:
        DTensors whose `.grad` is a DTensor, and plain 0-dim parameters.
    """
    return [parameter for _, parameter in named_parameters(module) if parameter.grad is not None]
