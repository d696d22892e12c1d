"""Memory of one rank that a transfer fills: a ring of buffers, and the shards.

While a bucket is sent from one buffer of the ring, the next one is read into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raysharding.distributed.comm import is_accelerator
from raysharding.distributed.fully_shard import ShardMap, local_tensor
from raysharding.distributed.transfer.bucket_plan import BucketPlan, PlannedTensor, Segment
from raysharding.distributed.transfer.memory import back
from raysharding.distributed.transfer.sources import as_bytes, as_memory

RING_SIZE = 2
"""Number of buffers: one is filled while the other is sent. Bucket k uses buffer k modulo this."""


@dataclass
class Slot:
    """One buffer. On the CPU `host` and `wire` are the same tensor."""

    host: torch.Tensor
    """uint8 in host memory, filled by reads. On an accelerator pinned, and empty on ranks that do not read."""
    wire: torch.Tensor
    """uint8 on the message device, sent and received."""
    copied: torch.Event | None = None
    """On an accelerator: the copy from `host` to `wire`, or to the shards, is done."""
    sent: torch.Event | None = None
    """On an accelerator: the messages and copies out of `wire` are done."""

    def __post_init__(self) -> None:
        self.memory = as_memory(self.host)


def make_ring(num_bytes: int, device: torch.device, reads: bool) -> list[Slot]:
    """Make a ring of buffers of `num_bytes` each; CPU buffers take memory on first touch."""
    if not is_accelerator(device):
        buffers = torch.empty(RING_SIZE, num_bytes, dtype=torch.uint8).unbind()
        return [Slot(buffer, buffer) for buffer in buffers]
    return [
        Slot(
            torch.empty(num_bytes if reads else 0, dtype=torch.uint8, pin_memory=reads),
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
        )
        for _ in range(RING_SIZE)
    ]


class LocalShards:
    """The local memory of a plan's tensors, addressed by segments.

    Args:
        plan: The plan.
        tensors: FQN → tensor of this process's module.
        shards: Which rank holds which shard.
        is_fresh: True if the memory was never touched: it is backed by pages before writes. That of touched memory
            would cost a warm load 12 %.
    """

    def __init__(
        self, plan: BucketPlan, tensors: Mapping[str, torch.Tensor], shards: ShardMap, is_fresh: bool = False
    ) -> None:
        self._is_fresh = is_fresh
        self._planned = plan.tensors
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

    def values(self, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in this process, 1-D, in the module's dtype."""
        first = self._first[segment.tensor]
        return self._flat[segment.tensor][segment.start - first : segment.stop - first]

    def memory(self, segment: Segment, device_type: str) -> torch.Tensor | None:
        """Return the uint8 memory that `device_type` writes a segment's wire bytes into, backed by pages; or `None`.

        `None` means that the bytes must be staged: the shard has another dtype, or is elsewhere.
        """
        if not self.takes_wire_bytes(segment, device_type):
            return None
        values = self.values(segment)
        if self._is_fresh:
            back(values)
        return as_bytes(values)

    def place(self, segment: Segment, data: torch.Tensor) -> None:
        """Copy uint8 wire bytes into the shard, converting to the module's dtype."""
        values = self.values(segment)
        if self._is_fresh:
            back(values)
        values.copy_(data.view(self._planned[segment.tensor].wire_dtype), non_blocking=True)
