"""The ring of buffers of one rank: while a bucket is sent, the next one is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysharding.distributed.transfer.sources import as_memory

RING_SIZE = 2
"""Number of buffers: one is filled while the other is sent. Bucket k uses buffer k modulo this."""


@dataclass
class Slot:
    """One buffer. On the CPU `host` and `wire` are the same tensor."""

    host: torch.Tensor
    """uint8 in host memory, filled by reads; pinned if there is a GPU, and then empty on ranks that do not read."""
    wire: torch.Tensor
    """uint8 on the message device, sent and received."""
    copied: torch.cuda.Event | None = None
    """On a GPU: the copy from `host` to `wire`, or to the shards, is done."""
    sent: torch.cuda.Event | None = None
    """On a GPU: the messages and copies out of `wire` are done."""

    def __post_init__(self) -> None:
        self.memory = as_memory(self.host)


def make_ring(num_bytes: int, device: torch.device, reads: bool) -> list[Slot]:
    """Make a ring of buffers of `num_bytes` each; CPU buffers take memory on first touch."""
    if device.type == "cpu":
        buffers = torch.empty(RING_SIZE, num_bytes, dtype=torch.uint8).unbind()
        return [Slot(buffer, buffer) for buffer in buffers]
    return [
        Slot(
            torch.empty(num_bytes if reads else 0, dtype=torch.uint8, pin_memory=reads),
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
        )
        for _ in range(RING_SIZE)
    ]


def shared_ring(buffers: Sequence[torch.Tensor]) -> list[Slot]:
    """Return a ring of buffers that other ranks of this host also read."""
    return [Slot(buffer, buffer) for buffer in buffers]
