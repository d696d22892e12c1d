"""This process's TCP connections to other ranks, and how to cut them: the only way out of a collective on gloo.

Note [Cutting]: `ProcessGroup.abort()` on gloo unblocks nothing, and neither does `destroy_process_group` while modules
hold the group. But gloo's sockets are ordinary ones of this process: after `shutdown(2)` on them a thread that waits
in a collective gets "Connection closed by peer" within milliseconds, on this rank and on those at the other ends.
A process has other connections too (Ray's, a user's), which must not be touched. A connection belongs to the process
group, or to its store, where its ends are two ranks: `between` keeps those, and no rank can tell on its own. (A
protocol of a user's own between two ranks would be cut, too.)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping

Address = tuple[str, int]
Connection = tuple[Address, Address]
"""(own end, other end); each is (host, port)."""


def connections() -> list[Connection]:
    """Return this process's established TCP connections. Safe from any thread."""
    return [connection for _, connection in _open_sockets()]


def between(by_rank: Mapping[int, Collection[Connection]]) -> dict[int, list[Connection]]:
    """Keep of each rank's connections those whose other end is a rank.

    Args:
        by_rank: What `connections` returned on each rank.
    """
    ends = {connection: rank for rank, some in by_rank.items() for connection in some}
    # One whose both ends are one rank's is a user's own.
    return {rank: [one for one in some if ends.get(one[::-1], rank) != rank] for rank, some in by_rank.items()}


def cut(chosen: Collection[Connection]) -> int:
    """Shut connections of this process down, in both directions; what waits on them fails. Safe from any thread.

    Args:
        chosen: Of what `connections` returned here; those that are gone meanwhile are left out.

    Returns:
        How many were shut down.
    """
    wanted, num_cut = set(chosen), 0
    for own, connection in _open_sockets():
        if connection in wanted:
            try:
                own.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other end was faster
            num_cut += 1
    return num_cut


def _open_sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """This process's connected TCP sockets, through descriptors of our own that are closed again."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            duplicate = os.dup(int(descriptor))
        except OSError:
            continue  # closed meanwhile
        with socket.socket(fileno=duplicate) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                continue
            try:
                here, there = own.getsockname(), own.getpeername()
            except OSError:
                continue  # it listens, or has lost its peer
            yield own, ((_plain(here[0]), here[1]), (_plain(there[0]), there[1]))


def _plain(host: str) -> str:
    """One spelling for an IPv4 address, whichever family its socket has."""
    return host.removeprefix("::ffff:")
