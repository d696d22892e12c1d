"""Where each element of a module's tensors lives: the flat range of every tensor that a rank holds.

A `Shard(0)` shard of a row-major tensor is one contiguous range of the flattened tensor. That fact carries the whole
library: a range of elements is a range of bytes in a file, in a message and in a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raysharding.models import clean_name

_ROWS = Shard(0)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One parameter or buffer of a module, and how it is cut."""

    fqn: str
    """Canonical FQN: the first of `named_parameters()`; buffers by their own name."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    """dtype of the module's tensor."""
    num_shards: int
    """Ranks that it is cut over along dim 0; 0 if every rank holds all of it (buffers, 0-dim parameters)."""

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    def local_range(self, shard_index: int) -> tuple[int, int]:
        """Half-open range of the flattened global tensor that shard `shard_index` holds."""
        return self._range(shard_index, *self._size())

    def ranges(self) -> list[tuple[int, int]]:
        """`local_range` of every shard; of the whole, once, where every rank holds it."""
        size = self._size()
        return [self._range(index, *size) for index in range(max(self.num_shards, 1))]

    def _size(self) -> tuple[int, int]:
        """Elements of the longest shard, and of the tensor.

        FSDP2 and DTensor cut dim 0 as `torch.chunk` does: `ceil(rows / num_shards)` rows each, the last ones shorter
        or empty.
        """
        total = prod(self.shape)
        if self.num_shards == 0:
            return total, total
        rows = self.shape[0]
        return (-(-rows // self.num_shards) * (total // rows), total) if total else (0, 0)

    def _range(self, shard_index: int, longest: int, total: int) -> tuple[int, int]:
        if self.num_shards == 0:
            return 0, total
        return min(shard_index * longest, total), min((shard_index + 1) * longest, total)


def unwrapped(module: nn.Module) -> nn.Module:
    """What a `DistModule` stands for; any other module itself."""
    return next(module.modules())


def named_submodules(module: nn.Module, *, aliases: bool = False) -> list[tuple[str, nn.Module]]:
    """Every submodule, a dot behind its name but for the root's, parents first.

    As `named_modules`, whose nested generators take many times as long in a deep tree.

    Args:
        module: The root.
        aliases: Whether one that is found in two places is named twice. Then a tree in a cycle is a RecursionError.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect("", unwrapped(module), None if aliases else set(), found)
    return found


def _collect(prefix: str, module: nn.Module, seen: set[nn.Module] | None, found: list[tuple[str, nn.Module]]) -> None:
    # No closure: one that calls itself would keep the modules until the next collection of cycles.
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _collect(f"{prefix}{name}.", child, seen, found)


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """FQN → parameter or buffer, each tensor once, in module order, non-persistent buffers included."""
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
    """FQNs of all parameters and persistent buffers, tied aliases included."""
    names: set[str] = set()
    for raw, submodule in named_submodules(module, aliases=True):
        prefix = clean_name(raw)
        names.update(prefix + name for name, tensor in submodule._parameters.items() if tensor is not None)
        skipped = submodule._non_persistent_buffers_set
        names.update(prefix + name for name in submodule._buffers if name not in skipped)
    return names


def tensor_layout(fqn: str, tensor: torch.Tensor) -> TensorLayout:
    """Layout of one tensor of a module.

    Raises:
        ValueError: When a DTensor is neither replicated nor cut along dim 0 on one mesh axis.
    """
    num_shards = 0
    if isinstance(tensor, DTensor):
        placements = tensor.placements
        cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) > 1 or (cut and placements[cut[0]] != _ROWS):
            raise ValueError(f"{fqn}: placements {placements} are not supported: shard along dim 0 on one mesh axis")
        num_shards = tensor.device_mesh.size(cut[0]) if cut else 0
    return TensorLayout(fqn, tuple(tensor.shape), tensor.dtype, num_shards)


def shard_index_of(tensor: DTensor) -> int:
    """Which shard of a DTensor that is cut along dim 0 this process holds; 0 where every rank holds all of it."""
    for axis, placement in enumerate(tensor.placements):
        if placement == _ROWS:
            return tensor.device_mesh.get_local_rank(axis)
    return 0


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` in this process: a DTensor's shard, any other tensor itself; detached."""
    local = inner_tensor(tensor)
    return local.detach() if local.requires_grad else local


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The very tensor that a DTensor wraps, any other tensor itself. `to_local` gives a new one each time."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_inner_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor wrap another tensor, of the same shape; mesh and cut stay."""
    tensor._local_tensor = local


def with_layout(local: torch.Tensor, like: DTensor, *, requires_grad: bool) -> DTensor:
    """Wrap a shard in a DTensor with the mesh, cut, shape and strides of another; each rank alone.

    As FSDP2 makes its own: `DTensor.from_local` takes ten times as long, which thousands of parameters feel, and moves
    the shard to the mesh's device.
    """
    return DTensor(local, like._spec, requires_grad=requires_grad)


def message_device(module: nn.Module) -> torch.device:
    """Device on which a module's data travels: its mesh's; the CPU for a module that is not sharded."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return torch.device("cpu")


def compute_device(module: nn.Module) -> torch.device:
    """Device on which a module computes: its mesh's; that of its parameters for a module that is not sharded."""
    parameters = list(module.parameters())
    if not parameters or any(isinstance(parameter, DTensor) for parameter in parameters):
        return message_device(module)
    return parameters[0].device


def computes_on_cuda(module: nn.Module) -> bool:
    """Return True if a module computes on a GPU; its shards may lie in host memory, and metadata travel there."""
    kinds = (
        parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
        for parameter in module.parameters()
    )
    return "cuda" in kinds


@dataclass(frozen=True)
class ShardMap:
    """Which ranks hold which shard of a module's tensors."""

    holders: tuple[tuple[int, ...], ...]
    """shard index → global ranks that hold it, first replica first."""
    rank: int
    """This process's global rank."""

    @property
    def num_shards(self) -> int:
        """Number of different shards: the size of the mesh's `shard` axis."""
        return len(self.holders)

    @property
    def world_size(self) -> int:
        """Ranks over all replicas."""
        return sum(len(ranks) for ranks in self.holders)

    @property
    def shard_index(self) -> int:
        """The shard that this process holds."""
        return self.index_of(self.rank)

    def index_of(self, rank: int) -> int:
        """The shard that global rank `rank` holds."""
        return next(index for index, ranks in enumerate(self.holders) if rank in ranks)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> ShardMap:
        """Read the map off the DTensors of a module; without any, every rank is a replica of one shard.

        Raises:
            ValueError: When the tensors lie on different meshes, or on one that leaves ranks out.
        """
        found = {holders: next(iter(part)) for holders, part in _by_holders(tensors).items() if holders is not None}
        if len(found) > 1:
            raise ValueError(
                f"parameters {sorted(found.values())} lie on different meshes: shard the module over one, "
                "or bring its state to torch.distributed.checkpoint, by state_dict_type"
            )
        shards = cls(next(iter(found), (tuple(range(dist.get_world_size())),)), dist.get_rank())
        if shards.world_size != dist.get_world_size():
            raise ValueError(
                f"{next(iter(found.values()))}: its mesh holds {shards.world_size} of {dist.get_world_size()} ranks: "
                "shard over all ranks of the default process group"
            )
        return shards


def by_mesh(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Parts of a dict whose tensors are cut over the ranks alike, each with a `ShardMap`; the same on every rank.

    FSDP modules inside one another may have strategies of their own. What every rank holds goes with the first part.
    """
    parts = _by_holders(tensors)
    everywhere = parts.pop(None, {})
    first, *others = parts.values() or [{}]
    return [{**first, **everywhere}, *others]


def _by_holders(
    tensors: Mapping[str, torch.Tensor],
) -> dict[tuple[tuple[int, ...], ...] | None, dict[str, torch.Tensor]]:
    """Shard index → ranks (`None`: every rank holds all), → the tensors that are cut so."""
    known: dict[tuple[DeviceMesh, int], tuple[tuple[int, ...], ...]] = {}  # thousands of tensors lie on one mesh
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
    """shard index → ranks, from a mesh of any number of axes of which one shards."""
    ranks = mesh.mesh.movedim(shard_axis, 0).reshape(mesh.size(shard_axis), -1)
    return tuple(tuple(row) for row in ranks.tolist())
