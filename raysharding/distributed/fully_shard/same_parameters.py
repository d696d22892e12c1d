"""Comparison of parameters: over ranks before the first forward, and over runs by a fingerprint of the weights.

Note: why the comparison is needed.
    If ranks differ in ignored, wrapped or frozen modules, or in dtypes, their messages differ in size: gloo ends the
    process (`std::terminate`), NCCL hangs or receives wrong bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from raysharding.distributed.comm import all_gather_json, get_rank, get_world_size, rank_name
from raysharding.distributed.fully_shard.gradients import plain_parameters, replicated_parameters
from raysharding.distributed.fully_shard.internals import mesh_sizes, parameter_groups
from raysharding.distributed.fully_shard.layout import (
    local_tensor,
    module_tensors,
    named_submodules,
    persistent_names,
    shard_index_of,
    tensor_layout,
)
from raysharding.distributed.fully_shard.module_group import over_ranks_of
from raysharding.errors import PlanError

_MAX_PROBLEMS = 20
_PART = 1 << 20

_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
"""Hooks of roots that have not been compared."""


def compare_before_forward(module: nn.Module) -> None:
    """Make the next forward of a root compare its parameters over the ranks. This call is not collective.

    A forward without gradients and without gathers (NO_SHARD) is not collective; a later forward compares. Modules
    whose parts are on meshes of other ranks are not compared.

    Args:
        module: The root, after `fully_shard`.
    """
    world_size = get_world_size()
    if world_size == 1 or any(size != world_size for size, _ in mesh_sizes(module)):
        return

    def compare(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() or any(num_shards > 1 for _, num_shards in mesh_sizes(module)):
            compare_now(module)

    _hooks[module] = module.register_forward_pre_hook(compare, prepend=True)


def compare_now(module: nn.Module) -> None:
    """Compare as the next forward would, before a gather outside of a forward; collective if that is to come.

    Args:
        module: The sharded root module.
    """
    if module in _hooks:
        require_same_parameters(module)
        _hooks.pop(module).remove()


@over_ranks_of("module")
def require_same_parameters(module: nn.Module) -> None:
    """Check that all ranks shard the same parameters and average the same gradients; collective.

    Args:
        module: The sharded root module.

    Raises:
        PlanError: On every rank, if they differ; names modules and ranks.
    """
    mine = _described(module)
    if len(set(all_gather_json(sha256(json.dumps(mine).encode()).hexdigest()))) == 1:
        return
    # Every rank has the result that two differ, so all call this.
    problems = _differences(all_gather_json(mine))
    raise PlanError(
        "the ranks ignore or shard different modules, so that they cannot gather and reduce together: build the same "
        "module on every rank, and give the same Sharding (ignored_modules, wrap); for modules that only some ranks "
        "have, ignore those and set average_ignored_gradients=False:",
        problems=problems[:_MAX_PROBLEMS],
    )


def _described(module: nn.Module) -> dict[str, str]:
    """Return FQN → handling of a parameter on this rank, for parameters that involve other ranks.

    States whether the parameter is sharded, and all that determines its message and the size of that.
    """
    plain = {id(parameter) for parameter in plain_parameters(module)}
    averaged = {id(parameter) for parameter in replicated_parameters(module)}
    groups: dict[int, str] = {}
    for name, submodule in named_submodules(module):
        for item in chain.from_iterable(parameter_groups(submodule)):
            for parameter in (item.shard, item.full):
                groups.setdefault(id(parameter), f"sharded in the FSDP group of {name.rstrip('.') or 'the root'}")
    return {
        name: f"{groups.get(id(tensor), 'whole')}, {'trained' if tensor.requires_grad else 'frozen'}, {tensor.dtype}, "
        f"of shape {list(tensor.shape)}"
        for name, tensor in module_tensors(module).items()
        if isinstance(tensor, nn.Parameter) and (id(tensor) not in plain or id(tensor) in averaged)
    }


def _differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each parameter that ranks handle differently."""
    lines = []
    for name in dict.fromkeys(chain.from_iterable(every)):
        ranks: dict[str, list[str]] = defaultdict(list)
        for rank, described in enumerate(every):
            ranks[described.get(name, "missing")].append(rank_name(rank))
        if len(ranks) > 1:
            lines.append(f"{name}: " + "; ".join(f"on ranks [{', '.join(some)}] {how}" for how, some in ranks.items()))
    return lines


@over_ranks_of("module")
def weights_fingerprint(module: nn.Module) -> str:
    """Return 16 hex digits of a module's parameters, persistent buffers and config; collective.

    They are equal for any number of ranks, and for copies of the files. Reads every shard once.

    Args:
        module: The root module.
    """
    kept = persistent_names(module)
    # The root's full parameters stay registered after a forward: resharded, they would be gathered once more.
    shards = {
        id(item.full): item.shard for _, one in named_submodules(module) for item in chain(*parameter_groups(one))
    }
    tensors = {name: shards.get(id(one), one) for name, one in module_tensors(module).items() if name in kept}
    own = {name: _weighted_sum(name, tensor) for name, tensor in tensors.items() if _is_counted(tensor)}
    every = all_gather_json(own)
    config: Any = getattr(module, "config", None)
    facts = config.to_dict() if hasattr(config, "to_dict") else {}
    described = [
        {name: value for name, value in facts.items() if name not in ("_name_or_path", "transformers_version")},
        [
            (name, tuple(tensor.shape), str(tensor.dtype), sum(found.get(name, 0) for found in every) % 2**64)
            for name, tensor in tensors.items()
        ],
    ]
    return sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_counted(tensor: torch.Tensor) -> bool:
    """Return True on one of the ranks that hold equal copies of a tensor or shard."""
    if not isinstance(tensor, DTensor):
        return get_rank() == 0
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


def _weighted_sum(name: str, tensor: torch.Tensor) -> int:
    """Return the sum of the bits of a shard's elements, each times an odd number that tells its place in the tensor."""
    start, _ = tensor_layout(name, tensor).local_range(shard_index_of(tensor) if isinstance(tensor, DTensor) else 0)
    local = local_tensor(tensor)
    local = (torch.view_as_real(local.resolve_conj()) if local.is_complex() else local).contiguous().reshape(-1)
    bits = local.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.itemsize])
    odd = torch.arange(1, 2 * max(1, min(_PART, bits.numel())), 2, device=bits.device)
    total = 0
    for part in bits.split(_PART):
        wide = part.to(torch.int64)
        total += int((wide * odd[: len(wide)]).sum()) + 2 * start * int(wide.sum())
        start += len(wide)
    return total % 2**64
