"""`SaveContents`: what one save writes, as it was at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import ADAPTER_NAME
from raysharding.distributed.file_writing import total_bytes
from raysharding.distributed.gathering import saved_tensors
from raysharding.distributed.layout import local_tensor
from raysharding.distributed.once import warn_once
from raysharding.distributed.optimizer_state import agreed_snapshot
from raysharding.distributed.prefault import back
from raysharding.distributed.replicated_gradients import parameters_left_alone
from raysharding.distributed.training_files import Position, training_state
from raysharding.models import AdapterNames, SavedTensor, saved_layout


@dataclass(frozen=True)
class SaveContents:
    """Tensors cut as the module's are; the rest ready to be written."""

    tensors: Mapping[str, torch.Tensor]
    """FQN → parameter or persistent buffer."""
    layout: Mapping[str, SavedTensor]
    """Key in the files → what of them it holds."""
    file_name: str | None
    """Of the one file that holds them; `None`: there may be several, under standard names."""
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
        if alone := parameters_left_alone(module):
            warn_once(
                f"{len(alone)} parameters are each rank's own (average_ignored_gradients=False): rank 0's are saved"
            )
        tensors, layout = model_contents(module)
        file_name = None if AdapterNames.of(module) is None else ADAPTER_NAME
        snapshot = agreed_snapshot(module, optimizer)
        if snapshot is None:
            return cls(tensors, layout, file_name, {}, None, None)
        return cls(tensors, layout, file_name, snapshot.tensors, snapshot.outline(), training_state(position))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, whole."""
        return total_bytes(self.tensors) + total_bytes(self.state)

    @property
    def num_tensors(self) -> int:
        """Tensors, the optimizer's with them."""
        return len(self.layout) + len(self.state)

    def copied(self, memory: HostMemory) -> Self:
        """Copy this rank's shards to host memory, where later steps do not change them. No collective.

        Args:
            memory: Where they go; nobody reads what an earlier copy left there any more.
        """
        return replace(self, tensors=memory.copies(self.tensors, "model"), state=memory.copies(self.state, "optimizer"))


def model_contents(module: nn.Module) -> tuple[dict[str, torch.Tensor], Mapping[str, SavedTensor]]:
    """Which of a module's tensors a save holds, by FQN, and as what; no collective."""
    tensors = saved_tensors(module)
    layout = saved_layout(module, tensors)
    held = {run.source for saved in layout.values() for run in saved.runs}
    return {fqn: tensor for fqn, tensor in tensors.items() if fqn in held}, layout  # of adapters nothing else


class HostMemory:
    """Memory of copies of this rank's shards, kept: memory that was touched before takes a copy in half the time.

    As large as the shards of weights and optimizer, once there was a copy; pinned for shards on a GPU.
    """

    def __init__(self) -> None:
        """No memory yet."""
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copies(self, tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        """Copy tensors' local parts.

        Args:
            tensors: Name → DTensor, or a tensor that is whole.
            kind: Tells the names of one mapping from those of another.

        Returns:
            Name → tensor of the same layout, on the CPU.
        """
        copied = {name: self._copy((kind, name), tensor) for name, tensor in tensors.items()}
        if any(local_tensor(tensor).is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the copies run beside the host, which may change the shards once this returns
        return copied

    def reserve(self, tensors: Mapping[str, torch.Tensor], kind: str) -> None:
        """Have memory for copies that will come. Arguments as of `copies`; the values do not matter yet."""
        for name, tensor in tensors.items():
            self._buffer((kind, name), local_tensor(tensor))

    def _buffer(self, key: tuple[str, str], local: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            if not local.is_cuda:
                back(buffer)  # page by page, as the copy comes, takes longer
            self._buffers[key] = buffer
        return buffer

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        buffer = self._buffer(key, local)
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # Not `from_local`, which would move it back to the mesh's device: only the layout is asked of it.
        return DTensor(buffer, tensor._spec, requires_grad=False)
