"""The ranks of a group: `RankInfo` for people, `Member` for the group's own use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and its actor. Calls reach it over a connection of the supervision; see `rpc/connection.py`."""

    info: RankInfo
    """Where the rank runs."""
    actor: Any
    """Ray's handle of the rank's `RankActor`."""
    stacks_descriptor: int
    """Descriptor with which `dump_stacks` reads the rank's stacks."""
    log_paths: tuple[str, ...] = ()
    """Files on the rank's node that receive its stdout and stderr."""
    name: str | None = None
    """Name of the actor; `None` in a group without a name."""
    bundle: int = 0
    """Index of the rank's bundle in the placement group."""
    epoch: int = 0
    """Epoch of this driver; a rank refuses the Commands of earlier epochs."""
