"""Rank 0's ring of buffers in memory that the ranks of its host map: their bytes are not copied through a socket.

Note: who shares.
    The ring is a memfd: it has no name, so nothing is left behind whatever dies. Rank 0 tells its pid and descriptor;
    a rank of the same boot, host name and network namespace opens it through /proc and checks a random token. A rank
    that may not (another container, another user) says so and is sent its bytes instead. Hosts that are simulated by
    network namespaces stay hosts.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysharding.distributed.agreement import agree
from raysharding.distributed.metadata import broadcast_json

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class SharedRing:
    """The ring in this process; only on rank 0 and on ranks that could map it."""

    slots: tuple[torch.Tensor, ...]
    """uint8 [slot bytes] each: rank 0 writes them, the others read."""
    peers: frozenset[int]
    """The ranks, but rank 0, that map it."""


def share_ring(num_slots: int, slot_bytes: int, group: dist.ProcessGroup | None = None) -> SharedRing | None:
    """Make a ring on rank 0 and map it wherever that works; collective over `group`.

    Args:
        num_slots: Number of buffers.
        slot_bytes: Size of each.
        group: Process group, the default group if `None`.

    Returns:
        The ring; `None` on a rank that cannot map it, and everywhere if no other rank can. Memory: the ring once, in
        shared memory; each rank counts the pages of it that it touches.
    """
    rank = dist.get_rank(group)
    size = -(-(num_slots * slot_bytes + _TOKEN_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor, memory = _reserve(size) if rank == 0 and slot_bytes > 0 else (None, None)
    try:
        offer = broadcast_json(None if memory is None else _offer(descriptor, memory), group)
        if rank != 0 and offer is not None:
            memory = _map(offer, size)
        # Rank 0 must know who reads the ring before it sends, and must keep the descriptor until they have opened it.
        mapped = agree(None, memory is not None, group)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    peers = frozenset(peer for peer, has in enumerate(mapped) if has and peer != 0)
    if memory is None or not peers:
        return None
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=num_slots * slot_bytes)
    return SharedRing(tuple(whole.view(num_slots, slot_bytes).unbind()), peers)


def _reserve(size: int) -> tuple[int | None, mmap.mmap | None]:
    """A memfd whose pages are there (running out of them later would be a SIGBUS), mapped; nothing where it cannot be.

    The ring is a convenience, and the other ranks wait to hear of it: no error may leave here.
    """
    if sys.platform != "linux":
        return None, None
    descriptor: int | None = None
    try:
        descriptor = os.memfd_create("raysharding-ring", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        if descriptor is not None:
            os.close(descriptor)
        return None, None
    return descriptor, memory


def _offer(descriptor: int | None, memory: mmap.mmap) -> dict[str, Any]:
    memory[-_TOKEN_BYTES:] = token = secrets.token_bytes(_TOKEN_BYTES)
    return {"host": _host(), "pid": os.getpid(), "descriptor": descriptor, "token": token.hex()}


def _map(offer: dict[str, Any], size: int) -> mmap.mmap | None:
    if offer["host"] != _host():
        return None
    try:
        descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A pid of another namespace may name any process: take only a file of the right size with the token in it.
        if os.fstat(descriptor).st_size != size:
            return None
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[-_TOKEN_BYTES:].hex() == offer["token"] else None


def _host() -> list[str]:
    """What two ranks must have in common to be on one host; a value of its own where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return [secrets.token_hex(16)]
    return [socket.gethostname(), boot, network]
