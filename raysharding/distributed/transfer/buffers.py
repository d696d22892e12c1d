"""The ring of buffers of one rank: while a bucket is on its way, the next one is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysharding.distributed.transfer.sources import as_memory

RING_SIZE = 2
"""Buffers of a ring: one is read into while the other is on its way. Bucket k is in buffer k modulo this."""


@dataclass
class Slot:
    """One buffer. On the CPU `host` and `wire` are one."""

    host: torch.Tensor
    """uint8 in host memory, what is read into; pinned where there is a GPU; empty there on ranks that do not read."""
    wire: torch.Tensor
    """uint8 on the message device, what is sent and received."""
    copied: torch.cuda.Event | None = None
    """On a GPU: `wire`, or the shards, hold what `host` held."""
    sent: torch.cuda.Event | None = None
    """On a GPU: the messages and copies out of `wire` are done."""

    def __post_init__(self) -> None:
        self.memory = as_memory(self.host)


def make_ring(num_bytes: int, device: torch.device, reads: bool) -> list[Slot]:
    """Make a ring of buffers of `num_bytes` each; those on the CPU take memory when they are touched."""
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
    """The ring whose buffers other ranks of this host read, too."""
    return [Slot(buffer, buffer) for buffer in buffers]
