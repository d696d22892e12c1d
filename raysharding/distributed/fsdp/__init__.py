"""What users of PyTorch's FullyShardedDataParallel (FSDP1) know by name, as functions that take the root module."""

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
    """Cut a model over a mesh in place: `fully_shard` on each block, then on the root; every rank calls it.

    Blocks are found as by `Sharding(wrap="auto")`; `shard_module` takes other rules, and the other options.

    Args:
        model: A module or `DistModule`, on meta or on the mesh's device.
        mesh: 1-D, or 2-D (replicate, shard) for HSDP, over all ranks.

    Raises:
        PlanError: See `shard_module`.
    """
    shard_module(model, mesh)


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """(FQN, parameter) of a module; each rank alone, no communication.

    As FSDP1's `FullyShardedDataParallel.named_parameters`, but with clean FQNs always: those of the module before it
    was sharded, without what activation checkpointing or torch.compile put into them.

    Args:
        module: Any module. Where a forward left full parameters registered, the shards are registered again first.
        prefix: Put before every name.
        recurse: Also those of submodules.
        remove_duplicate: Tied parameters once, under their first name; if not, under every name.

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
    """(FQN, buffer) of a module, persistent or not; each rank alone, no communication.

    As FSDP1's `FullyShardedDataParallel.named_buffers`, with clean FQNs always, see `named_parameters`.

    Args:
        module: Any module.
        prefix: Put before every name.
        recurse: Also those of submodules.
        remove_duplicate: A buffer that is registered twice once, under its first name.

    Returns:
        An iterator over this rank's plain tensors.
    """
    pairs = module.named_buffers(prefix, recurse, remove_duplicate)
    return ((clean_name(name), buffer) for name, buffer in pairs)


def params_with_grad(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient, each once, in module order; each rank alone, no communication.

    As the property of the same name of fairscale's FSDP, from which FSDP1 comes. A parameter whose shard is empty on
    this rank counts too, where FSDP1 leaves it out: the list is the same on every rank.

    Args:
        module: The sharded root module, after backward.

    Returns:
        DTensors whose `.grad` is a DTensor, and plain 0-dim parameters.
    """
    return [parameter for _, parameter in named_parameters(module) if parameter.grad is not None]
