"""A thread that has the kernel back fresh host memory with pages before the bytes arrive.

The first touch of a page costs more than the copy into it: on two cores, half of the time of a load into fresh memory
went there. It needs nothing that a load waits for, so it runs while rank 0 still plans and while messages travel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable
from types import TracebackType

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_NICE = 19
"""Lowest priority of the thread; Linux keeps one for each."""
_STEP_BYTES = 1 << 20
"""So much between two looks at whether to stop: little, since the thread holds the process's memory map as long."""


class Prefault:
    """Backs host tensors in turn, in a thread, while the context is open. What they hold does not change.

    Args:
        tensors: Contiguous; those on devices are left out. Memory is what they would take anyway, earlier.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # The tensors are kept: their memory must not be given back under the thread.
        self._tensors = [item for item in tensors if item.device.type == "cpu" and item.nbytes >= _STEP_BYTES]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raysharding-prefault", daemon=True)

    def __enter__(self) -> Prefault:
        if sys.platform == "linux" and self._tensors:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()  # ends after a step, which takes milliseconds

    def _run(self) -> None:
        # Idle time only: the cores are rank 0's first, which plans.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        madvise = ctypes.CDLL(None).madvise
        for tensor in self._tensors:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            for start in range(first, last, _STEP_BYTES):
                length = min(_STEP_BYTES, last - start)
                # An older kernel refuses: then pages come one by one, at the first touch.
                if self._stop.is_set() or madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
                ):
                    return
