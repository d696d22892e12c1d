"""One rank of one measured load, in a process of its own. Started by `loading.py`; prints one line of JSON.

The clock runs from the barrier after the module is sharded on meta to the barrier after the load.
"""

from __future__ import annotations

import argparse
import json
import mmap
import threading
import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

MIB = 1 << 20


class MemorySampler:
    """Highest RssAnon + RssShmem of this process while the context is open, looked at every 20 ms."""

    def __init__(self) -> None:
        self.start_bytes = self.peak_bytes = _status_bytes("RssAnon", "RssShmem")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM restarts from here
        self.start_bytes = self.peak_bytes = _status_bytes("RssAnon", "RssShmem")
        self.start_rss_bytes = _status_bytes("VmRSS")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, _status_bytes("RssAnon", "RssShmem"))
        self.high_water_bytes = _status_bytes("VmHWM") - self.start_rss_bytes

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, _status_bytes("RssAnon", "RssShmem"))


def _status_bytes(*fields: str) -> int:
    wanted = tuple(f"{field}:" for field in fields)
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


def sharded_on_meta(directory: Path) -> nn.Module:
    """The same module for every arm: parameters on meta, an FSDP group per decoder layer and the root."""
    from raysharding.checkpoint import open_checkpoint
    from raysharding.distributed import init_mesh, shard_module
    from raysharding.models import build_module

    module = build_module(None, open_checkpoint(directory), None)
    return shard_module(module, init_mesh("cpu"))


def load(arm: str, module: nn.Module, directory: Path, bucket_mib: int) -> None:
    """Load by `accelerate`, `torch`, or one of our transports."""
    from tests.bench import peers

    if arm == "accelerate":
        peers.load_with_accelerate(module, directory)
    elif arm == "torch":
        peers.load_with_torch(module, directory)
    else:
        from raysharding.config import Loading, Transport
        from raysharding.distributed import load_checkpoint

        transport = cast(Transport, arm)
        load_checkpoint(module, str(directory), loading=Loading(transport=transport, bucket_bytes=bucket_mib * MIB))


def shards(module: nn.Module) -> list[torch.Tensor]:
    """Local parts of all parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]


def digest(tensors: list[torch.Tensor]) -> int:
    """A number that depends on every byte and its position; the driver compares it between the arms."""
    total = 0
    positions = torch.arange(1, (1 << 20) + 1)
    for tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int16).reshape(-1)
        for part in words.split(positions.numel()):
            total = 31 * total + int((part * positions[: part.numel()]).sum())
    return total & ((1 << 64) - 1)


def main() -> None:
    """Run the rank that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--bucket-mib", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(args.store, args.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world_size)
    module = sharded_on_meta(args.checkpoint)
    _import_arm(args.arm)
    settle_memory(args.checkpoint, args.rank, args.world_size)
    # Nobody's clock starts before every rank is ready; the first collective also connects the pairs.
    dist.all_reduce(torch.ones(1))
    with MemorySampler() as memory:
        dist.barrier()
        start_s = time.monotonic()
        load(args.arm, module, args.checkpoint, args.bucket_mib)
        # The load is over when the last rank has its shards.
        dist.barrier()
        end_s = time.monotonic()
    local = shards(module)
    shard_bytes = sum(tensor.numel() * tensor.element_size() for tensor in local)
    record = {
        "rank": args.rank,
        "start_s": start_s,
        "end_s": end_s,
        "shard_bytes": shard_bytes,
        "extra_bytes": memory.peak_bytes - memory.start_bytes - shard_bytes,
        "high_water_bytes": memory.high_water_bytes,
        "digest": digest(local),
    }
    print(json.dumps(record), flush=True)
    dist.destroy_process_group()


def settle_memory(directory: Path, rank: int, world_size: int) -> None:
    """Bring the machine's memory into one state before the clock starts: files in the page cache, free pages backed.

    Kernels that reclaim ahead of need drop a file's pages within seconds, and a hypervisor takes free pages from its
    guests; whichever arm comes next would pay for both. The process itself stays fresh: it still faults in every page
    that the arm allocates.
    """
    files = sorted(directory.glob("*.safetensors"))
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    num_bytes = min(sum(file.stat().st_size for file in files), available // 2 // world_size)
    mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    dist.barrier()  # reading needs the memory that the others hold until here
    if rank == 0:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(16 * MIB):
                    pass


def _import_arm(arm: str) -> None:
    """Imports are not part of a load."""
    if arm == "accelerate":
        import accelerate.utils.fsdp_utils  # noqa: F401
    else:
        import torch.distributed.checkpoint.state_dict  # noqa: F401


if __name__ == "__main__":
    main()
