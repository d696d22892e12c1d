"""Stack dumps of a rank that does not answer, taken by another process of the same machine.

Note [Stack dumps]: a rank that is stopped by a signal, or in which a thread holds the GIL, runs no other Python code.
The kernel still reports the state of its process, and Python's `faulthandler` prints stacks from a C signal handler
without the GIL. `faulthandler` prints into a memory file of the rank, which other processes read through /proc; nothing
is written to disk.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import dataclass

_SIGNAL = signal.SIGRTMIN + 7  # unused: Ray, torch and Python do not use the real-time signals
_MEMORY_NAME = "raysharding-stacks"
_PRINT_S = 0.4
_POLL_S = 0.01
_MAX_CHARS = 20_000
_STATES = {
    "T": "its process is stopped by a signal (SIGSTOP, Ctrl-Z)",
    "t": "its process is held by a debugger",
    "D": "its process waits inside the kernel, for example for a disk or a network file system",
    "Z": "its process has ended",
}


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A rank's state, as another process sees it."""

    state: str
    """State of the process according to the kernel, as a clause of a sentence."""
    stacks: str
    """Python stacks of its threads, innermost frame first; empty if the process could not print them."""


def enable_stack_dumps() -> int:
    """Make this process print its stacks on a signal, and return the descriptor that the stacks are printed to."""
    descriptor = os.memfd_create(_MEMORY_NAME)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def dump_stacks(pid: int, descriptor: int) -> ProcessSnapshot | None:
    """Make a process of this machine print its stacks; takes half a second at most.

    Args:
        pid: Id of the process.
        descriptor: The value that `enable_stack_dumps` returned in the process.

    Returns:
        The snapshot; `None` if the process is gone, in another container, or another user's.
    """
    try:
        return _dump_stacks(pid, descriptor)
    except OSError:
        return None


def _dump_stacks(pid: int, descriptor: int) -> ProcessSnapshot:
    state = _state(pid)
    if state in _STATES:
        return ProcessSnapshot(_STATES[state], "")
    printed = f"/proc/{pid}/fd/{descriptor}"
    if _MEMORY_NAME not in os.readlink(printed):
        # The signal ends a process that has no handler for it, such as a new process that was given the same id.
        raise ProcessLookupError(f"process {pid} is not a rank")
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
