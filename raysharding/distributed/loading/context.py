"""What all steps of one load share."""

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
    """The progress callback of those who want none."""


@dataclass(frozen=True)
class LoadContext:
    """One load on one rank."""

    module: nn.Module
    """What is loaded into."""
    loading: Loading
    """The same on every rank."""
    progress: Progress
    """Is told how far the load is."""
    stall_s: float
    """Longest wait for a byte of the files, and for one bucket of another rank, in seconds."""
    shards: ShardMap
    """Which rank holds what."""
    device: torch.device
    """Device of the messages."""
    peak: MemoryPeak
    """Memory since the load began."""
    checksums: Checksums | None
    """Gets what this rank reads; `None` unless `verify="full"`."""
    started: float
    """`perf_counter` of the call."""
