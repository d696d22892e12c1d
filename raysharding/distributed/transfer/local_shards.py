"""The local shards of this process, which segments are written into."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from raysharding.distributed.fully_shard import ShardMap, local_tensor
from raysharding.distributed.transfer.bucket_plan import BucketPlan, PlannedTensor, Section, Segment
from raysharding.distributed.transfer.memory import back
from raysharding.distributed.transfer.sources import as_bytes


class LocalShards:
    """The local memory of a plan's tensors, addressed by segments.

    Args:
        plan: The plan.
        tensors: FQN → tensor of this process's module.
        shards: Which rank holds which shard.
        fresh: True if the memory was never touched; it is then backed by pages just before writes.
    """

    def __init__(
        self, plan: BucketPlan, tensors: Mapping[str, torch.Tensor], shards: ShardMap, fresh: bool = False
    ) -> None:
        self._planned = plan.tensors
        self._fresh = fresh
        self._flat = [self._flatten(planned, tensors[planned.layout.fqn]) for planned in plan.tensors]
        index = shards.shard_index
        self._first = [planned.layout.local_range(index)[0] for planned in plan.tensors]

    @staticmethod
    def _flatten(planned: PlannedTensor, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        assert local.is_contiguous(), f"{planned.layout.fqn}: the shard is not contiguous"
        return local.view(-1)

    def takes_wire_bytes(self, segment: Segment, device_type: str) -> bool:
        """Return True if a segment's wire bytes can be written into the shard unchanged by `device_type`."""
        flat = self._flat[segment.tensor]
        return flat.dtype == self._planned[segment.tensor].wire_dtype and flat.device.type == device_type

    def memory(self, segment: Segment) -> torch.Tensor:
        """Return the uint8 memory of a segment in this process, backed by pages for the coming write."""
        return as_bytes(self.values(segment))

    def values(self, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in this process, 1-D, in the module's dtype; backed as by `memory`."""
        first = self._first[segment.tensor]
        values = self._flat[segment.tensor][segment.start - first : segment.stop - first]
        if self._fresh:
            back(values)
        return values

    def place(self, segment: Segment, data: torch.Tensor) -> None:
        """Copy uint8 wire bytes into the shard, converting to the module's dtype."""
        self.values(segment).copy_(data.view(self._planned[segment.tensor].wire_dtype), non_blocking=True)

    def place_section(self, section: Section, memory: torch.Tensor, in_place: Set[tuple[int, int]]) -> None:
        """Copy all segments of a section from its uint8 memory, except those that were received `in_place`."""
        for segment in section.segments:
            if (segment.tensor, segment.start) not in in_place:
                self.place(segment, memory[segment.offset : segment.offset + segment.num_bytes])
