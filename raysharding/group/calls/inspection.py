"""Status and log of ranks: `rank_statuses`, `read_log`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from raysharding.errors import GroupError
from raysharding.group.calls.client import Client
from raysharding.group.cluster import ask_nodes, own_node_id

STATUS_S = 2.0
"""Deadline of the ranks' replies to `rank_statuses`, in seconds."""
_READ_S = 30.0


def rank_statuses(client: Client) -> list[dict[str, Any]]:
    """Return by rank the items of `Worker.status`, where the rank runs, and `answers`: True if it answered in time."""
    statuses = client.connection.probe("status", within_s=STATUS_S).replies
    return [
        # The controller reports a rank that is dead or stopped.
        {**statuses.get(info.rank, {}), "rank": info.rank, "node_ip": info.node_ip, "pid": info.pid}
        | {"answers": info.rank in statuses}
        for info in client.ranks
    ]


def read_log(client: Client, rank: int, num_lines: int) -> str:
    """Return the last lines of a rank's stdout and stderr, from Ray's log files on its node. The rank may be dead.

    Args:
        client: The group.
        rank: The rank.
        num_lines: Number of lines of each.

    Raises:
        GroupError: The node is gone, does not answer within 30 s, or is not known, or Ray was shut down.
    """
    if not client.connection.has_ray():
        raise GroupError("Ray was shut down, which knows where the logs are")
    snapshot = client.connection.snapshot
    if not snapshot.ranks:
        raise GroupError("it is not known where the ranks ran: their controller died before this driver attached")
    info, log_paths = snapshot.ranks[rank], snapshot.log_paths[rank]
    if not log_paths:
        return "Ray keeps no log files of this rank\n"
    if info.node_id == own_node_id():
        return _tails((log_paths, num_lines))  # without the start of a process
    # A task on the node, because the rank may be dead or stopped.
    ((_, answer),) = ask_nodes(_tails, {info.node_id: (log_paths, num_lines)}, _READ_S)
    if isinstance(answer, ray.exceptions.RayError):
        raise GroupError(f"cannot read the log of rank {rank} on node {info.node_ip}: {answer}") from answer
    return str(answer)


def _tails(wanted: tuple[Sequence[str], int]) -> str:
    paths, num_lines = wanted
    return "".join(f"== {path}\n{_tail(path, num_lines)}" for path in paths)


def _tail(path: str, num_lines: int) -> str:
    try:
        with open(path, errors="replace") as log:
            return "".join(line.rstrip("\n") + "\n" for line in deque(log, num_lines))
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"
