"""`TensorTable`: tensors by name, in the shape in which the engine takes modules.

What is said of a module's state dict (where a DTensor lies, which ranks need which bytes, when all must raise) is as
true of any dict of tensors: another module's sharded state dict, an optimizer's state. So the engine that loads and
saves modules does the same for those, through a module that is nothing but its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard.internals import is_offloaded, mark_offloaded
from raysharding.distributed.fully_shard.layout import inner_tensor, local_tensor, shard_index_of, tensor_layout


class TensorTable(nn.Module):
    """A module whose FQNs are the names of a dict; they may hold dots, and one tensor under two names is a tie.

    Args:
        tensors: Name → DTensor, or a tensor that every rank holds whole; real, or on meta to be given memory.
        like: Sharded root module whose shards are in the memory that shards here are given, too: host memory under
            `Sharding(cpu_offload=True)`. Default: that of the mesh's device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, like: nn.Module | None = None) -> None:
        super().__init__()
        if like is not None and is_offloaded(like):
            mark_offloaded(self)
        for name, tensor in tensors.items():
            # Past `register_parameter`, which refuses dots, and DTensors that are no nn.Parameter.
            if isinstance(tensor, DTensor):
                self._parameters[name] = cast(nn.Parameter, tensor)
            else:
                self._buffers[name] = tensor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors now, sharded ones first."""
        both = (self._parameters, self._buffers)
        return {name: tensor for table in both for name, tensor in table.items() if tensor is not None}


def meta_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` without memory: same shape, cut, strides of the whole, and `requires_grad`; a Parameter if it is one.

    Args:
        tensor: A DTensor or any other.
        dtype: Of the result. Default: the tensor's.
    """
    if not isinstance(tensor, DTensor):
        empty = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    local = torch.empty(inner_tensor(tensor).shape, dtype=dtype or tensor.dtype, device="meta")
    result = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return nn.Parameter(result, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result


def cut(value: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a full tensor, in memory of its own; each rank alone, no communication.

    Args:
        value: Full tensor, of the shape of `like`; its dtype is the result's.
        like: Tells mesh and cut.

    Returns:
        A DTensor whose shard is on the device of `like`'s.
    """
    start, stop = tensor_layout("", like).local_range(shard_index_of(like))
    local = local_tensor(like)
    part = value.detach().reshape(-1)[start:stop].view(local.shape)
    # On meta there is no place to copy to yet.
    device = torch.device(like.device_mesh.device_type) if local.is_meta else local.device
    return DTensor.from_local(
        part.to(device, copy=True),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
