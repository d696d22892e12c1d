"""Counters in shared memory: what one process posts wakes another one; a process that is gone or silent is an error."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator

import pytest

from raysharding.distributed.transfer.shared_memory import WORD_BYTES, Counters


@pytest.fixture
def counters() -> Counters:
    """Three counters that forked processes share."""
    return Counters(mmap.mmap(-1, mmap.PAGESIZE), mmap.PAGESIZE - 3 * WORD_BYTES, 3)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that does nothing."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_processes_take_turns(counters: Counters) -> None:
    """A counter that is far enough needs no wait."""
    pid = os.fork()
    if pid == 0:
        for turn in range(1, 1001):
            counters.wait(0, turn, 20, os.getppid())
            counters.post(2, turn)
        os._exit(0)
    for turn in range(1, 1001):
        counters.post(0, turn)
        counters.wait(2, turn, 20, pid)
    assert os.waitpid(pid, 0)[1] == 0
    counters.wait(2, 3, 0.0, pid)


def test_a_process_that_is_silent_or_gone_is_an_error_soon(counters: Counters, sleeper: int) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* said nothing for 0 s"):
        counters.wait(0, 1, 0.3, sleeper)
    os.kill(sleeper, signal.SIGKILL)  # a zombie until the fixture asks
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* is gone"):
        counters.wait(0, 1, 60.0, sleeper)
    counters.stop()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* has stopped"):
        counters.wait(0, 1, 60.0, sleeper)
    assert time.monotonic() - started < 10
