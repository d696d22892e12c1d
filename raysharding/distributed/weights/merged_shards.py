"""`MergedShards`: this rank's shards of the base weights with the LoRA adapters merged in, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raysharding.distributed.comm import get_world_size
from raysharding.distributed.fully_shard import message_device
from raysharding.distributed.transfer import gather_tensors, saved_tensors
from raysharding.models import AdapterMerge, adapter_merges


class MergedShards:
    """Merged shards, made when they are first read, and dropped after their last read.

    The adapters are gathered on every rank when this is made (collective); they are small. A delta is made whole, by
    peft, and cut: so merged weights are peft's, bit for bit. Memory: the adapters, a full weight's delta, and the
    merged shards that this rank has sent to some ranks of the target and not yet to others.

    Args:
        module: The module with adapters. It is not changed.
        num_reads: FQN → how often this rank will read the tensor.
        timeout_s: Longest wait for one round of the gather, in seconds.
    """

    def __init__(self, module: nn.Module, num_reads: Mapping[str, int], timeout_s: float) -> None:
        self._merges: Mapping[str, AdapterMerge] = adapter_merges(module)
        self._left = dict(num_reads)
        self._merged: dict[str, torch.Tensor] = {}
        tensors = saved_tensors(module)
        factors = {fqn: tensors[fqn] for merge in self._merges.values() for fqn in merge.factors}
        # Every rank of the group calls this at the same point, also one that sends nothing.
        every = range(get_world_size())
        self._factors = gather_tensors(factors, every, message_device(module), timeout_s=timeout_s)

    def read(self, fqn: str, local: torch.Tensor, first: int) -> torch.Tensor:
        """Return this rank's flattened shard of a tensor, merged if the adapters change it.

        Args:
            fqn: FQN of the tensor.
            local: The flattened shard.
            first: Its first element, in the flattened tensor.
        """
        if fqn not in self._merges:
            return local
        merged = self._merged.pop(fqn, None)
        if merged is None:
            merged = self._merge(self._merges[fqn], local, first)
        self._left[fqn] -= 1
        if self._left[fqn]:
            self._merged[fqn] = merged
        return merged

    def _merge(self, merge: AdapterMerge, local: torch.Tensor, first: int) -> torch.Tensor:
        factors = {name: self._factors[name].to(local.device) for name in merge.factors}
        merged = local.clone()
        # In place: the base weight's dtype stays, as in peft.
        merged += merge.delta(factors).reshape(-1)[first : first + local.numel()]
        return merged
