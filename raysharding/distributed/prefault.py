"""A thread that has the kernel back fresh host memory with pages before the bytes arrive.

The first touch of a page costs more than the copy into it: on two cores, half of the time of a load into fresh memory
went there. It needs nothing that a load waits for, so it runs while rank 0 still plans and while messages travel.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable
from types import TracebackType

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_NICE = 5
"""Priority of the thread, a little below normal; Linux keeps one for each thread."""
_STEP_BYTES = 1 << 20
"""So much between two looks at whether to stop: little, since the thread holds the process's memory map as long."""


class Prefault:
    """Backs host tensors in turn, in a thread, while the context is open. What they hold does not change.

    Args:
        tensors: Those on devices, small ones, and any that is not contiguous are left out. They take the memory that
            they would take anyway, earlier.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # The tensors are kept: their memory must not be given back under the thread.
        self._tensors = [item for item in tensors if _is_large_host_memory(item)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raysharding-prefault", daemon=True)

    def __enter__(self) -> Prefault:
        if sys.platform == "linux" and self._tensors:
            with contextlib.suppress(RuntimeError):  # no thread to be had: pages come at the first touch
                self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()  # ends after a step

    def _run(self) -> None:
        # The cores are first of all rank 0's, which plans. Not lower still: while it is kept from running the thread
        # holds the memory map, for which every allocation of this process waits.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        libc = ctypes.CDLL(None)
        for tensor in self._tensors:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            # Memory that was used before has its pages; to populate it again would cost a tenth of the first time.
            if _is_backed(libc, first, last - first):
                continue
            for start in range(first, last, _STEP_BYTES):
                length = min(_STEP_BYTES, last - start)
                # An older kernel refuses: then pages come one by one, at the first touch.
                if self._stop.is_set() or libc.madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
                ):
                    return


def _is_backed(libc: ctypes.CDLL, start: int, num_bytes: int) -> bool:
    """Whether every page of a range is in memory."""
    present = ctypes.create_string_buffer(num_bytes // mmap.PAGESIZE)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), present):
        return False
    return 0 not in present.raw


def _is_large_host_memory(tensor: torch.Tensor) -> bool:
    # Elsewhere `nbytes` does not say where the memory ends.
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes >= _STEP_BYTES
