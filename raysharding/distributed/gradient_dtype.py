"""`Sharding.keep_low_precision_grads`: gradients stay in the dtype that their parameters have in forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from raysharding.distributed.gradient_sync import fsdp_groups


def keep_low_precision_grads(module: nn.Module) -> None:
    """Cast the gradient of each shard as soon as it was reduced; each rank alone, no collective.

    Args:
        module: The root, after `fully_shard`.
    """
    module.register_forward_pre_hook(_watch)


def _watch(module: nn.Module, args: Any) -> None:
    # In every forward: a load may have put new parameters in place, and frozen ones may be trained later.
    for group in fsdp_groups(module):
        for item in group.fsdp_params:
            parameter = item.sharded_param
            if item.param_dtype is not None and parameter.requires_grad and parameter.grad_dtype is not None:
                parameter.grad_dtype = None  # any: FSDP2 sets it in the stored dtype first
                parameter.register_post_accumulate_grad_hook(partial(_cast, item.param_dtype))


def _cast(dtype: torch.dtype, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "it was accumulated"
    parameter.grad = parameter.grad.to(dtype)
