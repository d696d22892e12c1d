"""`LoadContext`: options and state that all steps of a load share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from raysharding.checkpoint import Checksums
from raysharding.config import Loading
from raysharding.distributed.fully_shard import ShardMap
from raysharding.distributed.transfer import MemoryPeak

Progress = Callable[[str, int, int, str], None]
"""Called as `progress(phase, bytes_done, bytes_total, last FQN)`; phases are `plan`, `stream`, `finalize`."""


def silent(phase: str, done: int, total: int, tensor: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class LoadContext:
    """One load on one rank."""

    module: nn.Module
    """The sharded root module."""
    loading: Loading
    """Options; the same on every rank."""
    progress: Progress
    """Receives the progress of the load."""
    stall_s: float
    """Longest wait for a byte of the files, and for one bucket of another rank, in seconds."""
    shards: ShardMap
    """Which rank holds which shard."""
    device: torch.device
    """Device of the messages."""
    peak: MemoryPeak
    """Peak memory since the start of the load."""
    checksums: Checksums | None
    """Receives the bytes that this rank reads; `None` unless `verify="full"`."""
    started: float
    """Time of the call, by `time.perf_counter`."""
