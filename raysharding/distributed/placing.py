"""Writes segments into the shards of this process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raysharding.distributed.layout import ShardMap, local_tensor
from raysharding.distributed.plan import BucketPlan, PlannedTensor, Section, Segment
from raysharding.distributed.source import as_bytes


class Placer:
    """The local memory of a plan's tensors, addressed by segments."""

    def __init__(self, plan: BucketPlan, tensors: Mapping[str, torch.Tensor], shards: ShardMap) -> None:
        self._planned = plan.tensors
        self._flat = [self._flatten(planned, tensors[planned.layout.fqn]) for planned in plan.tensors]
        index = shards.shard_index
        self._first = [planned.layout.local_range(index)[0] for planned in plan.tensors]

    @staticmethod
    def _flatten(planned: PlannedTensor, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        assert local.is_contiguous(), f"{planned.layout.fqn}: the shard is not contiguous"
        return local.view(-1)

    def memory(self, segment: Segment, device_type: str) -> torch.Tensor | None:
        """uint8 memory of a segment if its wire bytes can land there unchanged on `device_type`, else `None`."""
        flat = self._flat[segment.tensor]
        if flat.dtype != self._planned[segment.tensor].wire_dtype or flat.device.type != device_type:
            return None
        return as_bytes(self._slice(segment))

    def _slice(self, segment: Segment) -> torch.Tensor:
        first = self._first[segment.tensor]
        return self._flat[segment.tensor][segment.start - first : segment.stop - first]

    def values(self, segment: Segment) -> torch.Tensor:
        """The elements of a segment in this process, 1-D, in the module's dtype."""
        return self._slice(segment)

    def place(self, segment: Segment, data: torch.Tensor) -> None:
        """Copy uint8 wire bytes into the shard, converting to the module's dtype."""
        self._slice(segment).copy_(data.view(self._planned[segment.tensor].wire_dtype))

    def place_section(
        self, section: Section, buffer: torch.Tensor, landed: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        """Copy all segments of a section out of a bucket's buffer, but for those that `landed` already."""
        for segment in section.segments:
            if (segment.tensor, segment.start) not in landed:
                start = section.offset + segment.offset
                self.place(segment, buffer[start : start + segment.num_bytes])
