"""What one rank of a pair does where many pairs meet at once. Imports little: forty processes do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from raysharding.distributed.comm.rendezvous import join_process_group, leave_process_group, serve_store

HOST = "127.0.0.1"


def join_and_sum(rank: int, number: int, addresses: Any, answers: Any, all_met: Any) -> None:
    """One rank of one of many groups: meet the other rank, add up, and say what came of it."""
    server = None
    if rank == 0:
        server, address = serve_store(HOST, timeout_s=60.0)
        addresses.put(address)
    else:
        address = addresses.get(timeout=60)
    options: dict[str, Any] = {"rank": rank, "world_size": 2, "device": torch.device("cpu"), "node_ip": HOST}
    join_process_group(address, **options, rendezvous_s=60.0, timeout_s=60.0, server=server)
    value = torch.tensor([float(number)])
    dist.all_reduce(value)  # both ranks of the pair are here, or join_process_group has raised
    answers.put((number, rank, value.item(), address.port))
    all_met.wait(60)  # a port that is free again may be another group's
    leave_process_group()
