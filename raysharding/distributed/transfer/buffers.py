"""Memory of one rank that a transfer fills: a ring of buffers, and the shards.

While a bucket is sent from one buffer of the ring, the next one is read into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raysharding.distributed.comm import is_accelerator
from raysharding.distributed.fully_shard import local_tensor, shard_index_of
from raysharding.distributed.transfer.bucket_plan import PlannedTensor, Segment
from raysharding.distributed.transfer.memory import back
from raysharding.distributed.transfer.sources import as_bytes, as_memory

RING_SIZE = 2
"""Number of buffers: one is filled while the other is sent. Bucket k uses buffer k modulo this."""


class SlotBytes(NamedTuple):
    """Bytes of one buffer of a rank."""

    host: int
    """Size of `Slot.host`, which is read into."""
    wire: int
    """Size of `Slot.wire`, whose bytes are sent, received or converted."""


@dataclass
class Slot:
    """One buffer. On the CPU `host` and `wire` are the same tensor."""

    host: torch.Tensor
    """uint8 in host memory, filled by reads. On an accelerator pinned, and empty on ranks that do not read."""
    wire: torch.Tensor
    """uint8 on the message device, sent and received; on an accelerator empty where every rank reads for itself."""
    copied: torch.Event | None = None
    """On an accelerator: the copy from `host` to `wire`, or to the shards, is done."""
    sent: torch.Event | None = None
    """On an accelerator: the messages and copies out of `wire` are done."""

    def __post_init__(self) -> None:
        self.memory = as_memory(self.host)


def make_ring(slot: SlotBytes, device: torch.device) -> list[Slot]:
    """Make a ring of buffers; CPU buffers take memory on first touch."""
    if not is_accelerator(device):
        buffers = torch.empty(RING_SIZE, max(slot), dtype=torch.uint8).unbind()
        return [Slot(buffer, buffer) for buffer in buffers]
    return [
        Slot(
            torch.empty(slot.host, dtype=torch.uint8, pin_memory=slot.host > 0),
            torch.empty(slot.wire, dtype=torch.uint8, device=device),
        )
        for _ in range(RING_SIZE)
    ]


def round_up_pinned(num_bytes: int) -> int:
    """Return the memory that torch's allocator of pinned memory takes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


ReadShard = Callable[[str, torch.Tensor, int, int], torch.Tensor]
"""Called as `(fqn, flattened shard, its first element, number of elements used)`; returns a tensor like the shard."""


class LocalShards:
    """The local memory of planned tensors, addressed by segments.

    Args:
        planned: The tensors.
        tensors: FQN → tensor of this process's module.
        is_fresh: True if the memory was never touched: it is backed by pages before writes. That of touched memory
            would cost a warm load 12 %.
        read: Returns the values that `values` takes from in place of a shard's own.
    """

    def __init__(
        self,
        planned: Sequence[PlannedTensor],
        tensors: Mapping[str, torch.Tensor],
        is_fresh: bool = False,
        read: ReadShard | None = None,
    ) -> None:
        self._planned = planned
        self._is_fresh = is_fresh
        self._read = read
        held = [tensors[one.layout.fqn] for one in planned]
        self._flat = [_flatten(one.layout.fqn, tensor) for one, tensor in zip(planned, held, strict=True)]
        self._first = [
            one.layout.local_range(shard_index_of(tensor))[0] for one, tensor in zip(planned, held, strict=True)
        ]

    def takes_wire_bytes(self, tensor: int, device_type: str) -> bool:
        """Return True if a tensor's wire bytes can be written into its shard unchanged by `device_type`."""
        flat = self._flat[tensor]
        return flat.dtype == self._planned[tensor].wire_dtype and flat.device.type == device_type

    def converts_on_device(self, tensor: int) -> bool:
        """Return True if an accelerator converts wire bytes of a tensor of the plan to the dtype of its shard.

        A copy from the host that converts would do so on the host, and copy from pageable memory.
        """
        flat = self._flat[tensor]
        return flat.dtype != self._planned[tensor].wire_dtype and is_accelerator(flat.device)

    def values(self, segment: Segment) -> torch.Tensor:
        """Return the elements of a segment in this process, 1-D, in the module's dtype."""
        flat, first = self._flat[segment.tensor], self._first[segment.tensor]
        if self._read is not None:
            flat = self._read(self._planned[segment.tensor].layout.fqn, flat, first, segment.stop - segment.start)
        return flat[segment.start - first : segment.stop - first]

    def memory(self, segment: Segment, device_type: str) -> torch.Tensor | None:
        """Return the uint8 memory that `device_type` writes a segment's wire bytes into, backed by pages; or `None`.

        `None` means that the bytes must be staged: the shard has another dtype, or is elsewhere.
        """
        if not self.takes_wire_bytes(segment.tensor, device_type):
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


def _flatten(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    local = local_tensor(tensor)
    assert local.is_contiguous(), f"{fqn}: the shard is not contiguous"
    return local.view(-1)
