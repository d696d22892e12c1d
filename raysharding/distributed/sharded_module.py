"""FSDP2 set-up: which groups, which policies."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from raysharding.config import Sharding
from raysharding.distributed.execution import record_execution_order
from raysharding.distributed.layout import named_submodules
from raysharding.models import is_cut, make_contiguous, wrap_groups

_offloaded: WeakSet[nn.Module] = WeakSet()
"""Root modules whose shards live in host memory."""

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision_policy(sharding: Sharding) -> MixedPrecisionPolicy:
    """The policy that `Sharding.mixed_precision` names; `"bf16"` and `"fp16"` reduce gradients in fp32."""
    policy = sharding.mixed_precision
    if isinstance(policy, str):
        return MixedPrecisionPolicy(param_dtype=_LOW_PRECISION[policy], reduce_dtype=torch.float32)
    return policy if policy is not None else MixedPrecisionPolicy()


def shard_module(module: nn.Module, mesh: DeviceMesh, sharding: Sharding | None = None) -> nn.Module:
    """Cut a module over a mesh with FSDP2, in place; every rank calls it with the same module and mesh.

    Blocks become FSDP groups of their own (`Sharding.wrap`), inner ones first, the rest goes into the root's group.
    0-dim parameters and those without elements stay plain tensors on every rank. On meta nothing is allocated.

    Args:
        module: The root module, on meta or on the mesh's device.
        mesh: From `init_mesh`, or any mesh with one shard axis (and one replicate axis before it).
        sharding: See `Sharding`.

    Returns:
        The same module.

    Raises:
        PlanError: On every rank alike, when `wrap` does not fit the module or a group would mix dtypes.
    """
    sharding = sharding or Sharding()
    make_contiguous(module)  # a shard must be one range of memory
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": sharding.reshard_after_forward,
        "mp_policy": mixed_precision_policy(sharding),
        # fully_shard refuses 0-dim parameters, and fails in the backward of those without elements.
        "ignored_params": {item for item in module.parameters() if not is_cut(item)},
    }
    if sharding.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        _offloaded.add(module)
    groups = wrap_groups(module, sharding)
    for names in groups:
        members = [module.get_submodule(name) for name in names]
        fully_shard(members if len(members) > 1 else members[0], **options)
    fully_shard(module, **options)
    record_execution_order(module, groups)
    return module


def is_offloaded(root: nn.Module) -> bool:
    """Whether a root module's shards live in host memory (`Sharding(cpu_offload=True)`)."""
    return root in _offloaded


def reshard(module: nn.Module) -> None:
    """Make every FSDP group's shards its registered parameters again; each rank alone, no collective.

    After a forward without a backward the root's group keeps its full parameters registered. Whoever reads
    `module.parameters()` (an optimizer, a gather) must see DTensors, and the memory is wanted back.
    """
    for _, submodule in named_submodules(module):
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
