"""What memory this process holds (`RssAnon + RssShmem`, which page cache cannot inflate), and what is still free.

Has the kernel back fresh host memory with pages before the bytes arrive, many in one call.

The first touch of a page costs more than the copy into it: on two cores, half of the time of a load into fresh memory
went there. Asked for together, before a read, pages take less than fault by fault: 440 MB in 0.23 s, read included,
not 0.29. So whoever is about to write to memory that has none asks first (`back`). They need nothing that a load waits
for: while rank 0 still plans and while messages travel, a thread is ahead (`Prefault`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import resource
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_NICE = 5
"""Priority of the thread, a little below normal; Linux keeps one for each thread."""
_STEP_BYTES = 1 << 20
"""So much between two looks at whether to stop: little, since the thread holds the process's memory map as long. Of
less than this the faults are left to come."""
_BACK_BYTES = 4 << 20
"""As much at once where a writer waits for it."""
_NUM_LOOKS = 8
"""`is_fresh` looks at the first page of so many tensors, and of less than twice as many."""


def is_fresh(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether host memory was never touched: looked at in a few places, since most loads know one of two states."""
    ranges = [_page_range(item) for item in tensors if _is_large_host_memory(item)]
    step = max(1, len(ranges) // _NUM_LOOKS)
    return any(not _is_backed(first) for first, _ in ranges[::step])


def back(tensor: torch.Tensor) -> None:
    """Have the kernel back a tensor's memory where it has not yet; what it holds does not change."""
    if _is_large_host_memory(tensor):
        first, last = _page_range(tensor)
        for start in range(first, last, _BACK_BYTES):
            if not _back(start, min(_BACK_BYTES, last - start)):
                return


class Prefault:
    """Backs fresh host tensors in turn, in a thread, while the context is open. What they hold does not change.

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
        if self._tensors:
            with contextlib.suppress(RuntimeError):  # no thread to be had: pages come when they are written to
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
        with contextlib.suppress(OSError):  # a process that is nicer already may not become less so
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        for tensor in self._tensors:
            first, last = _page_range(tensor)
            for start in range(first, last, _STEP_BYTES):
                if self._stop.is_set():
                    return
                if not _back(start, min(_STEP_BYTES, last - start)):
                    return


def _back(start: int, num_bytes: int) -> bool:
    """Whether the kernel could: an older one refuses, and then pages come one by one, at the first touch.

    What begins with a page that is there is left as it is: to populate it again would cost a tenth of the first time.
    """
    return _is_backed(start) or not _libc().madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )


def _is_backed(start: int) -> bool:
    """Whether the page at `start` is in memory."""
    present = ctypes.c_ubyte()
    _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(present))
    return bool(present.value & 1)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _page_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of the pages that lie in a tensor's memory."""
    start = tensor.data_ptr()
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _is_large_host_memory(tensor: torch.Tensor) -> bool:
    # Elsewhere `nbytes` does not say where the memory ends.
    is_host = sys.platform == "linux" and tensor.device.type == "cpu"
    return is_host and tensor.nbytes >= _STEP_BYTES and tensor.is_contiguous()


RANK_BYTES = 350 << 20
"""Memory of a rank before it loads: Python, torch and transformers. About what was seen; builds differ."""
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Directory, limit, use, and the pages of the use that the kernel gives back: of cgroups v2, and of v1."""

_RSS = re.compile(rb"^(?:RssAnon|RssShmem):\s*(\d+) kB", re.MULTILINE)


def host_memory_bytes() -> int:
    """Anonymous plus shared resident memory of this process in bytes; 0 where /proc does not tell."""
    try:
        # A load asks after each bucket: no decoding and no lines, which would take three times as long.
        with open("/proc/self/status", "rb", buffering=0) as status:
            return sum(int(number) << 10 for number in _RSS.findall(status.read()))
    except OSError:
        return 0


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, mapped files included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def available_bytes() -> int:
    """Host memory that this process can still get: the machine's `MemAvailable`, or less where a container ends it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_left_in_container()])


def _left_in_container() -> list[int]:
    """What the container's limit leaves; nothing where there is no limit."""
    for directory, limit, used, inactive in _CGROUPS:
        try:
            most = Path(directory, limit).read_text().strip()
            held = int(Path(directory, used).read_text())
            rows = dict(line.split() for line in Path(directory, "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # v2 writes "max" where there is no limit, v1 a number near 2**63.
        return [max(int(most) - held + int(rows.get(inactive, 0)), 0)] if most.isdecimal() else []
    return []


class MemoryPeak:
    """The largest memory seen between `start` and the last `sample`, host and device apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_start = self._host_peak = host_memory_bytes()
        self._device_start = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._device_start = torch.cuda.memory_allocated(device)

    def sample(self) -> None:
        """Look once; costs about 30 µs."""
        self._host_peak = max(self._host_peak, host_memory_bytes())

    @property
    def host_bytes(self) -> int:
        """Highest host memory seen, above the start."""
        return self._host_peak - self._host_start

    @property
    def device_bytes(self) -> int:
        """Highest device memory that torch's allocator held, above the start; 0 on the CPU."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self._device) - self._device_start
