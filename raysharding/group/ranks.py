"""The ranks of a group: `RankInfo` for people, `Member` for the group's own use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where one rank runs."""

    rank: int
    """Global rank. Ranks are sorted by node, then GPU."""
    node_id: str
    """Ray's id of its node."""
    node_ip: str
    """Address of its node, as Ray knows it."""
    pid: int
    """Process id of its actor."""
    local_rank: int
    """Its number among the group's ranks on its node."""
    device: str
    """Its torch device, such as `cpu` or `cuda:1`."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and its actor. Calls reach it over a connection of the supervision; see `rpc/driver_connections.py`."""

    info: RankInfo
    """Where it runs."""
    actor: Any
    """Ray's handle of its `RankActor`."""
    stacks_descriptor: int
    """What `stack_dump.look` needs to read its stacks."""
    log_paths: tuple[str, ...] = ()
    """Files on its node that it prints into, stdout and stderr."""
    name: str | None = None
    """The actor's, in a group with a name."""
    bundle: int = 0
    """Its place in the placement group."""
    epoch: int = 0
    """This driver's; a rank refuses the commands of a driver that another has followed."""
