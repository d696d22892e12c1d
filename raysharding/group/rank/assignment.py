"""`Assignment`: the place of a rank in the group."""

from __future__ import annotations

from dataclasses import dataclass

from raysharding.group.ranks import RankInfo


@dataclass(frozen=True, slots=True)
class Assignment:
    """Place of a rank in the group."""

    info: RankInfo
    """The rank, its node and its device."""
    world_size: int
    """Number of ranks."""
    visible_gpus: str
    """CUDA_VISIBLE_DEVICES of the node; empty for CPU ranks."""
    shares_device: bool
    """True if other ranks, of this group or another, may have the same GPU."""
    num_threads: int
    """Number of torch threads of a CPU rank, unless OMP_NUM_THREADS is set."""
    rendezvous_s: float
    """Longest wait for the other ranks, in seconds."""
    collective_s: float
    """Timeout of collectives, in seconds."""
    stall_s: float
    """Longest silence of a peer in a load or save, in seconds."""
