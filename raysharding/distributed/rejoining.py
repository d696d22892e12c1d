"""A sharded module that outlives its process group: `rejoin` gives it the groups of a new one, shards untouched."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.config import Sharding
from raysharding.distributed.gradient_sync import fsdp_groups
from raysharding.distributed.mesh import init_mesh
from raysharding.distributed.recovery import reset
from raysharding.distributed.same_parameters import compare_before_forward


def rejoin(module: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Make a module work in the default process group, after the one that it was sharded in is gone. Collective.

    Nothing is copied, nothing is sent but what makes the groups: parameters, hooks, and the optimizers that hold the
    parameters stay what they are. Gradients are dropped.

    Args:
        module: The root module.
        mesh: The mesh that it was sharded over, by `init_mesh`; the same ranks have the same numbers now.
        sharding: The one that `mesh` was made with.

    Raises:
        RuntimeError: The new groups cannot take the old ones' place; the module must be built again.
    """
    renewed = init_mesh(mesh.device_type, sharding)
    # A mesh finds its groups by name. torch counts groups from the start in every new process group, so a mesh that is
    # made as the first one was bears its names, and every DTensor's mesh means the new groups from here on.
    if _group_names(mesh) != _group_names(renewed) or mesh.mesh.tolist() != renewed.mesh.tolist():
        raise RuntimeError(f"the new mesh {renewed} has other groups than {mesh}")
    mesh._get_root_mesh()._pg_registry.update(renewed._get_root_mesh()._pg_registry)
    for group in fsdp_groups(module):
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise RuntimeError("reshard_after_forward is a number of ranks, which have a process group of their own")
        _renew(group.mesh_info)
    # Only now: what an aborted backward left may have to be reduced before it is dropped.
    if not reset(module):
        raise RuntimeError("this torch cannot reset a module after an aborted backward")
    compare_before_forward(module)  # the first comparison may have ended on some ranks only


def _group_names(mesh: DeviceMesh) -> list[str]:
    return [group.group_name for group in mesh.get_all_groups()]


def _renew(mesh_info: Any) -> None:
    """FSDP2 keeps the groups themselves, beside the mesh."""
    if getattr(mesh_info, "reduce_scatter_process_group", None) is not None:
        raise RuntimeError("a process group of the user's own reduces the gradients")
    for axis in ("shard", "replicate"):
        if hasattr(mesh_info, f"{axis}_process_group"):
            group = mesh_info.mesh.get_group(getattr(mesh_info, f"{axis}_mesh_dim"))
            assert dist.get_rank(group) == getattr(mesh_info, f"{axis}_mesh_rank"), "the ranks have kept their places"
            setattr(mesh_info, f"{axis}_process_group", group)
