"""Counters in shared memory that processes of one host wait on: what a message of one byte would say, without a socket.

A message between two ranks wakes two threads on each side; a futex wakes the one that waits. Linux, see futex(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from pathlib import Path

_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_WORD_BYTES = 4
_SLICE_S = 1.0
"""So often a waiting process looks whether the other one is still there."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """Whether this machine's system call is known here."""
    return platform.system() == "Linux" and platform.machine() in _FUTEX


def signal_bytes(count: int) -> int:
    """Bytes that `count` counters take."""
    return count * _WORD_BYTES


class Signals:
    """Counters that only grow, each written by one process.

    Args:
        memory: Shared by all processes that use them.
        offset: First byte of the counters; a multiple of 4.
        count: Number of counters.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self._memory = memory
        self._words = (ctypes.c_uint32 * count).from_buffer(memory, offset)
        self._address = ctypes.addressof(self._words)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fence = threading.Lock()  # taking it orders memory, which plain loads and stores do not on every machine
        self._number = _FUTEX[platform.machine()]

    def post(self, index: int, value: int) -> None:
        """Set a counter and wake those who wait for it. What was written to the memory before is seen by them."""
        with self._fence:
            self._words[index] = value
        self._call(index, _WAKE, 0x7FFFFFFF, None)

    def wait(self, index: int, value: int, timeout_s: float, pid: int) -> None:
        """Wait until a counter has reached `value`.

        Args:
            index: The counter.
            value: What it must reach.
            timeout_s: Longest wait.
            pid: The process that writes it.

        Raises:
            RuntimeError: That process is gone, or did not get so far in time.
        """
        until = time.monotonic() + timeout_s
        while (found := self._words[index]) < value:
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"process {pid} of this host said nothing for {timeout_s:.0f} s")
            # Returns at once where the counter has changed meanwhile.
            self._call(index, _WAIT, found, min(left, _SLICE_S))
            if self._words[index] < value and not _is_alive(pid):
                raise RuntimeError(f"process {pid} of this host is gone")
        with self._fence:
            return

    def _call(self, index: int, operation: int, value: int, timeout_s: float | None) -> None:
        address = ctypes.c_void_p(self._address + index * _WORD_BYTES)
        timeout = None
        if timeout_s is not None:
            timeout = ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
        number = ctypes.c_long(self._number)
        if self._libc.syscall(number, address, operation, ctypes.c_uint32(value), timeout, None, 0) < 0:
            code = ctypes.get_errno()
            assert code in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT), os.strerror(code)


def _is_alive(pid: int) -> bool:
    try:
        # A dead process stays a zombie until its parent asks; the state follows the name in brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
