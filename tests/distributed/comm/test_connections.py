"""What listens on a rank once all ranks have met: no stranger's connection costs it anything any more."""

from __future__ import annotations

import os
import socket

import psutil
import torch
import torch.distributed as dist

from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from tests.distributed.checks import on_ranks
from tests.spawn import device_type


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


@on_ranks(4)
def test_a_mesh_lets_nobody_in_when_its_ranks_have_met() -> None:
    before = listening(os.getpid())
    mesh = init_mesh(device_type(), Sharding(replicate_size=2))
    new = listening(os.getpid()) - before
    dist.barrier()
    assert new
    assert not [end for end in new if gets_in(end)]
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    assert total.item() == 2.0
