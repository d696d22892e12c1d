"""What listens on a rank once all ranks have met: no stranger's connection costs it anything any more."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from tests.spawn import device_type, run_ranks


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens on one address: not Ray, which listens on all."""
    found = psutil.Process(pid).net_connections("tcp")
    ends = {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
    return {end for end in ends if end[0] not in ("::", "0.0.0.0")}


def gets_in(end: tuple[str, int]) -> bool:
    try:
        socket.create_connection(end, 0.5).close()
    except TimeoutError:
        return False
    return True


def meet() -> tuple[bool, int, list[tuple[str, int]]]:
    """On every rank: a mesh of two axes; what it sums up, where that made the rank listen, and who gets in there."""
    before = listening(os.getpid())
    mesh = init_mesh(device_type(), Sharding(replicate_size=2))
    new = listening(os.getpid()) - before
    dist.barrier()
    open_to_all = [end for end in new if gets_in(end)]
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    return total.item() == 2.0, len(new), open_to_all


@pytest.mark.timeout(60)
def test_a_mesh_lets_nobody_in_when_its_ranks_have_met() -> None:
    for is_right, num_listeners, open_to_all in run_ranks(2, meet):
        assert is_right
        assert num_listeners
        assert not open_to_all
