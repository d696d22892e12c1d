"""`TensorTable`: a dict of tensors as a module, for loads and saves.

Loads and saves of modules also work for other dicts of tensors, such as a sharded state dict or optimizer state: a
`TensorTable` is a module that consists of these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard.internals import is_offloaded, mark_offloaded
from raysharding.distributed.fully_shard.layout import (
    inner_tensor,
    local_tensor,
    shard_index_of,
    tensor_layout,
    with_layout,
)


class TensorTable(nn.Module):
    """A module whose FQNs are the names of a dict, which may contain dots; a tensor under two names is tied.

    Args:
        tensors: Name → DTensor or replicated tensor; real, or on meta, to be allocated.
        like: Sharded root module; shards are allocated in the memory of its shards, which is host memory under
            `Sharding(cpu_offload=True)`. Default: memory of the mesh's device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, like: nn.Module | None = None) -> None:
        super().__init__()
        if like is not None and is_offloaded(like):
            mark_offloaded(self)
        for name, tensor in tensors.items():
            # Not by `register_parameter`, which refuses dots, and DTensors that are no nn.Parameter.
            if isinstance(tensor, DTensor):
                self._parameters[name] = cast(nn.Parameter, tensor)
            else:
                self._buffers[name] = tensor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensors, sharded ones first."""
        both = (self._parameters, self._buffers)
        return {name: tensor for table in both for name, tensor in table.items() if tensor is not None}


def meta_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `tensor` on meta, with equal shape, placements, strides, `requires_grad` and type (Parameter or not).

    Args:
        tensor: A DTensor or any other.
        dtype: dtype of the result. Default: that of the tensor.
    """
    result = torch.empty(inner_tensor(tensor).shape, dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, DTensor):
        result = with_layout(result, tensor, requires_grad=False)
    return nn.Parameter(result, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result


def cut(value: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a full tensor, in memory of its own. Not collective.

    Args:
        value: Full tensor of the shape of `like`; its dtype is kept.
        like: DTensor with the mesh and placements of the result.

    Returns:
        A DTensor whose shard is on the device of `like`'s.
    """
    start, stop = tensor_layout("", like).local_range(shard_index_of(like))
    local = local_tensor(like)
    part = value.detach().reshape(-1)[start:stop].view(local.shape)
    # A shard on meta has no device to copy to.
    device = torch.device(like.device_mesh.device_type) if local.is_meta else local.device
    return with_layout(part.to(device, copy=True), like, requires_grad=False)
