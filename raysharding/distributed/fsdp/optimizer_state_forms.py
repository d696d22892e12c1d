"""FSDP1's `optim_state_dict` and related functions: optimizer state in the form of `state_dict_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import agreeing, require_group
from raysharding.distributed.fsdp.optim_state_dict import (
    gathered,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
)
from raysharding.distributed.fsdp.state_dict_type import get_state_dict_type
from raysharding.distributed.fully_shard import over_ranks_of
from raysharding.distributed.optim import OptimizerSnapshot, agreed_snapshot, parameter_names, state_like
from raysharding.errors import PlanError


@over_ranks_of("model")
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state by FQN, in the form of the model's `state_dict_type`; collective.

    As FSDP1's `optim_state_dict`, but the default form is the sharded one, not the full one. In the full form tensors
    are full, on every rank or (`FullOptimStateDictConfig(rank0_only=True)`) on rank 0 only; in the other forms tensors
    are DTensors, for `torch.distributed.checkpoint`. `offload_to_cpu`, on by default, copies tensors to host memory.

    Args:
        model: The sharded root module.
        optim: Over its parameters.
        optim_state_dict: A state dict as from `optim.state_dict()`, to convert. Default: `optim.state_dict()`.
        group: The group of the model's mesh, or `None`.

    Returns:
        `{"state": {FQN: {name: tensor or value}}, "param_groups": [{..., "params": [FQN, ...]}]}`; an empty dict on
        the other ranks under `rank0_only`. Wire: in the full form each shard to each rank that gets it; else nothing.

    Raises:
        ValueError: `group` has other ranks.
        PlanError: On every rank, if the optimizers of the ranks hold other param groups or state than rank 0's.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    require_group(group)
    snapshot = agreed_snapshot(model, optim, optim_state_dict)
    assert snapshot is not None, "there is an optimizer"
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return _sharded(snapshot, on_cpu=config.offload_to_cpu)
    rank0_only = getattr(config, "rank0_only", False)
    return gathered(snapshot, model, rank0_only=rank0_only, on_cpu=config.offload_to_cpu)


@over_ranks_of("model")
def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return an optimizer's state by FQN, as DTensors in host memory; collective, but sends no tensor.

    As FSDP1's `sharded_optim_state_dict`: `optim_state_dict` in the sharded form, independent of `state_dict_type`.

    Raises:
        ValueError: `group` has other ranks.
        PlanError: On every rank, if the optimizers of the ranks hold other param groups or state than rank 0's.
    """
    require_group(group)
    snapshot = agreed_snapshot(model, optim)
    assert snapshot is not None, "there is an optimizer"
    return _sharded(snapshot, on_cpu=True)


@over_ranks_of("model")
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert the result of `optim_state_dict` to the form that the optimizer loads; collective.

    As FSDP1's `optim_state_dict_to_load`. World sizes may differ between the two in the full form, and in the others
    where `torch.distributed.checkpoint` loaded the state.

    Args:
        model: The sharded root module.
        optim: The optimizer that loads it.
        optim_state_dict: In the form that `state_dict_type` chose for the model; in the full one under
            `FullOptimStateDictConfig(rank0_only=True)` that of rank 0 is used.
        is_named_optimizer: True for FQNs as keys, for torch's `_NamedOptimizer`; False for parameter ids.
        load_directly: True to also call `optim.load_state_dict` with the result.
        group: The group of the model's mesh, or `None`.

    Returns:
        A state dict for `optim.load_state_dict`. Wire: under `rank0_only` each shard once; else nothing but outcomes.

    Raises:
        ValueError: `group` has other ranks.
        PlanError: On every rank, before data moves: names, shapes, param groups or kinds of tensor that do not fit.
    """
    require_group(group)
    settings = get_state_dict_type(model)
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        with agreeing():
            result = _checked_by_id(optim_state_dict, model, optim)
    elif getattr(settings.optim_state_dict_config, "rank0_only", False):
        result = scatter_full_optim_state_dict(optim_state_dict, model, optim=optim)
    else:
        with agreeing():
            result = shard_full_optim_state_dict(optim_state_dict, model, optim=optim)
    if is_named_optimizer:
        result = rekey_optim_state_dict(result, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    if load_directly:
        optim.load_state_dict(result)
    return result


def _sharded(snapshot: OptimizerSnapshot, *, on_cpu: bool) -> dict[str, Any]:
    """Return state by FQN, with its current sharding. Not collective."""
    # A copy on CPUs, too, as FSDP1's: the optimizer's next step must not change it.
    tensors = {key: value.to("cpu", copy=True) if on_cpu else value for key, value in snapshot.tensors.items()}
    return snapshot.state_dict(tensors, on_cpu=on_cpu)


def _checked_by_id(
    optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return sharded state by parameter id. Not collective.

    Raises:
        PlanError: The model lacks a parameter, or a tensor is sharded in another way than its parameter.
    """
    result = rekey_optim_state_dict(optim_state_dict, OptimStateKeyType.PARAM_ID, model, optim=optim)
    parameters = {name: parameter for parameter, name in parameter_names(model).items()}
    problems = []
    for fqn, held in optim_state_dict["state"].items():
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and fqn in parameters and value.ndim:
                like = state_like(parameters[fqn], value.shape, value.dtype)
                meshes = [one.device_mesh if isinstance(one, DTensor) else None for one in (value, like)]
                if meshes[0] != meshes[1]:
                    what = "another mesh" if all(meshes) else "no mesh" if meshes[0] is None else "a mesh"
                    problems.append(f"{fqn}: {name} is on {what}, its parameter is not")
    if problems:
        cure = "load it by torch.distributed.checkpoint, or use FULL_STATE_DICT for full tensors"
        raise PlanError(f"the sharded optimizer state dict does not fit; {cure}:", problems=problems)
    return result
