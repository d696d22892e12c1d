"""`measure_link`: how long the smallest collective takes in the process group, and how fast a broadcast is."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ROUNDS = 5
_MARK = 0x5A


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one rank measured."""

    latency_s: float
    """Median time of an all-reduce of one number."""
    broadcast_bytes: int
    """Bytes that rank 0 broadcast; 0: none."""
    broadcast_s: float
    """Time until every rank had them."""

    @property
    def bytes_per_s(self) -> float | None:
        """Rate at which each rank received, `None` without a broadcast."""
        return self.broadcast_bytes / self.broadcast_s if self.broadcast_bytes else None


def measure_link(device: torch.device, broadcast_bytes: int = 0) -> LinkTimes:
    """Run a few small all-reduces, and one broadcast from rank 0, in the default process group; collective.

    Bounded by the process group's time-out, and by whoever watches the ranks.

    Args:
        device: Where this rank's messages lie.
        broadcast_bytes: Size of the broadcast; 0 leaves it out. Taken on every rank for as long as this runs.

    Raises:
        RuntimeError: What arrived is not what was sent, or from the process group.
    """
    times = [_all_reduce(device) for _ in range(_ROUNDS + 1)][1:]  # the first connects
    if not broadcast_bytes:
        return LinkTimes(statistics.median(times), 0, 0.0)
    fill = _MARK if dist.get_rank() == 0 else 0
    payload = torch.full((broadcast_bytes,), fill, dtype=torch.uint8, device=device)
    _all_reduce(device)  # nobody's clock runs while another still fills its memory
    begun = time.perf_counter()
    dist.broadcast(payload, src=0)
    _all_reduce(device)  # a rank that sends is done before one that receives
    seconds = time.perf_counter() - begun
    if not bool((payload == _MARK).all()):
        raise RuntimeError(f"rank {dist.get_rank()}: a broadcast of {broadcast_bytes} bytes brought other bytes")
    return LinkTimes(statistics.median(times), broadcast_bytes, seconds)


def _all_reduce(device: torch.device) -> float:
    begun = time.perf_counter()
    one = torch.ones((), device=device)
    dist.all_reduce(one)
    total = int(one.item())  # on a GPU: waits until it is there
    if total != dist.get_world_size():
        raise RuntimeError(f"rank {dist.get_rank()}: an all-reduce of ones over {dist.get_world_size()} gave {total}")
    return time.perf_counter() - begun
