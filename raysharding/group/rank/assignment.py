"""`Title`, `Assignment`: what a rank is called, and its place in the group."""

from __future__ import annotations

from dataclasses import dataclass

from raysharding.group.cluster import name_log_lines
from raysharding.group.ranks import RankInfo


@dataclass(frozen=True, slots=True)
class Title:
    """Title of an actor, before and after it is given a rank."""

    model: str
    """Short name of the model."""
    group: str
    """The group's name in errors, such as `group a1b2c3`."""
    bundle: int
    """Index of the actor's bundle, which need not be its rank. The dashboard shows it: ranks are numbered once all
    actors run, and Ray asks an actor for its title only when the actor has started."""

    def __str__(self) -> str:
        return f"{self.model} bundle {self.bundle} ({self.group})"

    def show_rank(self, rank: int) -> None:
        """Make Ray put the rank in front of the lines that this process prints from now on."""
        name_log_lines(f"{self.model} rank {rank} ({self.group})")


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
    weights_version: int
    """Highest version that the group's weights had before."""
