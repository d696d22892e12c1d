"""Brings the machine's memory into one state before a clock starts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from raysharding.distributed.memory import available_bytes

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
