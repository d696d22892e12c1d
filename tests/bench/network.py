"""A private network namespace for the ranks of a benchmark: its loopback carries only their messages."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 0x1


@contextmanager
def private_network() -> Iterator[int | None]:
    """Create a namespace with its loopback up, and yield its descriptor; `None` if the system does not allow this.

    Requires CAP_SYS_ADMIN (root). The namespace exists until the descriptor is closed and its last process has ended.
    """
    made: list[int] = []
    # A namespace belongs to a thread, so this process stays in its own namespace.
    thread = threading.Thread(target=_make, args=(made,))
    thread.start()
    thread.join()
    try:
        yield made[0] if made else None
    finally:
        for descriptor in made:
            os.close(descriptor)


def join_network(descriptor: int) -> None:
    """Move this thread, and threads that it starts, into the namespace of `private_network`; close the descriptor.

    Raises:
        OSError: The system does not allow this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot join the network namespace: {os.strerror(number)}")
    os.close(descriptor)


def _make(made: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNET) != 0:
        return  # not Linux, or not allowed: the table notes that bytes on the wire are not counted
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, name + bytes(16)), 16)[0]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, name + struct.pack("h", flags | _IFF_UP).ljust(16, b"\0"))
    made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
