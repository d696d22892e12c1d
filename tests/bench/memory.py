"""Memory of one process during a load: its peak, and free pages before it starts."""

from __future__ import annotations

import mmap
import threading

import torch.distributed as dist

from raysharding.distributed.transfer.memory import available_bytes, host_memory_bytes


class MemorySampler:
    """Peak of RssAnon + RssShmem of this process while the context is open, sampled every 20 ms."""

    def __init__(self) -> None:
        self._start_bytes = self._peak_bytes = 0
        self.extra_bytes = 0
        """Peak above the value at the start; set on exit."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._start_bytes = self._peak_bytes = host_memory_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra_bytes = max(self._peak_bytes, host_memory_bytes()) - self._start_bytes

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, host_memory_bytes())


def back_free_pages(num_bytes: int) -> None:
    """Touch as much memory as a load needs, and free it. Collective: no load starts while a rank still holds memory.

    A hypervisor takes free pages from its guests, and the first arm that needs these pages would pay for their return.
    The process itself stays fresh: it still faults in every page that the arm allocates.

    Args:
        num_bytes: Bytes of the load; capped at each rank's share of half the available memory.
    """
    num_bytes = min(num_bytes, available_bytes() // 2 // dist.get_world_size())
    if num_bytes:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    dist.barrier()  # the load needs the memory that the other ranks hold until here
