"""Rings of buffers in shared memory, which ranks map on the reader's host: bytes do not pass through sockets.

Note: which ranks share.
    A ring is a memfd, which has no name, so that nothing is left behind after any death. A reader sends its pid and
    descriptor; a rank with the same boot id, host name and network namespace opens it through /proc and checks a random
    token. A rank without permission (another container or user) reports that, and gets messages instead. Hosts that are
    simulated by network namespaces count as different hosts. The buffers are followed by counters of progress.

`Counters` replace messages of one byte: a message between two ranks wakes two threads on each side, a futex wakes only
the waiting thread (futex(2), on Linux).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raysharding.distributed.comm import agree, all_gather_json, get_rank, get_world_size, waits_for_ranks
from raysharding.distributed.transfer.buffers import RING_SIZE

_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
WORD_BYTES = 4
"""Bytes of a counter."""
_STOPPED = 0xFFFFFFFF
"""Value of the counters of a process that has stopped."""
_SLICE_S = 1.0
"""Seconds between checks of a waiting process that the other process is alive."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """Return True if the number of the system call is known for this machine."""
    return platform.system() == "Linux" and platform.machine() in _FUTEX


class Counters:
    """Monotonic counters, each written by one process.

    Args:
        memory: Memory that all using processes share.
        offset: First byte of the counters; a multiple of 4.
        count: Number of counters.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self._memory = memory
        self._is_stopped = False
        self._words = (ctypes.c_uint32 * count).from_buffer(memory, offset)
        self._address = ctypes.addressof(self._words)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fence = threading.Lock()  # a memory fence, which plain loads and stores are not on every machine
        self._number = _FUTEX[platform.machine()]

    def stop(self) -> None:
        """Make every waiter of these counters raise, from now on; the memory is not used again. From any thread."""
        self._is_stopped = True
        for index in range(len(self._words)):
            self.post(index, _STOPPED)

    def post(self, index: int, value: int) -> None:
        """Set a counter and wake its waiters, which see all earlier writes to the memory."""
        with self._fence:
            self._words[index] = _STOPPED if self._is_stopped else value
        self._call(index, _WAKE, 0x7FFFFFFF, None)

    @waits_for_ranks
    def wait(self, index: int, value: int, timeout_s: float, pid: int) -> None:
        """Wait until a counter has reached `value`.

        Args:
            index: The counter.
            value: Value to wait for.
            timeout_s: Longest wait, in seconds.
            pid: Process that writes the counter.

        Raises:
            RuntimeError: The process died, did not reach the value in time, or called `stop`.
        """
        until = time.monotonic() + timeout_s
        while (found := self._words[index]) < value:
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"process {pid} of this host said nothing for {timeout_s:.0f} s")
            # Returns at once if the counter has changed.
            self._call(index, _WAIT, found, min(left, _SLICE_S))
            if self._words[index] < value and not _is_alive(pid):
                raise RuntimeError(f"process {pid} of this host is gone")
        if found == _STOPPED:
            raise RuntimeError(f"process {pid} of this host has stopped")
        with self._fence:
            return

    @waits_for_ranks
    def _call(self, index: int, operation: int, value: int, timeout_s: float | None) -> None:
        address = ctypes.c_void_p(self._address + index * WORD_BYTES)
        timeout = None
        if timeout_s is not None:
            timeout = ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
        number = ctypes.c_long(self._number)
        if self._libc.syscall(number, address, operation, ctypes.c_uint32(value), timeout, None, 0) < 0:
            code = ctypes.get_errno()
            assert code in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT), os.strerror(code)


def _is_alive(pid: int) -> bool:
    try:
        # A dead process is a zombie until its parent waits for it; the state follows the name in brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


_TOKEN_BYTES = 16


@dataclass(frozen=True)
class MappedRing:
    """Ring of one reader, mapped into this process."""

    slots: tuple[torch.Tensor, ...]
    """uint8 [slot bytes] each: the reader writes them, the others read."""
    counters: Counters
    """Counter 0: buckets that the reader has filled; 1 + rank: buckets that this rank has placed."""
    reader_pid: int
    """Process that fills the ring."""


