"""The device mesh: one axis `shard`, or `replicate` × `shard` for HSDP; and the process group of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from raysharding.config import Sharding
from raysharding.distributed.comm.abort import closed_listeners
from raysharding.distributed.comm.current_group import current_group, global_ranks, require_member
from raysharding.distributed.comm.device import check_device_type
from raysharding.distributed.comm.json_collectives import all_gather_ints, all_gather_json
from raysharding.torch_internals import no_bound_device, num_process_groups

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"
_AXES = (REPLICATE_AXIS, SHARD_AXIS)


def init_mesh(
    device_type: str,
    sharding: Sharding | None = None,
    group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> DeviceMesh:
    """Make the device mesh over all ranks of a process group; collective over them.

    Args:
        device_type: `"cpu"`, `"cuda"`, or another type for which torch has a backend of collectives.
        sharding: Its `replicate_size` is the number of replicas. Default: one.
        group: FSDP1's `process_group`: the ranks, which may be a part of all; or for HSDP this rank's (shard group,
            replicate group), which make the two axes. Default: the current group.

    Returns:
        A mesh with the axis `shard`, or the axes (`replicate`, `shard`). Consecutive ranks form a replica, so that the
        all-gathers of a replica stay on one node if the ranks are ordered by node.

    Raises:
        ValueError: On every rank, if torch has no collectives for the type, `replicate_size` does not divide the number
            of ranks, or is not that of two groups; on a rank that is not in the group, at once.
    """
    check_device_type(device_type)
    replicate_size = (sharding or Sharding()).replicate_size
    if isinstance(group, Sequence):
        return _mesh_of_two(device_type, group, replicate_size)
    group = group or current_group()
    require_member(group)
    world_size = dist.get_world_size(group)
    if world_size % replicate_size:
        raise ValueError(
            f"replicate_size={replicate_size} does not divide world_size={world_size}: give a divisor of the world size"
        )
    shape = (replicate_size, world_size // replicate_size)
    if group is None:
        if replicate_size == 1:
            return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD_AXIS,))
        with closed_listeners() if device_type == "cpu" else nullcontext():
            return init_device_mesh(device_type, shape, mesh_dim_names=_AXES)
    if replicate_size == 1:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(SHARD_AXIS,))
    ranks = torch.tensor(global_ranks(group)).view(shape)
    row, column = divmod(dist.get_rank(group), shape[1])
    groups = [_new_group(device_type, own.tolist(), group) for own in (ranks[:, column], ranks[row])]
    mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=_AXES)
    _groups[mesh] = group
    return mesh


def _mesh_of_two(device_type: str, pair: Sequence[dist.ProcessGroup], replicate_size: int) -> DeviceMesh:
    """Make the mesh of FSDP1's pair of groups; collective over both."""
    for one in pair:
        require_member(one)
    if len(pair) != 2 or None in pair or pair[0] == pair[1]:
        raise ValueError(f"group={pair!r}: give one process group, or (shard group, replicate group)")
    shard, replicate = pair
    if replicate_size not in (1, dist.get_world_size(replicate)):
        found = dist.get_world_size(replicate)
        raise ValueError(f"replicate_size={replicate_size}, but the replicate group has {found} ranks: leave it out")
    # A rank knows its own row and column; the other rows are those of its column's ranks.
    rows = all_gather_json(global_ranks(shard), replicate)
    return DeviceMesh.from_group([replicate, shard], device_type, rows, mesh_dim_names=_AXES)


def _new_group(device_type: str, ranks: list[int], *within: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of some ranks; collective over these alone.

    Args:
        device_type: Type of the mesh.
        ranks: Global ranks.
        within: Groups through which all of these ranks hear of each other, one after the other.
    """
    # torch names such a group by its ranks and the number of groups that a rank has: with other names the ranks would
    # wait for each other. A rank with fewer groups makes some that only it is in.
    most = num_process_groups()
    for one in within:
        most = max(found for (found,) in all_gather_ints([most], one))
    while num_process_groups() < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    backend = dist.get_backend_config(within[0])
    with no_bound_device(), closed_listeners() if device_type == "cpu" else nullcontext():
        group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return group


_groups = WeakIdKeyDictionary()
"""Mesh → process group of all its ranks; `None` for the default group."""


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of a mesh, `None` for the default group.

    Collective over the mesh the first time, where it has several axes and lacks ranks of the default group.

    Raises:
        ValueError: This process is not in the mesh; or, on every rank, the ranks do not ascend along each axis.
    """
    if mesh not in _groups:
        ranks = sorted(mesh.mesh.flatten().tolist())
        # torch sorts the ranks of a new group, and FSDP2 shards by numbers of the group, not places in the mesh.
        if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
            raise ValueError(f"the ranks of a mesh must ascend along each axis, not {mesh.mesh.tolist()}")
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"global rank {dist.get_rank()} is not in the mesh of ranks {ranks}: make this call on those alone"
            )
        if len(ranks) == dist.get_world_size():
            _groups[mesh] = None
        elif mesh.ndim == 1:
            _groups[mesh] = mesh.get_group()
        else:
            _groups[mesh] = _new_group(mesh.device_type, ranks, *mesh.get_all_groups())
    group: dist.ProcessGroup | None = _groups[mesh]
    return group
