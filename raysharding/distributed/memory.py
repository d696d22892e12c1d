"""What memory this process holds: `RssAnon + RssShmem`, the part that page cache cannot inflate."""

from __future__ import annotations

import re

import torch

_RSS = re.compile(rb"^(?:RssAnon|RssShmem):\s*(\d+) kB", re.MULTILINE)


def host_memory_bytes() -> int:
    """Anonymous plus shared resident memory of this process in bytes; 0 where /proc does not tell."""
    try:
        # A load asks after each bucket: no decoding and no lines, which would take three times as long.
        with open("/proc/self/status", "rb", buffering=0) as status:
            return sum(int(number) << 10 for number in _RSS.findall(status.read()))
    except OSError:
        return 0


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
