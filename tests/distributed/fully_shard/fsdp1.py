"""PyTorch's FullyShardedDataParallel on gloo and the CPU, and our modules beside it: one model, one seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm.json_collectives import all_gather_json
from tests.distributed.models import Odd, filled
from tests.spawn import device_type

IDS = torch.arange(24).view(6, 4)
"""Token ids."""


def shardings() -> list[Sharding]:
    """1-D in full and in low precision, and HSDP where the ranks make it."""
    replicas = [Sharding(replicate_size=2)] if dist.get_world_size() == 4 else []
    return [Sharding(), Sharding(mixed_precision="bf16"), *replicas]


def ours(sharding: Sharding | None = None, seed: int = 0) -> Any:
    """`filled(seed)`, sharded; the root and each block are groups."""
    sharding = sharding or Sharding()
    return shard_module(filled(seed), init_mesh(device_type(), sharding), sharding)


def theirs(sharding: Sharding | None = None, seed: int = 0) -> Any:
    """The same under FSDP1, which refuses 0-dim parameters: there `scale` has one element."""
    sharding = sharding or Sharding()
    model = filled(seed)
    model.scale = nn.Parameter(model.scale.detach().reshape(1))
    options: dict[str, Any] = {}
    if sharding.replicate_size > 1:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if sharding.mixed_precision:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=_is_block),
        **options,
    )


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.bias is not None


def theirs_named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Clean FQN → parameter of an FSDP1 module."""
    return {clean_tensor_name(name): parameter for name, parameter in module.named_parameters()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, on whatever devices, whether a scalar has 0 dims or 1."""
    return one.dtype == other.dtype and torch.equal(one.cpu().reshape(other.shape), other.cpu())


def own_rows() -> torch.Tensor:
    """Other rows on every rank."""
    return IDS[dist.get_rank() :][:2]


def outcomes(fn: Callable[[], object]) -> list[str]:
    """Run `fn` on every rank; rank → what it raised, as type and message, or an empty string."""
    try:
        fn()
        outcome = ""
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return all_gather_json(outcome)


def bump(module: nn.Module, by: float = 1.0) -> None:
    """Change every parameter, each row by another amount."""
    with torch.no_grad():
        for parameter in module.parameters():
            rows = torch.arange(float(parameter.numel()), device=parameter.device)
            parameter.add_(rows.reshape(parameter.shape).mul_(1e-3).add_(by))


def bumped(by: float = 1.0, seed: int = 0) -> Odd:
    """What a single process has after `bump`."""
    model = filled(seed)
    bump(model, by)
    return model
