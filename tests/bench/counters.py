"""Costs of a load besides time, as the kernel and torch count them in one rank's process.

Also puts the machine's memory into the same state before each timed load.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class Counters:
    """Kernel counters at one moment; the cost of a load is the difference of two."""

    read_bytes: int
    """`rchar` of /proc/self/io: bytes that read calls returned, from page cache or disk, on all threads. Excludes bytes
    read through a memory map (by page faults) and bytes that gloo receives."""
    fault_bytes: int
    """Bytes of memory touched for the first time (minor page faults, 4 KiB each; a huge page counts as one)."""
    loopback_bytes: int
    """Bytes that the loopback interface of this network namespace sent, TCP headers and acknowledgements included."""

    @classmethod
    def now(cls) -> Counters:
        """Read the counters; takes some 50 µs."""
        lines = Path("/proc/self/io").read_text().splitlines()
        read_bytes = next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return cls(read_bytes, faults * resource.getpagesize(), _loopback_bytes())

    def since(self, start: Counters) -> Counters:
        """Return the difference to `start`."""
        return Counters(
            self.read_bytes - start.read_bytes,
            self.fault_bytes - start.fault_bytes,
            self.loopback_bytes - start.loopback_bytes,
        )


def _loopback_bytes() -> int:
    # The ninth number is the bytes sent; `thread-self`, because a network namespace belongs to a thread.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


def count_operations(run: Callable[[], object]) -> dict[str, int]:
    """Run a function under torch's profiler, and count the operations of the process group's backend.

    The backends record each operation under their own name, for every function that starts it and on every thread. The
    profiler slows a load down, so a profiled load is never timed.

    Args:
        run: The function.

    Returns:
        Backend operation (`broadcast`, `scatter`, `send` …) → number on this rank.
    """
    from torch._C._profiler import _ExperimentalConfig  # not public yet; without it other threads are not profiled
    from torch.autograd.profiler import profile

    with profile(use_kineto=True, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        run()
    assert profiler.kineto_results is not None, "a stopped profiler has results"
    names = Counter(event.name() for event in profiler.kineto_results.events())
    return {name.partition(":")[2]: count for name, count in names.items() if name.startswith(("gloo:", "nccl:"))}


_READ_BYTES = 16 << 20


def fill_page_cache(files: Sequence[Path]) -> None:
    """Fill the page cache with the files: rank 0 reads all of them. Collective: the other ranks wait for rank 0.

    Kernels that reclaim memory early drop a file's pages within seconds.
    """
    if dist.get_rank() == 0:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(_READ_BYTES):
                    pass
    dist.barrier()  # no rank may start its clock while rank 0 still reads
