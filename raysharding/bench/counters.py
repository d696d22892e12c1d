"""What a load cost beside time, as the kernel and torch count it, in the process of one rank.

Brings the machine's memory into one state before a clock starts.
"""

from __future__ import annotations

import mmap
import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from raysharding.distributed.transfer import available_bytes, host_memory_bytes


@dataclass(frozen=True)
class Counters:
    """Kernel counters at one moment; subtract two."""

    read_bytes: int
    """`rchar` of /proc/self/io: bytes that read calls returned, page cache or disk alike, all threads. Not counted:
    what is read through a memory map (its page faults), and what gloo receives."""
    fault_bytes: int
    """Memory that was touched for the first time (minor page faults, 4 KiB each; a huge page counts as one)."""
    loopback_bytes: int
    """Bytes that the loopback interface of this network namespace sent, TCP headers and acknowledgements included."""

    @classmethod
    def now(cls) -> Counters:
        """Read them; some 50 µs."""
        lines = Path("/proc/self/io").read_text().splitlines()
        read_bytes = next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return cls(read_bytes, faults * resource.getpagesize(), _loopback_bytes())

    def since(self, start: Counters) -> Counters:
        """The difference."""
        return Counters(
            self.read_bytes - start.read_bytes,
            self.fault_bytes - start.fault_bytes,
            self.loopback_bytes - start.loopback_bytes,
        )


def _loopback_bytes() -> int:
    # The ninth figure is what was sent; `thread-self`, for a namespace belongs to a thread.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


class MemorySampler:
    """Highest RssAnon + RssShmem of this process while the context is open, looked at every 20 ms."""

    def __init__(self) -> None:
        self._start_bytes = self._peak_bytes = self._start_rss_bytes = 0
        self.extra_bytes = 0
        """Peak above the start; set at the end."""
        self.high_water_bytes = 0
        """VmHWM above VmRSS at the start, which counts mapped file pages too; set at the end."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM restarts from here
        self._start_bytes = self._peak_bytes = host_memory_bytes()
        self._start_rss_bytes = _status_bytes("VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra_bytes = max(self._peak_bytes, host_memory_bytes()) - self._start_bytes
        self.high_water_bytes = _status_bytes("VmHWM") - self._start_rss_bytes

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, host_memory_bytes())


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def count_operations(run: Callable[[], object]) -> dict[str, int]:
    """Run something under torch's profiler: backend operation (`broadcast`, `scatter`, `send` …) → number on this rank.

    The backends record each operation under their own name, whichever function started it and on whichever thread. It
    slows a load down, so the clock never runs meanwhile.
    """
    from torch._C._profiler import _ExperimentalConfig  # not public yet; without it other threads are not seen
    from torch.autograd.profiler import profile

    with profile(use_kineto=True, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        run()
    assert profiler.kineto_results is not None, "a profiler that has stopped has results"
    names = Counter(event.name() for event in profiler.kineto_results.events())
    return {name.partition(":")[2]: count for name, count in names.items() if name.startswith(("gloo:", "nccl:"))}


_READ_BYTES = 16 << 20


def back_free_pages(num_bytes: int) -> None:
    """Touch as much memory as a load will take, and give it back; collective.

    A hypervisor takes free pages from its guests, and the first arm to need them would pay. The process itself stays
    fresh: it still faults in every page that the arm allocates.
    """
    num_bytes = min(num_bytes, available_bytes() // 2 // dist.get_world_size())
    if num_bytes:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    dist.barrier()  # what comes next needs the memory that the others hold until here


def fill_page_cache(files: Sequence[Path]) -> None:
    """Have the files in the page cache: rank 0 reads them through; collective.

    Kernels that reclaim ahead of need drop a file's pages within seconds.
    """
    if dist.get_rank() == 0:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(_READ_BYTES):
                    pass
    dist.barrier()  # the others' clocks must not run while rank 0 still reads
