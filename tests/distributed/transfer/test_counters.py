"""Counters in shared memory: what one process posts wakes another one; a process that is gone or silent is an error."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from raysharding.distributed.transfer.shared_memory import WORD_BYTES, Counters, has_futex

pytestmark = pytest.mark.skipif(not has_futex(), reason="futex(2) is known here on Linux x86_64 and aarch64 only")


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


def test_a_counter_that_is_far_enough_needs_no_wait(counters: Counters) -> None:
    counters.post(1, 7)
    counters.wait(1, 7, 0.0, os.getpid())
    counters.wait(1, 3, 0.0, os.getpid())


def test_a_silent_process_is_an_error_in_time(counters: Counters, sleeper: int) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* said nothing for 1 s"):
        counters.wait(0, 1, 1.0, sleeper)
    assert time.monotonic() - started < 5


def test_a_process_that_dies_is_an_error_soon(counters: Counters, sleeper: int) -> None:
    threading.Timer(0.3, os.kill, (sleeper, signal.SIGKILL)).start()  # a zombie until the fixture asks
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {sleeper} .* is gone"):
        counters.wait(0, 1, 60.0, sleeper)
    assert time.monotonic() - started < 10
