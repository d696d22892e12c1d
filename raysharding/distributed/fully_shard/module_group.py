"""The process group of a module: the ranks of its mesh, current while a function works on the module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import current_group, mesh_group, using_group
from raysharding.distributed.fully_shard.internals import parameter_groups

P = ParamSpec("P")
R = TypeVar("R")

_meshes: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()
"""Mesh of each module of a sharded root, for those that hold no shard themselves."""


def note_mesh(root: nn.Module, mesh: DeviceMesh) -> None:
    """Record the mesh of a sharded root and of the modules inside it that have none of their own. Not collective."""
    for module in root.modules():
        _meshes.setdefault(module, mesh)


def group_of(*values: object) -> dist.ProcessGroup | None:
    """Return the process group of a module, or of a mapping of tensors; the current group where nothing is sharded.

    Args:
        values: Modules and mappings of names to tensors; the first one with a mesh decides.

    Raises:
        ValueError: This process is not in the mesh.
    """
    if not dist.is_initialized():
        return None
    mesh = next((found for value in values for found in _meshes_of(value)), None)
    return current_group() if mesh is None else mesh_group(mesh)


def _meshes_of(value: object) -> Iterator[DeviceMesh]:
    tensors: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        root = next(value.modules())  # of a `DistModule`, the module inside
        if root in _meshes:
            yield _meshes[root]
        # A forward may have left full parameters registered in place of the shards.
        groups = chain.from_iterable(map(parameter_groups, root.modules()))
        tensors = chain((item.shard for group in groups for item in group), root.parameters())
    elif isinstance(value, Mapping):
        tensors = value.values()
    yield from (one.device_mesh for one in tensors if isinstance(one, DTensor))


def over_ranks_of(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function run with the group of an argument as the current group.

    Args:
        names: Parameters of the function, modules or mappings of tensors; the first one with a mesh decides.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters)
        places = [(parameters.index(name), name) for name in names]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (args[place] if place < len(args) else kwargs.get(name) for place, name in places)
            with using_group(group_of(*given)):
                return function(*args, **kwargs)

        return call

    return decorate
