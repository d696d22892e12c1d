"""Collectives of 1, 2 and 4 ranks on the machine's devices, with torch alone: right values, seconds, bytes a second.

`python -m tests.gpu.sanity cuda|cpu|sim`; ranks share devices where there are fewer.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from tests.gpu.record import Record
from tests.spawn import device_type, run_ranks

BROADCAST_BYTES = {"cuda": 64 << 20}


def collectives() -> dict[str, str]:
    """Those that raysharding and FSDP2 use; what there is to say of them."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), device_type()
    begun = time.monotonic()
    everywhere = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(everywhere)
    assert everywhere[0].item() == everywhere[-1].item() == size * (size + 1) / 2
    joined_s = time.monotonic() - begun
    gathered = torch.empty(4 * size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank), device=device))
    assert gathered[::4].tolist() == list(range(size))
    scattered = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0 * size, device=device))
    assert scattered.tolist() == [size * (4.0 * rank + index) for index in range(4)]
    sent, received = torch.full((4,), float(rank), device=device), torch.empty(4, device=device)
    if size > 1:
        dist.broadcast(sent, 0)
        assert sent.tolist() == [0.0] * 4
        to, source = (rank + 1) % size, (rank - 1) % size
        sent.fill_(rank)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
        ):
            work.wait()
        assert received[0].item() == source
    large = torch.empty(BROADCAST_BYTES.get(device, 1 << 20), dtype=torch.uint8, device=device)
    torch.get_device_module(device).synchronize()
    begun = time.monotonic()
    for _ in range(10):
        dist.broadcast(large, 0)
    torch.get_device_module(device).synchronize()
    rate = 10 * large.nbytes / (time.monotonic() - begun) / 1e9
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "none"
    return {"NCCL": nccl, "said": f"first all-reduce {joined_s:.2f} s, broadcast {rate:.1f} GB/s"}


def check(record: Record, device: str, world_size: int) -> str:
    """Run them on so many ranks."""
    found = run_ranks(world_size, collectives, timeout_s=50, device=device)[0]
    record.note(NCCL=found["NCCL"])
    return str(found["said"])


def main(device: str) -> int:
    """Number of world sizes that failed."""
    record = Record.of_this_part()
    record.note(torch=torch.__version__)
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: set DEVICE=cpu for a rehearsal")
    for world_size in (1, 2, 4):
        record.check(f"collectives, W={world_size}", partial(check, record, device, world_size))
    return record.failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
