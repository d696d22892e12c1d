"""`PlanShards`: this rank's values of the tensors of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from raysharding.distributed.transfer import LocalShards, PlannedTensor, Segment
from raysharding.distributed.weights.copy_plan import CopyPlan
from raysharding.distributed.weights.merged_shards import MergedShards
from raysharding.distributed.weights.model_layout import ModelLayout


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
