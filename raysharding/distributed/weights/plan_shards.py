"""`PlanShards`: this rank's values of the tensors of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import local_tensor, shard_index_of
from raysharding.distributed.transfer import Segment
from raysharding.distributed.weights.copy_plan import CopyPlan
from raysharding.distributed.weights.merged_shards import MergedShards
from raysharding.distributed.weights.model_layout import ModelLayout


class PlanShards:
    """This rank's shards of the tensors of a plan, addressed by segments; on a target that stages, copies of them."""

    def __init__(
        self, plan: CopyPlan, layout: ModelLayout, tensors: Mapping[str, torch.Tensor], *, staged: bool
    ) -> None:
        self._plan = plan
        layouts = [layout.tensors[name] for name in plan.names]
        held = [tensors[name] for name in plan.names]
        indices = [shard_index_of(one) if isinstance(one, DTensor) else 0 for one in held]
        self._first = [one.local_range(index)[0] for one, index in zip(layouts, indices, strict=True)]
        self._live = [local_tensor(tensor).view(-1) for tensor in held]
        self._flat = [torch.empty_like(values) for values in self._live] if staged else self._live
        self._merged: MergedShards | None = None
        self.is_staged = staged
        """True if values are copies, until `take_staged`."""

    def merge(self, module: nn.Module, timeout_s: float) -> None:
        """Merge LoRA adapters into the values that are read from now on; collective over the own group."""
        num_elements = Counter[str]()
        for segment in (one for buckets in self._plan.buckets.values() for bucket in buckets for one in bucket):
            num_elements[self._plan.names[segment.tensor]] += segment.stop - segment.start
        self._merged = MergedShards(module, num_elements)
        self._merged.gather_adapters(timeout_s)

    def take_staged(self) -> None:
        """Copy staged values into the module."""
        for live, values in zip(self._live, self._flat, strict=True) if self.is_staged else ():
            live.copy_(values)

    def values(self, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment, 1-D, in this group's dtype."""
        number = segment.tensor
        flat, first = self._flat[number], self._first[number]
        if self._merged is not None:
            flat = self._merged.read(self._plan.names[number], flat, first, segment.stop - segment.start)
        return flat[segment.start - first : segment.stop - first]

    def in_slot(self, slot: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in a slot, 1-D, in the dtype on the wire."""
        part = slot[segment.offset : segment.offset + segment.num_bytes]
        return part.view(self._plan.wire[segment.tensor])
