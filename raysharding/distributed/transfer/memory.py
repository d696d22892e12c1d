"""Memory of this process (`RssAnon + RssShmem`, which page cache does not inflate), free memory, and page faults.

The first touch of a page costs more than the copy into it: on two cores, page faults took half of the time of a load
into fresh memory. Many pages in one call take less than single faults: 440 MB in 0.23 s instead of 0.29, including the
read. Code that is about to write to memory that may be fresh therefore calls `back`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import resource
from pathlib import Path

import torch

from raysharding.distributed.comm import device_module, is_accelerator

_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_BACK_BYTES = 4 << 20
"""Bytes per call."""
_SMALL_BYTES = 1 << 20
"""Smaller tensors are left to page faults."""


def back(tensor: torch.Tensor) -> None:
    """Back a tensor's host memory by pages, unless it is; its contents do not change.

    A range whose first page is present is skipped: populating it again takes a tenth of the first time.
    """
    # `nbytes` gives the end of the memory of a contiguous tensor alone.
    if tensor.device.type != "cpu" or tensor.nbytes < _SMALL_BYTES or not tensor.is_contiguous():
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    present = ctypes.c_ubyte()
    for start in range(first, last, _BACK_BYTES):
        address = ctypes.c_void_p(start)
        _libc().mincore(address, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(present))
        num_bytes = ctypes.c_size_t(min(_BACK_BYTES, last - start))
        if not present.value & 1 and _libc().madvise(address, num_bytes, _MADV_POPULATE_WRITE):
            return  # an older kernel, where pages are faulted in one by one


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


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
