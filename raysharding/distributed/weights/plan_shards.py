"""A rank's shards that a copy or a stream of weights reads: those of a plan, and those with LoRA adapters merged in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from raysharding.distributed.comm import get_world_size
from raysharding.distributed.fully_shard import message_device
from raysharding.distributed.transfer import (
    LocalShards,
    PlannedTensor,
    Segment,
    full_memory,
    gather_into,
    saved_tensors,
)
from raysharding.distributed.weights.copy_plan import CopyPlan
from raysharding.distributed.weights.model_layout import ModelLayout
from raysharding.errors import PlanError
from raysharding.models import AdapterMerge, adapter_merges, adapter_scale, plain_names


def base_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name in the model without adapters → tensor of a module that has adapters.

    Raises:
        PlanError: It has none.
    """
    if adapter_scale(module) is None:
        raise PlanError("merge=True, but the source has no adapters: leave merge out")
    held = saved_tensors(module)
    return {name: held[fqn] for fqn, name in plain_names(module).items() if fqn in held}


class MergedShards:
    """Merged shards, made when they are first read, and dropped after their last read.

    The adapters are gathered on every rank; they are small. A delta is made whole, by peft, and cut: so merged weights
    are peft's, bit for bit. Memory: the adapters, a full weight's delta, and the merged shards that this rank has sent
    to some ranks and not yet to others.

    Args:
        module: The module with adapters. It is not changed.
        num_elements: Name in the model without adapters → elements of the tensor that this rank will read in all.

    Raises:
        PlanError: The adapters cannot be merged; see `adapter_merges`.
    """

    def __init__(self, module: nn.Module, num_elements: Mapping[str, int]) -> None:
        self._module = module
        self._merges: Mapping[str, AdapterMerge] = {one.name: one for one in adapter_merges(module).values()}
        self._left = dict(num_elements)
        self._merged: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def gather_adapters(self, timeout_s: float) -> int:
        """Gather the adapters on every rank; return how many messages this rank sent or received. Collective.

        Args:
            timeout_s: Longest wait for one round of the gather, in seconds.
        """
        tensors = saved_tensors(self._module)
        sharded = {fqn: tensors[fqn] for merge in self._merges.values() for fqn in merge.factors}
        self._factors = full_memory(sharded, on_cpu=True)
        # Every rank of the group calls this at the same point, also one that sends nothing.
        every, device = range(get_world_size()), message_device(self._module)
        return gather_into(self._factors, sharded, every, device, timeout_s=timeout_s)

    def read(self, name: str, local: torch.Tensor, first: int, num_elements: int) -> torch.Tensor:
        """Return this rank's flattened shard of a tensor, merged if the adapters change it.

        Args:
            name: Name of the tensor in the model without adapters.
            local: The flattened shard.
            first: Its first element, in the flattened tensor.
            num_elements: Elements of it that are used this time.
        """
        if name not in self._merges:
            return local
        merged = self._merged.pop(name, None)
        if merged is None:
            merged = self._merge(self._merges[name], local, first)
        self._left[name] -= num_elements
        if self._left[name]:
            self._merged[name] = merged
        return merged

    def _merge(self, merge: AdapterMerge, local: torch.Tensor, first: int) -> torch.Tensor:
        factors = {name: self._factors[name].to(local.device) for name in merge.factors}
        merged = local.clone()
        # In place: the base weight's dtype stays, as in peft.
        merged += merge.delta(factors).reshape(-1)[first : first + local.numel()]
        return merged


class PlanShards(LocalShards):
    """This rank's shards of the tensors of a plan; on a target that stages, copies of them."""

    def __init__(
        self, plan: CopyPlan, layout: ModelLayout, tensors: Mapping[str, torch.Tensor], *, staged: bool
    ) -> None:
        layouts = [layout.tensors[name] for name in plan.names]
        super().__init__(list(map(PlannedTensor, layouts, plan.wire)), tensors)
        self._plan = plan
        self._live = self._flat
        if staged:
            self._flat = [torch.empty_like(values) for values in self._live]
        self.is_staged = staged
        """True if values are copies, until `take_staged`."""

    def merge(self, module: nn.Module, timeout_s: float) -> None:
        """Merge LoRA adapters into the values that are read from now on; collective over the own group."""
        num_elements = Counter[str]()
        for segment in (one for buckets in self._plan.buckets.values() for bucket in buckets for one in bucket):
            num_elements[self._plan.names[segment.tensor]] += segment.stop - segment.start
        merged = MergedShards(module, num_elements)
        merged.gather_adapters(timeout_s)
        self._read = merged.read

    def take_staged(self) -> None:
        """Copy staged values into the module."""
        for live, values in zip(self._live, self._flat, strict=True) if self.is_staged else ():
            live.copy_(values)

    def in_slot(self, slot: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in a slot, 1-D, in the dtype on the wire."""
        part = slot[segment.offset : segment.offset + segment.num_bytes]
        return part.view(self._plan.wire[segment.tensor])
