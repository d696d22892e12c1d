"""Layout of a module's tensors: the flat range of every tensor that a rank holds.

A `Shard(0)` shard of a row-major tensor is one contiguous range of the flattened tensor. That fact carries the whole
library: a range of elements is a range of bytes in a file, in a message and in a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raysharding.distributed.comm import current_device, get_rank, global_ranks
from raysharding.models import clean_name

_ROWS = Shard(0)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Sharding of one parameter or buffer of a module."""

    fqn: str
    """Canonical FQN: the first of `named_parameters()`; buffers by their own name."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    """dtype of the module's tensor."""
    num_shards: int
    """Number of shards along dim 0; 0 if replicated (buffers, 0-dim parameters)."""

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    def local_range(self, shard_index: int) -> tuple[int, int]:
        """Half-open range of the flattened global tensor that shard `shard_index` holds.

        FSDP2 and DTensor split dim 0 like `torch.chunk`: `ceil(rows / num_shards)` rows each, the last shards shorter
        or empty.
        """
        total = self.num_elements
        if self.num_shards == 0 or total == 0:
            return 0, total
        rows = self.shape[0]
        longest = -(-rows // self.num_shards) * (total // rows)
        return min(shard_index * longest, total), min((shard_index + 1) * longest, total)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the `local_range` of every shard; of a replicated tensor, the whole range once."""
        return [self.local_range(index) for index in range(max(self.num_shards, 1))]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a `DistModule`, or the module itself."""
    return next(module.modules())


def named_submodules(module: nn.Module, *, aliases: bool = False) -> list[tuple[str, nn.Module]]:
    """Return every submodule with its name, parents first; names end with a dot, except the root's.

    Args:
        module: The root.
        aliases: True to name a module in two places twice; a cyclic tree is then a RecursionError.
    """
    named = unwrapped(module).named_modules(remove_duplicate=not aliases)
    return [(f"{name}." if name else "", submodule) for name, submodule in named]


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return FQN → parameter or buffer, each tensor once, in module order, including non-persistent buffers."""
    submodules = named_submodules(module)
    tensors: dict[str, torch.Tensor] = {}
    for table in ("_parameters", "_buffers"):
        seen: set[int] = set()
        for prefix, submodule in submodules:
            for name, tensor in getattr(submodule, table).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[clean_name(prefix) + name] = tensor
    return tensors


def persistent_names(module: nn.Module) -> set[str]:
    """Return the FQNs of all parameters and persistent buffers, including tied aliases."""
    names: set[str] = set()
    for raw, submodule in named_submodules(module, aliases=True):
        prefix = clean_name(raw)
        names.update(prefix + name for name, tensor in submodule._parameters.items() if tensor is not None)
        skipped = submodule._non_persistent_buffers_set
        names.update(prefix + name for name in submodule._buffers if name not in skipped)
    return names


def tensor_layout(fqn: str, tensor: torch.Tensor) -> TensorLayout:
    """Return the layout of one tensor of a module.

    Raises:
        ValueError: A DTensor is neither replicated nor sharded along dim 0 on one mesh axis.
    """
    num_shards = 0
    if isinstance(tensor, DTensor):
        placements = tensor.placements
        cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) > 1 or (cut and placements[cut[0]] != _ROWS):
            raise ValueError(f"{fqn}: placements {placements} are not supported: shard along dim 0 on one mesh axis")
        num_shards = tensor.device_mesh.size(cut[0]) if cut else 0
    return TensorLayout(fqn, tuple(tensor.shape), tensor.dtype, num_shards)


def shard_index_of(tensor: torch.Tensor) -> int:
    """Return the index of this process's shard of a DTensor; 0 of a replicated tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    for axis, placement in enumerate(tensor.placements):
        if placement == _ROWS:
            return tensor.device_mesh.get_local_rank(axis)
    return 0


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or any other tensor itself; detached."""
    local = inner_tensor(tensor)
    return local.detach() if local.requires_grad else local


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor object inside a DTensor, or any other tensor itself. `to_local` makes a new object."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def num_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of the writes to a tensor, which leaves out those through `.data`."""
    if isinstance(tensor, DTensor):
        # A DTensor counts the writes to itself; its inner tensor counts the writes to the result of `to_local`.
        return tensor._version + num_writes(inner_tensor(tensor))
    # An inference tensor has no counter, and cannot be written outside inference mode.
    return 0 if tensor.is_inference() else tensor._version


def set_inner_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the tensor inside a DTensor by one of the same shape; mesh and placements stay."""
    tensor._local_tensor = local


def with_layout(local: torch.Tensor, like: DTensor, *, requires_grad: bool) -> DTensor:
    """Return a DTensor of a shard, of any dtype, with mesh, placements, shape and strides of another. Not collective.

    Made as FSDP2 makes its DTensors: `DTensor.from_local` takes ten times as long, which matters for thousands of
    parameters, and moves the shard to the device of the mesh.
    """
    spec = like._spec
    assert spec.tensor_meta is not None, "every DTensor has a shape"
    if local.dtype != like.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=requires_grad)


def message_device(module: nn.Module) -> torch.device:
    """Return the device of a module's messages: that of its mesh; the CPU for a module that is not sharded."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            return mesh_device(parameter.device_mesh)
    return torch.device("cpu")


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this process in a mesh, with its index on accelerators."""
    return current_device(mesh.device_type)


def compute_device(module: nn.Module) -> torch.device:
    """Return the device on which a module computes: that of its mesh, or of its parameters if not sharded."""
    parameters = list(module.parameters())
    if not parameters or any(isinstance(parameter, DTensor) for parameter in parameters):
        return message_device(module)
    return parameters[0].device


@dataclass(frozen=True)
class ShardMap:
    """Shards of a module's tensors, and the ranks that hold each."""

    holders: tuple[tuple[int, ...], ...]
    """shard index → ranks of the current group that hold it, first replica first."""
    rank: int
    """This process's rank in the current group."""

    @property
    def num_shards(self) -> int:
        """Number of shards: the size of the mesh's `shard` axis."""
        return len(self.holders)

    @property
    def world_size(self) -> int:
        """Number of ranks over all replicas."""
        return sum(len(ranks) for ranks in self.holders)

    @property
    def shard_index(self) -> int:
        """Index of this process's shard."""
        return next(index for index, ranks in enumerate(self.holders) if self.rank in ranks)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> ShardMap:
        """Return the map of a module's DTensors; without DTensors, every rank is a replica of one shard.

        Raises:
            ValueError: The tensors are on different meshes, or on another mesh than the current group's.
        """
        names = {holders: next(iter(part)) for holders, part in _by_holders(tensors).items() if holders is not None}
        if len(names) > 1:
            raise ValueError(
                f"parameters {sorted(names.values())} lie on different meshes: shard the module over one, "
                "or bring its state to torch.distributed.checkpoint, by state_dict_type"
            )
        ranks = {rank: index for index, rank in enumerate(global_ranks())}
        holders = next(iter(names), (tuple(ranks),))
        if sorted(rank for row in holders for rank in row) != sorted(ranks):
            raise ValueError(
                f"{next(iter(names.values()))}: its mesh holds the ranks {holders}, and the process group "
                f"{list(ranks)}: shard the module over one mesh"
            )
        return cls(tuple(tuple(ranks[rank] for rank in row) for row in holders), get_rank())


def by_mesh(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a dict into parts with equal sharding, each with one `ShardMap`; the same on every rank.

    Nested FSDP modules may have strategies of their own. Replicated tensors are in the first part.
    """
    parts = _by_holders(tensors)
    everywhere = parts.pop(None, {})
    first, *others = parts.values() or [{}]
    return [{**first, **everywhere}, *others]


def _by_holders(
    tensors: Mapping[str, torch.Tensor],
) -> dict[tuple[tuple[int, ...], ...] | None, dict[str, torch.Tensor]]:
    """Group tensors by shard index → ranks; the key `None` has replicated tensors."""
    known: dict[tuple[DeviceMesh, int], tuple[tuple[int, ...], ...]] = {}  # thousands of tensors share a mesh
    parts: dict[tuple[tuple[int, ...], ...] | None, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        holders = None
        if isinstance(tensor, DTensor) and _ROWS in tensor.placements:
            mesh, axis = tensor.device_mesh, tensor.placements.index(_ROWS)
            if (mesh, axis) not in known:
                known[mesh, axis] = _holders(mesh, axis)
            holders = known[mesh, axis]
        parts.setdefault(holders, {})[name] = tensor
    return parts


def _holders(mesh: DeviceMesh, shard_axis: int) -> tuple[tuple[int, ...], ...]:
    """Return shard index → ranks of a mesh with any number of axes, one of which shards."""
    ranks = mesh.mesh.movedim(shard_axis, 0).reshape(mesh.size(shard_axis), -1)
    return tuple(tuple(row) for row in ranks.tolist())