@dataclass(frozen=True)
class SharedRings:
    """Rings of the readers that this process maps."""

    rings: Mapping[int, MappedRing]
    """Reader → its ring, including this rank's own."""
    peers: Mapping[int, frozenset[int]]
    """Reader → the other ranks that map its ring; the same on every rank."""
    pids: Sequence[int]
    """Rank → pid on its host."""


def share_rings(slot_bytes: int) -> SharedRings:
    """Make a ring on every reader and map it on the ranks of its host; collective.

    Args:
        slot_bytes: Size of a buffer of this rank; 0 on a rank that does not read for others.

    Returns:
        The rings. A rank that cannot map a ring is not among its peers; a reader without peers has no ring. Memory:
        each ring once, in shared memory; pages count for each rank that touches them.
    """
    rank, world_size = get_rank(), get_world_size()
    own = reserve_shared(RING_SIZE * slot_bytes, 1 + world_size) if slot_bytes > 0 else None
    try:
        # Every rank calls this: ranks must agree on the rings, or they would wait for messages that are not sent.
        mine = None if own is None else offer_shared(*own) | {"slot_bytes": slot_bytes}
        offers = dict(enumerate(all_gather_json(mine)))
        found = {reader: map_shared(offer) for reader, offer in offers.items() if offer is not None and reader != rank}
        mapped = {reader: ring for reader, ring in found.items() if ring is not None}
        # Readers must know their peers before the stream, and keep the descriptor until the peers have opened it.
        every = agree(None, {"pid": os.getpid(), "mapped": sorted(mapped)})
    finally:
        if own is not None:
            os.close(own[0])
    peers = {
        reader: readable
        for reader in offers
        if (readable := frozenset(peer for peer, value in enumerate(every) if reader in value["mapped"]))
    }
    if own is not None:
        mapped[rank] = own[1]
    rings = {reader: _ring(ring, offers[reader], world_size) for reader, ring in mapped.items() if reader in peers}
    return SharedRings(rings, peers, [value["pid"] for value in every])


def _ring(memory: mmap.mmap, offer: Mapping[str, Any], world_size: int) -> MappedRing:
    slot_bytes = offer["slot_bytes"]
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=RING_SIZE * slot_bytes)
    counters = counters_in(memory, RING_SIZE * slot_bytes, 1 + world_size)
    return MappedRing(tuple(whole.view(RING_SIZE, slot_bytes).unbind()), counters, offer["pid"])


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def reserve_shared(data_bytes: int, num_counters: int) -> tuple[int, mmap.mmap] | None:
    """Return a memfd with reserved pages (a lack of pages would raise SIGBUS) and its mapping; `None` on failure.

    Does not raise: shared memory is optional, and the other ranks wait for this rank's result.

    Args:
        data_bytes: Bytes at the start.
        num_counters: Number of counters after them, at the start of a page.
    """
    if not has_futex():
        return None
    size = _pages(data_bytes) + _pages(num_counters * WORD_BYTES + _TOKEN_BYTES)
    descriptor: int | None = None
    try:
        descriptor = os.memfd_create("raysharding-ring", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor, memory


def counters_in(memory: mmap.mmap, data_bytes: int, num_counters: int) -> Counters:
    """Return the counters of memory that `reserve_shared` made with as many data bytes."""
    return Counters(memory, _pages(data_bytes), num_counters)


def offer_shared(descriptor: int, memory: mmap.mmap) -> dict[str, Any]:
    """Return as JSON what `map_shared` needs. The descriptor must stay open until the others have mapped the memory."""
    memory[-_TOKEN_BYTES:] = token = secrets.token_bytes(_TOKEN_BYTES)
    return {
        "host": host_identity(),
        "pid": os.getpid(),
        "descriptor": descriptor,
        "token": token.hex(),
        "size": len(memory),
    }


def map_shared(offer: dict[str, Any]) -> mmap.mmap | None:
    """Map another rank's memory; `None` if it is on another host, or this process has no permission."""
    size = offer["size"]
    if offer["host"] != host_identity():
        return None
    try:
        descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    # A pid of another namespace may be any process: accept only memory with the token at its end.
    return memory if memory[-_TOKEN_BYTES:].hex() == offer["token"] else None


def host_identity() -> list[str]:
    """Return [host name, boot id, network namespace], equal on ranks of one host; unique without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return [secrets.token_hex(16)]
    return [socket.gethostname(), boot, network]
