"""One rank of a load over slow links, started by `wire.py` on a host of its own; rank 0 prints JSON lines."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.config import Loading, Transport
from raysharding.distributed import LoadReport, init_mesh, load_checkpoint, shard_module
from tests.bench.checkpoints import KINDS, build

PORT = 29_500
"""Of the store, on rank 0's host: a host's ports are its own."""
MESSAGE_BYTES = 16 << 20


def hide(directory: Path) -> None:
    """Lay an empty file system over the checkpoint, in this process's mount namespace alone."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(directory)], check=True)
    assert not list(directory.iterdir())


def shard_bytes(module: nn.Module) -> int:
    """Bytes of this rank's shards."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(tensor.numel() * tensor.itemsize for tensor in locals_)


def send_bytes(sizes: list[int]) -> None:
    """The floor: rank 0 sends every other rank its bytes, from one buffer, two messages in flight to each."""
    rank = dist.get_rank()
    buffers = [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
    pending: list[dist.Work | None] = []
    peers = range(1, len(sizes)) if rank == 0 else [rank]
    num_messages = {peer: -(-sizes[peer] // MESSAGE_BYTES) for peer in peers}
    for index in range(max(num_messages.values())):
        for peer in (peer for peer in peers if index < num_messages[peer]):
            part = buffers[index % 2][: sizes[peer] - index * MESSAGE_BYTES]
            pending.append(dist.isend(part, peer) if rank == 0 else dist.irecv(part, 0))
        while len(pending) > 2 * len(peers):
            _wait(pending.pop(0))
    for work in pending:
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def timed(step: Callable[[], LoadReport | None]) -> dict[str, float]:
    """Seconds from a barrier to the barrier that the last rank reaches, and those of the stream."""
    dist.barrier()  # nobody sends while another rank still prepares
    start_s = time.monotonic()
    done = step()
    dist.barrier()  # a send is over when its bytes are there, not when the kernel has taken them
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "stream_s": seconds if done is None else done.stream_s}


def report(record: dict[str, Any]) -> None:
    """Rank 0 tells the driver, and waits until it has read the link's counters; the others wait in their barrier."""
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)
        sys.stdin.readline()


def main() -> None:
    """Run the rank that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--floor", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    method = f"tcp://{args.address}:{PORT}"
    dist.init_process_group(
        "gloo", init_method=method, rank=args.rank, world_size=args.world_size, timeout=timedelta(seconds=120)
    )
    mesh = init_mesh("cpu")
    modules = [shard_module(build(args.kind, args.checkpoint), mesh) for _ in range(args.rounds)]
    if args.rank > 0:
        hide(args.checkpoint)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(args.world_size)]
    dist.all_gather(sizes, torch.tensor([shard_bytes(modules[0])]))  # every pair of ranks is connected after it
    payload_bytes = sum(int(size) for size in sizes[1:])
    loading = Loading(transport=cast(Transport, args.transport), dtype=KINDS[args.kind].dtype)
    steps: dict[str, Callable[[], LoadReport | None]] = {
        args.transport: lambda: load_checkpoint(modules.pop(), str(args.checkpoint), loading=loading),
        args.floor: lambda: send_bytes([int(size) for size in sizes]),
    }
    for index in range(args.rounds):
        for arm, step in steps.items():
            report({"arm": arm})
            times = timed(step)
            report({"round": index, "arm": arm, "payload_bytes": payload_bytes, **times})
    dist.barrier()  # a rank that is done first must not close sockets that the others use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
