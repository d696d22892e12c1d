"""What connections of strangers cost a gloo rank, in plain torch.distributed: descriptors and memory, and for how long.

Usage: python -m tests.bench.strangers [NUMBER]
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

HOST = "127.0.0.1"
SETTLE_S = 2.0


def kernel_mib() -> int:
    """Memory of all TCP buffers of this machine."""
    with open("/proc/net/sockstat") as table:
        [line] = [line for line in table if line.startswith("TCP:")]
    return int(line.split()[-1]) * resource.getpagesize() >> 20


def say(when: str) -> None:
    """Print what this process holds."""
    process = psutil.Process()
    own_mib = process.memory_info().rss / (1 << 20)
    print(
        f"{when:34} {process.num_fds():6} descriptors  {own_mib:6.0f} MiB  {kernel_mib():6} MiB in the kernel",
        flush=True,
    )


def listening() -> set[tuple[str, int]]:
    """Where this process listens on one address."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == "LISTEN" and one.laddr.ip == HOST}


def rank(number: int, port: int, addresses: Any, are_here: Any, are_gone: Any) -> None:
    """One of two ranks; the first tells what it holds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(HOST, port, 2, number == 0, timeout=timedelta(seconds=60))
    before = listening()
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=300))
    if number == 0:
        say("ranks have met")
        addresses.put((listening() - before).pop())
        for event, when in ((are_here, "strangers are here"), (are_gone, "strangers have gone")):
            event.wait(240)
            time.sleep(SETTLE_S)
            say(when)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    if number == 0:
        say(f"all_reduce gave {total.item():g}; destroyed")


def main(num_strangers: int, *, are_chatty: bool) -> None:
    """Let strangers come and go."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    context = multiprocessing.get_context("spawn")
    addresses, are_here, are_gone = context.Queue(), context.Event(), context.Event()
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    arguments = port, addresses, are_here, are_gone
    ranks = [context.Process(target=rank, args=(number, *arguments)) for number in range(2)]
    for one in ranks:
        one.start()
    address = addresses.get(timeout=120)
    strangers = [socket.create_connection(address, 10) for _ in range(num_strangers)]
    for stranger in strangers if are_chatty else ():
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger.send(bytes(1 << 20))
    are_here.set()
    time.sleep(2 * SETTLE_S)
    for stranger in strangers:
        stranger.close()
    are_gone.set()
    for one in ranks:
        one.join(120)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for chatty in (False, True):
        print(f"{count} strangers that {'send what they can' if chatty else 'say nothing'}:", flush=True)
        main(count, are_chatty=chatty)
