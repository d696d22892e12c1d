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
        self._layouts = layout.tensors
        self._tensors = [tensors[name] for name in plan.names]
        self._indices = [shard_index_of(one) if isinstance(one, DTensor) else 0 for one in self._tensors]
        layouts = [layout.tensors[name] for name in plan.names]
        self._first = [one.local_range(index)[0] for one, index in zip(layouts, self._indices, strict=True)]
        self._flat = [local_tensor(tensor).view(-1) for tensor in self._tensors]
        self._merged: MergedShards | None = None
        self.staged: dict[str, torch.Tensor] = {}
        if staged:
            self._flat = [torch.empty_like(values) for values in self._flat]
            self.staged = dict(zip((one.fqn for one in layouts), self._flat, strict=True))

    def merge(self, module: nn.Module, timeout_s: float) -> None:
        """Merge LoRA adapters into the values that are read from now on; collective over the own group."""
        reads = Counter(
            self._layouts[self._plan.names[segment.tensor]].fqn
            for buckets in self._plan.buckets.values()
            for bucket in buckets
            for segment in bucket
        )
        by_fqn = {one.fqn: one for one in self._layouts.values()}
        self._merged = MergedShards(module, by_fqn, reads, timeout_s)

    def values(self, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment, 1-D, in this group's dtype."""
        number = segment.tensor
        flat = self._flat[number]
        if self._merged is not None:
            fqn = self._layouts[self._plan.names[number]].fqn
            flat = self._merged.read(fqn, self._tensors[number], self._indices[number])
        first = self._first[number]
        return flat[segment.start - first : segment.stop - first]

    def in_slot(self, slot: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in a slot, 1-D, in the dtype on the wire."""
        part = slot[segment.offset : segment.offset + segment.num_bytes]
        return part.view(self._plan.wire[segment.tensor])
