"""This process's TCP connections to other ranks: how to cut them, and how to let no stranger connect.

Note [Cutting]: there is no other way out of a collective on gloo: `ProcessGroup.abort()` unblocks nothing, and neither
does `destroy_process_group` while modules hold the group. But gloo's sockets are ordinary ones of this process: after
`shutdown(2)` on them a thread that waits in a collective gets "Connection closed by peer" within milliseconds, on this
rank and on those at the other ends.
A process has other connections too (Ray's, a user's), which must not be touched. A connection belongs to the process
group, or to its store, where its ends are two ranks: `between` keeps those, and no rank can tell on its own. (A
protocol of a user's own between two ranks would be cut, too.)

Note [Strangers]: gloo listens as long as a group lives, though all pairs are connected once it has been made. It
accepts whoever comes, and closes no stranger's connection before the group is destroyed: each costs a descriptor, and
what was sent over it stays in the kernel's memory, also when the stranger has gone (`python -m tests.bench.strangers`).
gloo cannot be told to stop listening. But the kernel drops what comes for a socket whose packet filter (BPF) says so:
to a stranger it is as if nobody were there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06

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


@contextmanager
def nobody_connects_later() -> Iterator[None]:
    """A context that makes gloo groups: what they listen at takes no connection after it; see Note [Strangers].

    gloo's listeners are those that are new. Not for NCCL, whose ranks connect when they first need to.
    """
    before = {_inode(own) for own in _listeners()}
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return  # then gloo's do so, too
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    for own in _listeners():
        if _inode(own) not in before:
            with suppress(OSError):  # a kernel without filters: as without this
                own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))


def _inode(own: socket.socket) -> int:
    return os.fstat(own.fileno()).st_ino


def _listeners() -> Iterator[socket.socket]:
    """This process's sockets that listen on one address: not Ray's, which listen on all."""
    for own in _sockets():
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and own.getsockname()[0] not in ("0.0.0.0", "::"):
            yield own


def _open_sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """This process's connected TCP sockets."""
    for own in _sockets():
        try:
            here, there = own.getsockname(), own.getpeername()
        except OSError:
            continue  # it listens, or has lost its peer
        yield own, ((_plain(here[0]), here[1]), (_plain(there[0]), there[1]))


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, through descriptors of our own that are closed again."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            duplicate = os.dup(int(descriptor))
        except OSError:
            continue  # closed meanwhile
        with socket.socket(fileno=duplicate) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                yield own


def _plain(host: str) -> str:
    """One spelling for an IPv4 address, whichever family its socket has."""
    return host.removeprefix("::ffff:")
