"""Sharding of a module with FSDP2: groups and policies.

Note: FSDP1's constructor, argument by argument.
    `process_group`                     `init_mesh(device_type, group=...)`, also with the pair for HSDP
    `device_mesh`                       the mesh, of any ranks
    `sharding_strategy`                 `Sharding.from_strategy`: `reshard_after_forward` and `replicate_size`
    `cpu_offload`                       `Sharding.cpu_offload`
    `auto_wrap_policy`                  `Sharding.wrap`, `min_num_params`
    `backward_prefetch`                 `Sharding.backward_prefetch`
    `forward_prefetch`                  `Sharding.forward_prefetch`
    `mixed_precision`                   `Sharding.mixed_precision`, BatchNorm left out of it;
                                        `Sharding.keep_low_precision_grads`
    `ignored_modules`, `ignored_states` `Sharding.ignored_modules`; gradients averaged, or not as there:
                                        `Sharding.average_ignored_gradients`
    `param_init_fn`                     `Sharding.param_init_fn`
    `sync_module_states`                `Sharding.sync_module_states`
    `device_id`                         the mesh's device type, and on GPUs the current device
    `limit_all_gathers`                 always: FSDP2 reuses memory without it
    `use_orig_params`                   always: FSDP2 has no flat parameters
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raysharding.config import Sharding
from raysharding.distributed.comm import is_accelerator, mesh_group, using_group
from raysharding.distributed.fully_shard.activation_checkpointing import checkpoint_activations
from raysharding.distributed.fully_shard.execution_order import record_execution_order
from raysharding.distributed.fully_shard.gradients import keep_low_precision_grads, reduce_after_backward
from raysharding.distributed.fully_shard.internals import (
    add_hooks,
    fsdp_modules,
    init_roots,
    is_kept_gathered,
    keep_full,
    kept_whole,
    offloaded,
    reshard,
    summoned,
)
from raysharding.distributed.fully_shard.layout import mesh_device, named_submodules, unwrapped
from raysharding.distributed.fully_shard.materialize import InitialValues
from raysharding.distributed.fully_shard.module_group import note_mesh, over_ranks_of
from raysharding.distributed.fully_shard.module_hooks import (
    cast_inputs_before_forward,
    compile_blocks,
    keep_full_precision,
    leave_hooks_out,
    move_inputs_before_forward,
    set_prefetching,
)
from raysharding.distributed.fully_shard.same_parameters import compare_before_forward, compare_now
from raysharding.errors import PlanError
from raysharding.models import (
    full_precision_groups,
    ignored_modules,
    low_dtype,
    make_contiguous,
    stays_in_full_precision,
    unfreed_groups,
    whole_parameters,
    wrap_groups,
)


def mixed_precision_policy(sharding: Sharding) -> MixedPrecisionPolicy:
    """Return the policy of `Sharding.mixed_precision`; a dtype reduces gradients in float32."""
    policy: Any = sharding.mixed_precision
    if isinstance(policy, torch.dtype):
        return MixedPrecisionPolicy(policy, torch.float32)
    return policy or MixedPrecisionPolicy()


def shard_module(module: nn.Module, mesh: DeviceMesh, sharding: Sharding | None = None) -> nn.Module:
    """Shard a module over a mesh with FSDP2, in place; every rank calls this with the same module and mesh.

    Blocks become FSDP groups of their own (`Sharding.wrap`), inner ones first; all other parameters are in the root's
    group. 0-dim parameters, empty ones, small ones of another dtype than their module's others, and those of ignored
    modules stay plain tensors on every rank; their gradients are averaged over all ranks at the end of every backward.
    A forward moves its inputs to the device of the mesh. The first forward compares sharded and averaged parameters
    over the ranks; a difference is a PlanError on every rank. On meta nothing is allocated unless `param_init_fn` or
    `sync_module_states` needs values. The table above maps the arguments of FSDP1's constructor.

    Args:
        module: The root module or a `DistModule`, on meta or real; a real module is moved to the device of the mesh.
        mesh: From `init_mesh`, or any mesh with one shard axis (and one replicate axis before it).
        sharding: Options. Default: `Sharding()`.

    Returns:
        The same module. Wire: none; with `sync_module_states` the module once to each rank.

    Raises:
        PlanError: On every rank, if `sharding` does not fit the module, a group is sharded already or would mix dtypes,
            or, with `sync_module_states`, modules differ between ranks.
    """
    root = unwrapped(module)
    sharding = sharding or Sharding()
    groups = wrap_groups(root, sharding)
    shard_groups(root, mesh, sharding, groups, unfreed_groups(root, sharding, groups))
    return module


def shard_groups(
    module: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    groups: Sequence[tuple[str, ...]],
    unfreed: Container[tuple[str, ...]] = (),
) -> None:
    """Shard as `shard_module`, with given groups.

    Args:
        module: The root module, not a `DistModule`.
        mesh: The mesh.
        sharding: Options; `wrap` is ignored.
        groups: Result of `wrap_groups`.
        unfreed: Groups that keep their full parameters from forward to backward, whatever `sharding` says.
    """
    with using_group(mesh_group(mesh)):
        _shard_groups(module, mesh, sharding, groups, unfreed)
        note_mesh(module, mesh)


def _shard_groups(
    module: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    groups: Sequence[tuple[str, ...]],
    unfreed: Container[tuple[str, ...]],
) -> None:
    _require_unsharded(module, groups)
    device = mesh_device(mesh)
    ignored = ignored_modules(module, sharding)
    in_full = full_precision_groups(module, sharding, groups)
    unsharded = whole_parameters(module, sharding, groups)
    whole = [(held, name) for held in module.modules() for name, one in held._parameters.items() if one in unsharded]
    make_contiguous(module)  # a shard must be contiguous in memory
    compile_blocks(module, groups, sharding)
    checkpoint_activations(module, groups, sharding, device)
    values = None
    if sharding.param_init_fn is not None or sharding.sync_module_states:
        values = InitialValues(module, device, sharding)
    options: dict[str, Any] = {"mesh": mesh}
    if sharding.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(device))
        offloaded.add(module)
    for submodule, name in whole:
        if submodule not in ignored:
            kept_whole.setdefault(submodule, set()).add(name)
    kept = _parameters_in(whole)
    for names in (*groups, ("",)):
        members = [module.get_submodule(name) for name in names]
        if values is not None:
            values.set_values(members, kept)
            kept = _parameters_in(whole)  # others now
        policy = MixedPrecisionPolicy() if names in in_full else mixed_precision_policy(sharding)
        if names != ("",) and (dtype := policy.param_dtype) is not None and policy.cast_forward_inputs:
            policy = replace(policy, cast_forward_inputs=False)
            for member in members:
                cast_inputs_before_forward(member, dtype)
        options["reshard_after_forward"] = False if names in unfreed else sharding.reshard_after_forward
        fully_shard(members if len(members) > 1 else members[0], mp_policy=policy, ignored_params=kept, **options)
    for parameter in kept:
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    add_hooks(module)
    if low_dtype(sharding) is not None:
        _keep_full_precision(module)
    if sharding.keep_low_precision_grads:
        keep_low_precision_grads(module)
    record_execution_order(module, groups)
    set_prefetching(module, groups, sharding)
    reduce_after_backward(module, () if sharding.average_ignored_gradients else ignored)
    move_inputs_before_forward(module, device)
    compare_before_forward(module)
    leave_hooks_out(module, groups, sharding)


def _require_unsharded(module: nn.Module, groups: Sequence[tuple[str, ...]]) -> None:
    """Raise if a module of `groups` is an FSDP group already, before any change."""
    names = [name for names in (*groups, ("",)) for name in names]
    taken = [name or "the root" for name in names if isinstance(module.get_submodule(name), FSDPModule)]
    if taken:
        raise PlanError(
            f"{len(taken)} modules to be FSDP groups are sharded already, by an earlier fully_shard or shard_module: "
            "leave that call out, or give a Sharding.wrap that does not name them (under mixed precision every "
            "BatchNorm is to be a group):",
            problems=taken,
        )


def _parameters_in(slots: Iterable[tuple[nn.Module, str]]) -> set[nn.Parameter]:
    """Return the parameters that modules hold under these names now."""
    parameters = (module._parameters[name] for module, name in slots)
    return {one for one in parameters if one is not None and not isinstance(one, DTensor)}


def _keep_full_precision(module: nn.Module) -> None:
    """Cast inputs and outputs of modules that are excluded from mixed precision."""
    for _, submodule in named_submodules(module):
        if stays_in_full_precision(submodule) and (
            isinstance(submodule, FSDPModule) or not any(isinstance(item, DTensor) for item in submodule.parameters())
        ):
            keep_full_precision(submodule)


@over_ranks_of("module")
def keep_gathered(module: nn.Module) -> None:
    """Gather all parameters, and keep them, without FSDP2's hooks, until `reshard`; collective.

    Forwards without gradients are then not collective, and those of an unsharded module. See `keep_full`.

    Wire: each shard to each rank, once. Memory: `bytes_to_keep`: the full parameters in the dtype that they are
    computed in, beside the shards. Groups that are not cut (W=1, replicas) and compute in their stored dtype on the
    device of their shards are not copied. A module that is kept already costs nothing.

    Args:
        module: The sharded root module, between calls.

    Raises:
        PlanError: On every rank: ranks shard different parameters.
        RuntimeError: Inside `summon_full_params`; or, on a rank alone, there is no memory: the others wait in the
            gather until the deadline.
    """
    module = unwrapped(module)
    if is_kept_gathered(module):
        return
    reshard(module)  # raises inside `summon_full_params`
    compare_now(module)
    init_roots(module)
    for part in fsdp_modules(module):
        keep_full(part)


def show_shards(module: nn.Module) -> None:
    """Reshard a module, unless it is inside `summon_full_params`."""
    if not any(submodule in summoned for submodule in module.modules()):
        reshard(module)
