"""An optimizer over the shards of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from raysharding.distributed.schedules import call_factory
from raysharding.distributed.sharded_module import reshard
from raysharding.models import clean_name


def make_optimizer(
    module: nn.Module, factory: Callable[..., torch.optim.Optimizer], kwargs: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Make `factory(parameters, **kwargs)` over the parameters that require gradients; each rank alone, no collective.

    Args:
        module: The sharded root module.
        factory: A class, or any callable that takes parameters; or a `ParamGroups` or `Scheduled`.
        kwargs: Given to it after the parameters.

    Raises:
        ValueError: `factory` did not return a torch optimizer.
    """
    # After a forward the root's full parameters are registered; an optimizer must hold the shards.
    reshard(module)
    named = [(clean_name(name), one) for name, one in module.named_parameters() if one.requires_grad]
    optimizer = call_factory(factory, named, **(kwargs or {}))
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "zero_grad"):
        kind = type(optimizer).__name__
        raise ValueError(f"the optimizer factory returned a {kind}; return a torch.optim.Optimizer")
    return optimizer
