"""`keep_gathered`: full parameters that stay on every rank over many forwards without gradients.

Note [Gathered]: what the forwards then cost.
    FSDP2 gathers a group's parameters in each forward of the group, and frees them behind it: for `generate` the wire
    carries the model once per token. Its hooks also take tens of microseconds a module on the host, which on a GPU is a
    multiple of a decoding step, at W=1 too. Kept parameters are those that FSDP2's own `unshard` registers, in the
    dtype that the group computes in, and FSDP2's hooks are taken off the modules: a forward is that of an unsharded
    module, bit for bit as before. `reshard`, which every call of this library that reads shards begins with, ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from raysharding.distributed.comm import all_gather_json, device_module, device_uuid, get_rank, is_accelerator
from raysharding.distributed.fully_shard import (
    compare_now,
    compute_device,
    fsdp_groups,
    fsdp_modules,
    init_roots,
    is_fsdp_hook,
    over_ranks_of,
    own_groups,
    reshard,
    until_reshard,
    warn_once,
)
from raysharding.distributed.transfer import available_bytes, host_identity
from raysharding.tree import map_leaves
from raysharding.units import format_bytes

_USED = 0.8
"""Part of the free memory that kept parameters may take; activations and key-value caches need some, too."""
_FOR_SHARDS = (
    "raysharding.distributed.fully_shard.internals",
    "raysharding.distributed.fully_shard.execution_order",
    "raysharding.distributed.fully_shard.module_hooks._prefetch_after_first_forward",
)
"""Modules and functions whose hooks serve gathers."""


@over_ranks_of("module")
def keep_gathered(module: nn.Module, wanted: bool | None = None) -> bool:
    """Gather all parameters and keep them until `reshard`, if every rank has the memory; collective.

    Wire: each shard to each rank, once. Memory: the full parameters in the dtype that they are computed in, beside the
    shards, and during the gather the largest group once more. Groups that are not cut (W=1, replicas) and compute in
    their stored dtype on the device of their shards are not copied. A module that is kept already costs nothing.

    Args:
        module: The sharded root module, between calls: not inside a forward.
        wanted: `Sharding.summon_full_params`: `None` for where they fit.

    Returns:
        True if the parameters are kept; the same on every rank.

    Raises:
        PlanError: On every rank: ranks shard different parameters.
        RuntimeError: Inside `summon_full_params`; or, on a rank alone, there is no memory, although `wanted` says so:
            the others wait in the gather until the deadline.
    """
    if is_kept_gathered(module):
        return True
    if wanted is False or not fsdp_modules(module):
        return False
    reshard(module)  # raises inside `summon_full_params`
    if wanted is None and not _fits(module):
        return False
    compare_now(module)
    init_roots(module)
    for part in fsdp_modules(module):
        until_reshard[part] = _gather(part)
    return True


def is_kept_gathered(module: nn.Module) -> bool:
    """Return True after `keep_gathered`, until `reshard`. Not collective."""
    parts = fsdp_modules(module) if until_reshard else []
    return bool(parts) and all(part in until_reshard for part in parts)


def _gather(part: FSDPModule) -> Callable[[], None]:
    """Register the full parameters of a module's group without FSDP2's hooks; returns what undoes it."""
    assert isinstance(part, nn.Module), "FSDP modules are modules"
    with ExitStack() as stack:
        if all(map(_is_whole, own_groups(part))):
            stack.callback(_register_local(part))
        else:
            part.unshard()
        policy = part._get_fsdp_state()._mp_policy
        low = policy.param_dtype if policy.cast_forward_inputs else None
        stack.callback(_replace_hooks(part._forward_pre_hooks, None if low is None else partial(_cast_inputs, low)))
        out = policy.output_dtype
        stack.callback(_replace_hooks(part._forward_hooks, None if out is None else partial(_cast_output, out)))
        return stack.pop_all().close


def _is_whole(group: Any) -> bool:
    """Return True if the shards of a group are the parameters that it computes with."""
    low, is_moved = group.mp_policy.param_dtype, isinstance(group.offload_policy, CPUOffloadPolicy)
    is_cut = getattr(group.mesh_info, "shard_mesh_size", 1) > 1
    return not is_cut and not is_moved and all(low in (None, one.sharded_param.dtype) for one in group.fsdp_params)


def _register_local(part: Any) -> Callable[[], None]:
    items = [item for group in own_groups(part) if group.is_sharded for item in group.fsdp_params]
    for item in items:
        local = item.sharded_param.to_local().detach()
        item._setattr_on_modules(nn.Parameter(local, requires_grad=item.sharded_param.requires_grad))

    def undo() -> None:
        for item in items:
            item._setattr_on_modules(item.sharded_param)

    return undo


def _replace_hooks(hooks: dict[int, Any], cast: Callable[..., Any] | None) -> Callable[[], None]:
    """Take the hooks that serve gathers out of a module's table; returns what puts them back in their places.

    Args:
        hooks: The table.
        cast: What takes the place of FSDP2's own hook; `None`: nothing does.
    """
    before = dict(hooks)
    inside = {key: cast if is_fsdp_hook(hook) else None for key, hook in before.items() if _serves_gathers(hook)}

    def fill(kept: dict[int, Any]) -> None:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({key: hook for key, hook in kept.items() if hook is not None} | added)

    fill(before | inside)
    return lambda: fill({key: hook for key, hook in before.items() if key in inside or key in hooks})


def _serves_gathers(hook: Any) -> bool:
    function = getattr(hook, "_torchdynamo_orig_callable", hook)  # under `Sharding.compile`
    function = getattr(function, "func", function)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return is_fsdp_hook(hook) or name.startswith(_FOR_SHARDS)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_leaves(
        lambda _, leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, tree
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def _fits(module: nn.Module) -> bool:
    """Return True if every rank has the memory for full parameters, beside what computation needs; collective."""
    device, sizes = compute_device(module), list(_sizes(module))
    if is_accelerator(device):
        of = device_module(device)
        cached = of.memory_reserved(device) - of.memory_allocated(device)
        where, free = [*host_identity(), device_uuid(device) or str(device)], of.mem_get_info(device)[0] + cached
    else:
        where, free = host_identity(), available_bytes()
    need = sum(sizes) + max(sizes, default=0)
    # Every rank sees the needs of all, and all decide alike: a rank that went by blocks alone would wait in a gather.
    every = all_gather_json([where, need, free])
    for rank, (place, _, left) in enumerate(every):
        together = sum(one for other, one, _ in every if other == place)
        if together > _USED * left:
            if get_rank() == 0:
                warn_once(_told(rank, together, left, need))
            return False
    return True


def _sizes(module: nn.Module) -> Iterable[int]:
    """Yield the bytes of the full parameters of each group that is to be gathered."""
    for group in fsdp_groups(module):
        if not _is_whole(group):
            low = group.mp_policy.param_dtype
            items = ((one._orig_size.numel(), low or one.sharded_param.dtype) for one in group.fsdp_params)
            yield sum(num_elements * dtype.itemsize for num_elements, dtype in items)


def _told(rank: int, together: int, free: int, need: int) -> str:
    lacking = together - int(_USED * free)
    return (
        f"parameters are gathered by blocks, anew in each forward: to keep them takes {format_bytes(need)} a rank, and "
        f"{format_bytes(lacking)} are missing where rank {rank} is ({format_bytes(free)} are free, of which a fifth is "
        "for activations and caches); use fewer ranks a host or GPU, Sharding(mixed_precision='bf16') or a smaller "
        "batch; summon_full_params=False goes by blocks without this line"
    )
