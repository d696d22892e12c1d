"""Memory of this process (`RssAnon + RssShmem`, which page cache does not inflate), free memory, and prefaulting.

The first touch of a page costs more than the copy into it: on two cores, page faults took half of the time of a load
into fresh memory. Many pages in one call take less than single faults: 440 MB in 0.23 s instead of 0.29, including the
read. Code that is about to write to fresh memory therefore calls `back`, and a thread (`prefault`) does so ahead, while
rank 0 plans and messages are in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from raysharding.distributed.comm import device_module, is_accelerator

_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_NICE = 5
"""Nice value of the thread, a little below normal priority; per thread on Linux."""
_STEP_BYTES = 1 << 20
"""Bytes between two checks for the end: few, because the thread holds the lock of the memory map meanwhile. Smaller
tensors are left to page faults."""
_BACK_BYTES = 4 << 20
"""Bytes per call if a writer waits."""


def back(tensor: torch.Tensor) -> None:
    """Back a tensor's memory by pages, unless it is; its contents do not change."""
    if _is_large_host_memory(tensor):
        first, last = _page_range(tensor)
        for start in range(first, last, _BACK_BYTES):
            if not _back(start, min(_BACK_BYTES, last - start)):
                return


_NUM_LOOKS = 8
"""`is_fresh` checks the first page of at least so many tensors, and of less than twice as many."""


def is_fresh(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if host memory was never touched; checks a sample, because most loads have all or none touched."""
    ranges = [_page_range(item) for item in tensors if _is_large_host_memory(item)]
    step = max(1, len(ranges) // _NUM_LOOKS)
    return any(not _is_backed(first) for first, _ in ranges[::step])


@contextlib.contextmanager
def prefault(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Back fresh host tensors by pages, in a thread, while the context is open. Contents do not change.

    Args:
        tensors: Tensors on devices, small and non-contiguous tensors are left out. The memory is taken earlier than
            without this, but not more.
    """
    # References: the memory must not be freed while the thread runs.
    large = [item for item in tensors if _is_large_host_memory(item)]
    stop = threading.Event()
    thread = threading.Thread(target=_prefault, args=(large, stop), name="raysharding-prefault", daemon=True)
    if large:
        with contextlib.suppress(RuntimeError):  # no thread can start: pages are faulted in by writes
            thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()  # ends after one step


def _prefault(tensors: Sequence[torch.Tensor], stop: threading.Event) -> None:
    # Rank 0, which plans, has priority. Not lower: a thread that cannot run may hold the memory map's lock, which
    # every allocation of this process needs.
    with contextlib.suppress(OSError):  # a process with a higher nice value may not lower it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    for tensor in tensors:
        first, last = _page_range(tensor)
        for start in range(first, last, _STEP_BYTES):
            if stop.is_set() or not _back(start, min(_STEP_BYTES, last - start)):
                return


def _back(start: int, num_bytes: int) -> bool:
    """Back a range by pages; return False on an older kernel, where pages are faulted in one by one.

    A range whose first page is present is skipped: populating it again takes a tenth of the first time.
    """
    return _is_backed(start) or not _libc().madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )


def _is_backed(start: int) -> bool:
    """Return True if the page at `start` is in memory."""
    present = ctypes.c_ubyte()
    _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(present))
    return bool(present.value & 1)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _page_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return first and last address of the pages within a tensor's memory."""
    start = tensor.data_ptr()
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _is_large_host_memory(tensor: torch.Tensor) -> bool:
    # In other cases `nbytes` does not give the end of the memory.
    return tensor.device.type == "cpu" and tensor.nbytes >= _STEP_BYTES and tensor.is_contiguous()


RANK_BYTES = 350 << 20
"""Memory of a rank before a load, in bytes: Python, torch and transformers. A measured value; builds differ."""
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Directory, limit, usage, and reclaimable part of the usage, for cgroups v2 and v1."""

_RSS = re.compile(rb"^(?:RssAnon|RssShmem):\s*(\d+) kB", re.MULTILINE)


def host_memory_bytes() -> int:
    """Return anonymous plus shared resident memory of this process, in bytes; 0 without /proc."""
    try:
        # Called after each bucket: decoding and lines would take three times as long.
        with open("/proc/self/status", "rb", buffering=0) as status:
            return sum(int(number) << 10 for number in _RSS.findall(status.read()))
    except OSError:
        return 0


def resident_bytes() -> int:
    """Return the resident memory of this process, including mapped files, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def available_bytes() -> int:
    """Return the host memory that this process can still get: `MemAvailable`, or less by a container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_left_in_container()])


def _left_in_container() -> list[int]:
    """Return the rest of each container limit; empty without limits."""
    for directory, limit, used, inactive in _CGROUPS:
        try:
            most = Path(directory, limit).read_text().strip()
            held = int(Path(directory, used).read_text())
            rows = dict(line.split() for line in Path(directory, "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # Without a limit, v2 has "max", and v1 a number near 2**63.
        return [max(int(most) - held + int(rows.get(inactive, 0)), 0)] if most.isdecimal() else []
    return []


class MemoryPeak:
    """Peak memory of host and device over all calls of `sample`.

    The peak of torch's allocator is the user's: it is not reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_start = self._host_peak = host_memory_bytes()
        self._device_start = self._device_peak = self._allocated()

    def sample(self) -> None:
        """Take one sample; costs about 30 µs, and on accelerators what torch takes for its statistics."""
        self._host_peak = max(self._host_peak, host_memory_bytes())
        self._device_peak = max(self._device_peak, self._allocated())

    @property
    def host_bytes(self) -> int:
        """Peak host memory above the start, in bytes."""
        return self._host_peak - self._host_start

    @property
    def device_bytes(self) -> int:
        """Peak device memory of torch's allocator above the start, in bytes; 0 on the CPU."""
        return self._device_peak - self._device_start

    def _allocated(self) -> int:
        if not is_accelerator(self._device):
            return 0
        return int(device_module(self._device).memory_allocated(self._device))
