"""The device mesh: one axis `shard`, or `replicate` × `shard` for HSDP."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raysharding.config import Sharding
from raysharding.distributed.comm.abort import nobody_connects_later
from raysharding.distributed.comm.device import check_device_type

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"


def init_mesh(device_type: str, sharding: Sharding | None = None) -> DeviceMesh:
    """Make the device mesh over all ranks of the default process group; collective.

    Args:
        device_type: `"cpu"`, `"cuda"`, or another type for which torch has a backend of collectives.
        sharding: Its `replicate_size` is the number of replicas. Default: one.

    Returns:
        A mesh with the axis `shard`, or the axes (`replicate`, `shard`). Consecutive ranks form a replica, so that the
        all-gathers of a replica stay on one node if the ranks are ordered by node.

    Raises:
        ValueError: On every rank, if torch has no collectives for the type, or `replicate_size` does not divide the
            world size.
    """
    check_device_type(device_type)
    replicate_size = (sharding or Sharding()).replicate_size
    world_size = dist.get_world_size()
    if world_size % replicate_size:
        raise ValueError(
            f"replicate_size={replicate_size} does not divide world_size={world_size}: give a divisor of the world size"
        )
    if replicate_size == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD_AXIS,))
    shape = (replicate_size, world_size // replicate_size)
    with nobody_connects_later() if device_type == "cpu" else nullcontext():
        return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
