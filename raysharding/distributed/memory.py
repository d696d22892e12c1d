"""What memory this process holds (`RssAnon + RssShmem`, which page cache cannot inflate), and what is still free."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

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
