"""Whether anybody wrote to a module or its optimizer in place: torch counts that in every tensor."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.gradient_sync import fsdp_groups
from raysharding.distributed.layout import module_tensors


def written(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Count the in-place writes to this rank's shards, buffers and optimizer state so far; no collective.

    Two equal counts have no write between them, but for what went through `.data` or a pointer, which nobody counts.

    Args:
        module: The root module.
        optimizer: Over its parameters, where there is one.
    """
    sharded = [parameter.sharded_param for group in fsdp_groups(module) for parameter in group.fsdp_params]
    # Of sharded parameters only the shard counts: what is registered in between is a gathered copy.
    whole = [tensor for tensor in module_tensors(module).values() if not isinstance(tensor, DTensor)]
    kept = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return sum(_version(tensor) for tensor in (*sharded, *whole, *kept) if isinstance(tensor, torch.Tensor))


def _version(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        # Writes to a DTensor are counted by itself, those to what `to_local` gives by the tensor inside.
        return tensor._version + _version(tensor._local_tensor)
    # An inference tensor has no counter, and nobody can write to it outside inference mode.
    return 0 if tensor.is_inference() else tensor._version
