"""What another process of the same machine can say of a rank that answers no questions.

Note [Stack dumps]: a rank that is stopped by a signal, or whose thread holds the GIL, runs none of its own Python. The
kernel still reports the state of its process, and Python's `faulthandler` prints stacks from a C signal handler without
the GIL. It prints into a memory file of the rank, which others read through /proc; nothing is written to disk.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import dataclass

_SIGNAL = signal.SIGRTMIN + 7  # nobody's: Ray, torch and Python leave the real-time signals alone
_MEMORY_NAME = "raysharding-stacks"
_PRINT_S = 0.4
_POLL_S = 0.01
_MAX_CHARS = 20_000
_STATES = {
    "T": "its process is stopped by a signal (SIGSTOP, Ctrl-Z)",
    "t": "its process is held by a debugger",
    "D": "its process waits inside the kernel, for a disk or a network file system say",
    "Z": "its process has ended",
}


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A rank, seen from outside."""

    state: str
    """What the kernel says of its process, as a clause of a sentence."""
    stacks: str
    """Python stacks of its threads, innermost frame first; empty where it could not print them."""


def enable_stack_dumps() -> int:
    """Make this process print its stacks at a signal, and return the descriptor that it prints into."""
    descriptor = os.memfd_create(_MEMORY_NAME)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def dump_stacks(pid: int, descriptor: int) -> ProcessSnapshot:
    """Have a process of this machine print its stacks; takes half a second at most.

    Args:
        pid: Its process id.
        descriptor: What its `enable_stack_dumps` returned.

    Raises:
        OSError: It is gone, or another user's.
    """
    state = _state(pid)
    if state in _STATES:
        return ProcessSnapshot(_STATES[state], "")
    printed = f"/proc/{pid}/fd/{descriptor}"
    if _MEMORY_NAME not in os.readlink(printed):
        # The signal ends a process that does not expect it, such as another one that has got the number since.
        raise ProcessLookupError(f"process {pid} is no rank")
    before = os.stat(printed).st_size
    os.kill(pid, _SIGNAL)
    size, until = before, time.monotonic() + _PRINT_S
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        size, last = os.stat(printed).st_size, size
        if before < size == last:
            break
    with open(printed, encoding="utf-8", errors="replace") as stacks:
        stacks.seek(before)
        return ProcessSnapshot("its process runs: a thread may hold the GIL", stacks.read(_MAX_CHARS))


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
