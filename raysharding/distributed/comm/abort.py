"""Shut down this process's TCP connections to other ranks, and keep other processes from connecting to gloo.

Note [Shutting down]: a copy between two groups ends when one of them fails, and shutting sockets down is the only way
to end a collective on gloo. `ProcessGroup.abort()` unblocks nothing, and neither does `destroy_process_group` while
modules hold the group. gloo's sockets are ordinary sockets of this process: after `shutdown(2)`, a thread that waits in
a collective gets "Connection closed by peer" within milliseconds, on this rank and on the ranks at the other ends. The
process has other connections (Ray's, the user's) that must stay open. A connection belongs to the process group or to
its store if both of its ends are ranks. One rank cannot decide that alone; `between` compares the connections of all
ranks. (A connection that user code opens between two ranks is shut down as well.)

Note [Listeners]: gloo's listeners stay open for the lifetime of a group, although every pair of ranks is connected once
the group is initialised. gloo accepts every connection and closes none before the group is destroyed: each connection
of a port scanner costs a descriptor, and the data that it sent stays in kernel memory even after it has closed it
(`python -m tests.bench.strangers`). gloo has no option to close its listeners. A packet filter (BPF) on a listener
makes the kernel drop all packets to it: a connection attempt gets no answer.
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
"""(local end, remote end), each (host, port)."""


def connections() -> list[Connection]:
    """Return this process's established TCP connections. Thread-safe."""
    return [connection for _, connection in _open_sockets()]


def between(by_rank: Mapping[int, Collection[Connection]]) -> dict[int, list[Connection]]:
    """Return, for each rank, the connections whose remote end is another rank.

    Args:
        by_rank: Rank to the result of `connections` on that rank.
    """
    ends = {connection: rank for rank, some in by_rank.items() for connection in some}
    # A connection whose two ends are the same rank is the user's.
    return {rank: [one for one in some if ends.get(one[::-1], rank) != rank] for rank, some in by_rank.items()}


def shut_down(chosen: Collection[Connection]) -> None:
    """Shut down connections of this process in both directions; threads that wait on them fail. Thread-safe.

    Args:
        chosen: A subset of the result of `connections` on this rank. Connections that have since closed are skipped.
    """
    # By the addresses of both ends, not by descriptor: other threads close sockets, and the kernel gives the number of
    # a closed one to the next, which may be Ray's.
    for own, connection in _open_sockets():
        if connection in chosen:
            with suppress(OSError):  # the remote end closed it first
                own.shutdown(socket.SHUT_RDWR)


@contextmanager
def closed_listeners() -> Iterator[None]:
    """Make gloo groups inside this context; their listeners take no connection after it (Note [Listeners]).

    Listeners that are new at exit are taken for gloo's. Not for NCCL, whose ranks connect at the first collective.
    """
    before = {_inode(own) for own in _listeners()}
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return  # then gloo's ranks connect at the first collective, too
    # A program of one instruction: keep 0 bytes of a packet. The kernel copies it; `drop_all` must live until then. The
    # connections of the pairs have sockets of their own, which a filter that comes after them does not concern.
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    for own in _listeners():
        if _inode(own) not in before:
            with suppress(OSError):  # the kernel has no packet filters: anyone who reaches the port can connect
                own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))


def _inode(own: socket.socket) -> int:
    return os.fstat(own.fileno()).st_ino


def _listeners() -> Iterator[socket.socket]:
    """Yield this process's sockets that listen on one address. Ray's listen on all addresses."""
    for own in _sockets():
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and own.getsockname()[0] not in ("0.0.0.0", "::"):
            yield own


def _open_sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """Yield this process's connected TCP sockets."""
    for own in _sockets():
        try:
            here, there = own.getsockname(), own.getpeername()
        except OSError:
            continue  # a listener, or the peer is gone
        yield own, ((_plain(here[0]), here[1]), (_plain(there[0]), there[1]))


def _sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, as duplicated descriptors that are closed again.

    A duplicate stays the same socket when another thread closes the original, and `shutdown` acts on the socket.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            duplicate = os.dup(int(descriptor))
        except OSError:
            continue  # closed in the meantime
        with socket.socket(fileno=duplicate) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                yield own


def _plain(host: str) -> str:
    """Return an IPv4 address in its IPv4 form, whatever the family of its socket."""
    return host.removeprefix("::ffff:")
