"""`measure_link`: latency of a small all-reduce in the process group, and bandwidth of a broadcast."""

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
    """Measurements of one rank."""

    latency_s: float
    """Median time of an all-reduce of one number, in seconds."""
    broadcast_bytes: int
    """Bytes that rank 0 broadcast; 0 without a broadcast."""
    broadcast_s: float
    """Seconds until every rank had received them."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second that each rank received, `None` without a broadcast."""
        return self.broadcast_bytes / self.broadcast_s if self.broadcast_bytes else None


def measure_link(device: torch.device, broadcast_bytes: int = 0) -> LinkTimes:
    """Run a few small all-reduces and one broadcast from rank 0 in the default process group; collective.

    The timeout of the process group bounds the time.

    Args:
        device: Device of this rank's messages.
        broadcast_bytes: Size of the broadcast; 0 for none. Each rank allocates that much for the duration of the call.

    Raises:
        RuntimeError: Received values differ from the values sent, or an error of the process group.
    """
    times = [_all_reduce(device) for _ in range(_ROUNDS + 1)][1:]  # the first one connects the ranks
    if not broadcast_bytes:
        return LinkTimes(statistics.median(times), 0, 0.0)
    fill = _MARK if dist.get_rank() == 0 else 0
    payload = torch.full((broadcast_bytes,), fill, dtype=torch.uint8, device=device)
    _all_reduce(device)  # start the clock when every rank has allocated its buffer
    begun = time.perf_counter()
    dist.broadcast(payload, src=0)
    _all_reduce(device)  # the sender is done before the receivers
    seconds = time.perf_counter() - begun
    if not bool((payload == _MARK).all()):
        raise RuntimeError(f"rank {dist.get_rank()}: a broadcast of {broadcast_bytes} bytes delivered other bytes")
    return LinkTimes(statistics.median(times), broadcast_bytes, seconds)


def _all_reduce(device: torch.device) -> float:
    begun = time.perf_counter()
    one = torch.ones((), device=device)
    dist.all_reduce(one)
    total = int(one.item())  # on a GPU: waits for the result
    if total != dist.get_world_size():
        raise RuntimeError(f"rank {dist.get_rank()}: an all-reduce of ones over {dist.get_world_size()} gave {total}")
    return time.perf_counter() - begun
