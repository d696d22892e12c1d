"""`RankInfo`: where a rank runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where one rank runs."""

    rank: int
    """Global rank; ranks are sorted by node, then GPU."""
    node_id: str
    """Ray's id of the rank's node."""
    node_ip: str
    """Address of the rank's node, as Ray knows it."""
    pid: int
    """Process id of the rank's actor."""
    local_rank: int
    """Number of the rank among the group's ranks on its node."""
    device: str
    """Torch device of the rank, such as `cpu` or `cuda:1`."""
