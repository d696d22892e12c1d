"""Optimizer state of sharded modules, full or in shards: FSDP1's four functions.

The interfaces are the static methods of `torch.distributed.fsdp.FullyShardedDataParallel`. A *full* optimizer state
dict is keyed by FQN and holds whole tensors on the CPU; what `shard_...` and `scatter_...` return is keyed by parameter
id, ready for `optimizer.load_state_dict`. World sizes may differ between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import agree, from_rank_0, get_rank, get_world_size, require_group
from raysharding.distributed.fully_shard import cut, local_tensor, message_device, over_ranks_of
from raysharding.distributed.loading import distribute_state_dict
from raysharding.distributed.optim import OptimizerSnapshot, agreed_snapshot, parameter_names, split_state, state_like
from raysharding.distributed.transfer import gather_tensors
from raysharding.errors import PlanError

OptimInput = Sequence[Mapping[str, Any]] | Iterable[torch.Tensor]
"""Argument of an optimizer: parameters, or param groups."""


@over_ranks_of("model")
def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Gather the full state of an optimizer on rank 0; collective.

    As FSDP1's `full_optim_state_dict`. To save it, `save_checkpoint(..., optimizer=optim)` needs no rank to hold it.

    Args:
        model: The sharded root module.
        optim: Over its parameters.
        optim_input: Ignored: the optimizer has its parameters.
        rank0_only: True for the state on rank 0 only; False for the full state on every rank.
        group: The group of the model's mesh, or `None`.

    Returns:
        `{"state": {FQN: {name: CPU tensor or value}}, "param_groups": [{..., "params": [FQN, ...]}]}`; an empty dict
        on the other ranks under `rank0_only`. Wire: each shard once to each rank that gets it.

    Raises:
        ValueError: `group` has other ranks.
        PlanError: On every rank, if the optimizers of the ranks hold other param groups or state than rank 0's.
        RuntimeError: From the process group, when a rank is gone.
    """
    require_group(group)
    snapshot = agreed_snapshot(model, optim)
    assert snapshot is not None, "there is an optimizer"
    return gathered(snapshot, model, rank0_only=rank0_only)


