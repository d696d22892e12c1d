"""`SaveContents`: what one save writes, as it was at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.file_writing import total_bytes
from raysharding.distributed.gathering import saved_tensors
from raysharding.distributed.layout import local_tensor
from raysharding.distributed.optimizer_state import agreed_snapshot
from raysharding.distributed.training_files import Position, training_state


@dataclass(frozen=True)
class SaveContents:
    """Tensors cut as the module's are; the rest ready to be written."""

    tensors: Mapping[str, torch.Tensor]
    """FQN → parameter or persistent buffer."""
    state: Mapping[str, torch.Tensor]
    """`FQN/name` → tensor of the optimizer's state; empty without an optimizer."""
    outline: Mapping[str, Any] | None
    """What else the optimizer holds; `None` without one."""
    training: Mapping[str, Any] | None
    """Position and random generators; `None` without an optimizer."""

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer | None, position: Position | None) -> Self:
        """Look at them; collective. No tensor is copied.

        Raises:
            PlanError: On every rank: the optimizer's state cannot be saved, or differs between ranks.
        """
        tensors = saved_tensors(module)
        snapshot = agreed_snapshot(module, optimizer)
        if snapshot is None:
            return cls(tensors, {}, None, None)
        return cls(tensors, snapshot.tensors, snapshot.outline(), training_state(position))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, whole."""
        return total_bytes(self.tensors) + total_bytes(self.state)

    @property
    def num_tensors(self) -> int:
        """Tensors, the optimizer's with them."""
        return len(self.tensors) + len(self.state)

    def copied(self) -> Self:
        """Copy this rank's shards to host memory, where later steps do not change them. No collective.

        Memory: this rank's shard bytes, of weights and optimizer.
        """
        return replace(self, tensors=_copied(self.tensors), state=_copied(self.state))


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies = {name: _host_copy(tensor) for name, tensor in tensors.items()}
    if any(local_tensor(tensor).is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()  # the copies run beside the host, which may change the shards as soon as this returns
    return copies


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    local = local_tensor(tensor).detach()
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    copy.copy_(local, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return copy
    # Not `from_local`, which would move it back to the mesh's device: only the layout is asked of it.
    return DTensor(copy, tensor._spec, requires_grad=False)
