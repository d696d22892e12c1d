"""Waits for other ranks, in functions whose frames show that a rank waits, and does not hang by itself.

A collective may return before it has run: an asynchronous one always, and on an accelerator every one, since it is
queued on a stream. The rank then waits where it needs the result, which is in no frame of torch.distributed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from raysharding.distributed.comm.device import is_accelerator

Function = TypeVar("Function", bound=Callable[..., Any])

_waits: set[CodeType] = set()
_POLL_S = 1e-4
"""Pause between two queries of an event: short beside a copy of a bucket. The wait is in a frame of ours, which that of
`synchronize` of torch's own event classes is not."""
_BUSY_S = 0.1


def waits_for_ranks(function: Function) -> Function:
    """Mark a function: a thread whose innermost Python frame is its frame waits for other ranks."""
    _waits.add(function.__code__)
    return function


def waits_for_others(frame: FrameType) -> bool:
    """Return True if a thread whose innermost Python frame is `frame` waits in a collective for other ranks."""
    return frame.f_code in _waits or f"torch{os.sep}distributed" in frame.f_code.co_filename


def is_busy(device: torch.device) -> bool:
    """Return True if an accelerator does not finish in 0.1 s what its default stream holds.

    It computes, or a collective in the stream waits for other ranks. Only for a rank that is late: beside the capture
    of a graph the synchronization may fail the capture.
    """
    if not is_accelerator(device):
        return False
    finished = threading.Event()

    def synchronize() -> None:
        with contextlib.suppress(RuntimeError):  # a device that is dead waits for nothing
            torch.accelerator.current_stream(device).synchronize()  # a new thread has the default one
        finished.set()

    # Nothing waits for the thread, which may stay there until the process ends.
    threading.Thread(target=synchronize, name="look at device", daemon=True).start()
    return not finished.wait(_BUSY_S)


@waits_for_ranks
def wait_for(work: dist.Work, timeout: timedelta = timedelta(0)) -> None:
    """Wait for an asynchronous collective.

    Args:
        work: The collective.
        timeout: Longest wait. Default: 0, by which torch means the timeout of the process group.
    """
    work.wait(timeout)


@waits_for_ranks
def wait_for_event(event: torch.Event, timeout_s: float) -> None:
    """Wait on the host for an event of a stream that has messages of other ranks before it.

    Args:
        event: The event.
        timeout_s: Longest wait, in seconds.

    Raises:
        TimeoutError: The event has not happened.
    """
    until = monotonic() + timeout_s
    while not event.query():
        if monotonic() >= until:
            raise TimeoutError(f"messages of other ranks did not come within {timeout_s:g} s")
        sleep(_POLL_S)


class HostCopy:
    """A copy of a tensor into host memory, queued on the current stream; the host does not wait for it.

    Args:
        result: As for `to_host`. On an accelerator the memory of the copy is page-locked: a copy into other memory
            would wait for all that the stream holds.
    """

    def __init__(self, result: torch.Tensor) -> None:
        self._memory = result.to("cpu", non_blocking=True)
        self._copied = torch.Event(result.device) if is_accelerator(result.device) else None
        if self._copied is not None:
            self._copied.record()

    @waits_for_ranks
    def result(self) -> torch.Tensor:
        """Return the copy once it is there, whatever was queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory


@waits_for_ranks
def to_host(result: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor in host memory that results from a collective, or that a stream computes after one.

    Args:
        result: The tensor.
        memory: Pinned memory of its shape and dtype, into which copies are faster. Default: new memory.
    """
    return result.cpu() if memory is None else memory.copy_(result)