def gathered(snapshot: OptimizerSnapshot, model: nn.Module, *, rank0_only: bool, on_cpu: bool = True) -> dict[str, Any]:
    """Gather a full optimizer state dict; collective.

    Args:
        snapshot: State of the optimizer.
        model: The sharded root module.
        rank0_only: The other ranks get an empty dict.
        on_cpu: True for tensors in host memory; False for the device of the shards.
    """
    ranks = (0,) if rank0_only else tuple(range(get_world_size()))
    sharded = {key: one for key, one in snapshot.tensors.items() if isinstance(one, DTensor)}
    full = gather_tensors(sharded, ranks, message_device(model))
    if get_rank() not in ranks:
        return {}
    # As FSDP1: of parameters that are not averaged, each rank has its own.
    full |= {key: one.to("cpu", copy=True) for key, one in snapshot.tensors.items() if key not in sharded}
    if not on_cpu:
        full = {key: value.to(local_tensor(snapshot.tensors[key]).device) for key, value in full.items()}
    return snapshot.state_dict(full, on_cpu=on_cpu)


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Cut a full optimizer state dict that this rank holds. Not collective.

    As FSDP1's `shard_full_optim_state_dict`.

    Args:
        full_optim_state_dict: Keyed by FQN; the same on every rank that calls this.
        model: The sharded root module, of any world size.
        optim_input: Argument of the optimizer. Default: that of `optim`, else `model.parameters()`.
        optim: The optimizer that will load it.

    Returns:
        A state dict keyed by parameter id, for `optim.load_state_dict`: this rank's shards as DTensors.

    Raises:
        PlanError: The model lacks a name, or has another shape; or the param groups are not those of the optimizer.
    """
    order = _ParameterOrder(model, optim_input, optim)
    state: dict[int, dict[str, Any]] = {}
    problems = order.unknown(full_optim_state_dict["state"])
    groups = order.groups(full_optim_state_dict["param_groups"], problems)
    if (misfit := _misfit(problems)) is not None:
        raise misfit
    for fqn, held in full_optim_state_dict["state"].items():
        parameter = order.parameters[order.ids[fqn]]
        state[order.ids[fqn]] = {name: _shard_of(value, parameter) for name, value in held.items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


@over_ranks_of("model")
def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Cut a full optimizer state dict that rank 0 alone holds, and send each rank its shards; collective.

    As FSDP1's `scatter_full_optim_state_dict`, by `distribute_state_dict`.

    Args:
        full_optim_state_dict: On rank 0, keyed by FQN; ignored on the other ranks.
        model: The sharded root module, of any world size.
        optim_input: Argument of the optimizer. Default: that of `optim`, else `model.parameters()`.
        optim: The optimizer that will load it.
        group: The group of the model's mesh, or `None`.

    Returns:
        As `shard_full_optim_state_dict`. Wire: each shard once. Memory above the shards: two buckets of 32 MiB.

    Raises:
        ValueError: `group` has other ranks.
        PlanError: On every rank, before data moves: rank 0 has no state dict, or its state dict has values of other
            types or does not fit.
    """
    require_group(group)
    values: dict[str, torch.Tensor] = {}

    def outline() -> dict[str, Any]:
        snapshot, described = _described(full_optim_state_dict)
        values.update(snapshot.tensors)
        return described

    target = OptimizerSnapshot.from_outline(from_rank_0(outline), model)  # the same on every rank, so all raise or none
    order = _ParameterOrder(model, optim_input, optim)
    problems = order.unknown(target.names)
    groups = order.groups(target.groups, problems)
    agree(_misfit(problems))  # each rank was given its own `optim`
    tensors = distribute_state_dict(values, target.tensors, like=model)
    state = {order.ids[fqn]: held for fqn, held in target.state(tensors).items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Rename the keys of an optimizer state dict, FQN ↔ parameter id. Not collective.

    As FSDP1's `rekey_optim_state_dict`: brings a full state dict into an optimizer of an unsharded model, and an
    unsharded optimizer's into the form that `shard_...` and `scatter_...` take. Values are not copied.

    Args:
        optim_state_dict: Keyed by FQN or by id.
        optim_state_key_type: Which keys the result has: `OptimStateKeyType.PARAM_NAME` or `PARAM_ID`.
        model: The model that the ids and names are of, sharded or not.
        optim_input: Argument of the optimizer. Default: that of `optim`, else `model.parameters()`.
        optim: The optimizer that the ids are of.

    Returns:
        A new dict of the same form.

    Raises:
        ValueError: `optim_state_key_type` is neither.
        PlanError: The model or the optimizer lacks a key.
    """
    order = _ParameterOrder(model, optim_input, optim)
    to_names = optim_state_key_type == OptimStateKeyType.PARAM_NAME
    if not to_names and optim_state_key_type != OptimStateKeyType.PARAM_ID:
        raise ValueError(
            f"optim_state_key_type={optim_state_key_type!r}: give OptimStateKeyType.PARAM_NAME or PARAM_ID"
        )
    renamed: Mapping[Any, Any] = dict(enumerate(order.names)) if to_names else order.ids
    groups: Sequence[Mapping[str, Any]] = optim_state_dict["param_groups"]
    held = set(optim_state_dict["state"]) | set(chain.from_iterable(part["params"] for part in groups))
    # Keys that are of the wanted kind already stay: renaming twice does no harm.
    renamed = {**{key: key for key in (order.ids if to_names else range(len(order.names)))}, **renamed}
    problems = [f"{key!r}: not a parameter of the model" for key in held if key not in renamed]
    # An optimizer pairs ids of a state dict with its own parameters by position: they must ascend, group by group.
    named = [{**part, "params": [order.name(key) for key in part["params"]]} for part in groups] if not problems else []
    by_id = order.groups(named, problems) if not to_names and not problems else named
    if problems:
        raise PlanError("the optimizer state dict does not fit the model:", problems=problems)
    return {"state": {renamed[key]: value for key, value in optim_state_dict["state"].items()}, "param_groups": by_id}


class _ParameterOrder:
    """Ids and names of the parameters of an optimizer.

    Raises:
        ValueError: The optimizer has parameters that the model lacks, or `optim_input` and `optim` are both given.
    """

    def __init__(self, model: nn.Module, optim_input: OptimInput | None, optim: torch.optim.Optimizer | None) -> None:
        if optim_input is not None and optim is not None:
            raise ValueError("optim_input and optim are both given: give the optimizer alone")
        names = parameter_names(model)
        self._groups: list[list[torch.Tensor]] | None = None
        if optim is not None:
            self._groups = [list(group["params"]) for group in optim.param_groups]
        elif optim_input is not None:
            items: list[Any] = list(optim_input)
            is_grouped = items and isinstance(items[0], Mapping)
            self._groups = [list(group["params"]) for group in items] if is_grouped else [items]
        self.parameters = list(chain.from_iterable(self._groups)) if self._groups is not None else list(names)
        num_unknown = sum(parameter not in names for parameter in self.parameters)
        if num_unknown:
            raise ValueError(
                f"{num_unknown} of the optimizer's parameters are not the model's: is it the sharded model's?"
            )
        self.names = [names[parameter] for parameter in self.parameters]
        self.ids = {name: index for index, name in enumerate(self.names)}

    def name(self, key: str | int) -> str:
        """Return the FQN of a parameter, given its id or its FQN."""
        return self.names[key] if isinstance(key, int) else key

    def unknown(self, fqns: Iterable[str]) -> list[str]:
        """Return a problem for each FQN whose parameter the optimizer lacks."""
        return [f"{fqn}: not among the optimizer's parameters" for fqn in fqns if fqn not in self.ids]

    def groups(self, groups: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
        """Return param groups by id, and append mismatches to `problems`.

        Ids ascend: an optimizer pairs the ids of a state dict with its own parameters by position.
        """
        named = list(chain.from_iterable(part["params"] for part in groups))
        unknown = [f"{fqn}: in a param group, not among the optimizer's" for fqn in named if fqn not in self.ids]
        if unknown:
            problems += unknown
            return []
        found = [{**part, "params": sorted(self.ids[fqn] for fqn in part["params"])} for part in groups]
        ids = iter(range(len(self.parameters)))
        own = None if self._groups is None else [list(islice(ids, len(held))) for held in self._groups]
        if self._groups is not None and [part["params"] for part in found] != own:
            sizes = [len(part["params"]) for part in found], [len(held) for held in self._groups]
            problems.append(f"param groups of {sizes[0]} parameters, the optimizer's of {sizes[1]}, or others in them")
        return found


def _misfit(problems: list[str]) -> PlanError | None:
    return PlanError("the full optimizer state dict does not fit:", problems=problems) if problems else None


def _described(full: Mapping[str, Any] | None) -> tuple[OptimizerSnapshot, dict[str, Any]]:
    """Return a full state dict as a snapshot, and its outline, which is JSON."""
    if not full:
        raise PlanError("rank 0 has no full_optim_state_dict: pass the state dict on rank 0")
    try:
        groups = tuple(dict(part) for part in full["param_groups"])
        values, tensors = split_state(full["state"])
        snapshot = OptimizerSnapshot(groups, values, tensors, tuple(full["state"]))
        return snapshot, snapshot.outline()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"rank 0's is no full optimizer state dict ({error!r})"
        raise PlanError(f"{what}: pass what full_optim_state_dict returned") from error


def _shard_of(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a state value, in new memory."""
    if not isinstance(value, torch.Tensor):
        return value
    like = state_like(parameter, value.shape, value.dtype)
    if not isinstance(like, DTensor):
        return value.clone()
    assert isinstance(parameter, DTensor), "state is sharded where its parameter is"
    return cut(value, parameter)
