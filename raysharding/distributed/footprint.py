"""Memory of one rank of a sharded module, in bytes: arithmetic on layouts, before allocation.

Note: exactness.
    Bytes of parameters, buffers and gradients are exact. (FSDP2 pads a shard that is shorter than the longest, by at
    most one row per tensor.) Optimizer state is the state that the factory's optimizer makes in one step on meta
    tensors of these shapes and dtypes, which is exact for AdamW and SGD, and unknown if a step needs values. Buckets
    of a load are an upper bound. Full parameters of running groups are an estimate: the root's group, groups that are
    not freed after forward, and two others, one of which is prefetched. Activations depend on the batch and are left
    out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import device_module, is_accelerator
from raysharding.distributed.fully_shard import (
    ShardMap,
    TensorLayout,
    is_offloaded,
    local_tensor,
    mixed_precision_policy,
    module_tensors,
    tensor_layout,
)
from raysharding.distributed.optim import OptimizerFactory, call_factory
from raysharding.distributed.transfer import BUCKET_BYTES, RING_SIZE, available_bytes
from raysharding.errors import PlanError
from raysharding.models import ignored_parameters, is_cut, stays_in_full_precision, unfreed_groups
from raysharding.tree import leaves

Trained = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""FQN, local shape and dtype of each tensor with a gradient."""


@dataclass(frozen=True, slots=True)
class TensorFootprint:
    """Memory of a parameter or buffer of a module."""

    layout: TensorLayout
    """Layout of the tensor."""
    is_parameter: bool
    """True for a parameter, False for a buffer, which is replicated."""
    is_trained: bool
    """True if the tensor gets a gradient."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one rank, in bytes."""

    parameter_bytes: int
    """Shards, and replicated parameters."""
    buffer_bytes: int
    """Buffers."""
    gradient_bytes: int
    """Gradients of the shards; 0 without an optimizer."""
    optimizer_bytes: int | None
    """Optimizer state after the first step; 0 without an optimizer, `None` if unknown before a real step."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return self.parameter_bytes + self.buffer_bytes

    @property
    def training_bytes(self) -> int:
        """Bytes that training adds, as far as known."""
        return self.gradient_bytes + (self.optimizer_bytes or 0)


def tensor_footprints(module: nn.Module) -> list[TensorFootprint]:
    """Return the tensors of a module with their current sharding. Not collective."""
    return [_tensor_footprint(tensor, tensor_layout(fqn, tensor)) for fqn, tensor in module_tensors(module).items()]


def planned_tensors(module: nn.Module, sharding: Sharding, num_shards: int) -> list[TensorFootprint]:
    """Return the tensors of a module with the sharding that `shard_module` would apply; the module is not changed.

    Args:
        module: The root, on meta.
        sharding: Planned sharding.
        num_shards: Ranks of one replica.

    Raises:
        PlanError: `ignored_modules` names a missing module.
    """
    ignored = ignored_parameters(module, sharding)
    found = []
    for fqn, tensor in module_tensors(module).items():
        cut = isinstance(tensor, nn.Parameter) and is_cut(tensor) and tensor not in ignored
        layout = TensorLayout(fqn, tuple(tensor.shape), tensor.dtype, num_shards if cut else 0)
        found.append(_tensor_footprint(tensor, layout))
    return found


def _tensor_footprint(tensor: torch.Tensor, layout: TensorLayout) -> TensorFootprint:
    return TensorFootprint(layout, isinstance(tensor, nn.Parameter), tensor.requires_grad)


def footprints(
    tensors: Sequence[TensorFootprint], shard_indexes: Iterable[int], optimizer: OptimizerFactory | None
) -> dict[int, Footprint]:
    """Return the memory of ranks with certain shards. Not collective.

    Args:
        tensors: From `tensor_footprints` or `planned_tensors`.
        shard_indexes: Indices of the shards.
        optimizer: Factory of the optimizer, called with meta parameters; `None`: no training.

    Returns:
        Shard index → footprint.

    Raises:
        PlanError: The factory raised.
    """
    states: dict[Trained, int | None] = {}  # most shards have the same shapes
    found = {}
    for index in shard_indexes:
        parameters, buffers, trained = _sums(tensors, index)
        if optimizer is None:
            found[index] = Footprint(parameters, buffers, 0, 0)
            continue
        if trained not in states:
            states[trained] = _optimizer_bytes(optimizer, trained)
        gradients = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in trained)
        found[index] = Footprint(parameters, buffers, gradients, states[trained])
    return found


def _sums(tensors: Sequence[TensorFootprint], shard_index: int) -> tuple[int, int, Trained]:
    """Return bytes of parameters, bytes of buffers, and the tensors with gradients."""
    parameters = buffers = 0
    trained = []
    for tensor in tensors:
        shape = _local_shape(tensor.layout, shard_index)
        num_bytes = torch.Size(shape).numel() * tensor.layout.dtype.itemsize
        parameters += num_bytes if tensor.is_parameter else 0
        buffers += 0 if tensor.is_parameter else num_bytes
        if tensor.is_trained:
            trained.append((tensor.layout.fqn, shape, tensor.layout.dtype))
    return parameters, buffers, tuple(trained)


def _local_shape(layout: TensorLayout, shard_index: int) -> tuple[int, ...]:
    if not layout.num_shards:
        return layout.shape
    start, stop = layout.local_range(shard_index)
    row = layout.num_elements // layout.shape[0]
    return (stop - start) // row, *layout.shape[1:]


def _optimizer_bytes(factory: OptimizerFactory, trained: Trained) -> int | None:
    """Return the bytes of optimizer state after one step on meta tensors; `None` if the step needs values."""
    if not trained:
        return 0
    named = [(fqn, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))) for fqn, shape, dtype in trained]
    try:
        optimizer = call_factory(factory, named)
    except Exception as error:  # any error of user code, which stays the cause
        name = getattr(factory, "__qualname__", repr(factory))
        raise PlanError(f"optimizer={name} raised {type(error).__name__}: {error}") from error
    for group in optimizer.param_groups:
        # Meta has neither fused nor foreach kernels, nor graph capture; the state is the same.
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
    for _, parameter in named:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
        return None
    values = leaves(dict(optimizer.state))
    return sum(value.nbytes for _, value in values if isinstance(value, torch.Tensor))


def load_bytes(loading: Loading, num_shards: int, checkpoint_bytes: int, *, reads: bool) -> int:
    """Return the largest size of a rank's ring of buffers; 0 if ranks read directly into their shards.

    Args:
        loading: `auto` counts as `scatter`, which takes more than `local` if shards are whole rows.
        num_shards: Ranks of one replica.
        checkpoint_bytes: Bytes of all tensors.
        reads: True if the rank reads for others, as rank 0 does; else it receives its part.
    """
    bucket = min(loading.bucket_bytes or BUCKET_BYTES, checkpoint_bytes)
    is_part = not reads and loading.transport in ("auto", "scatter")
    return RING_SIZE * (-(-bucket // num_shards) if is_part else bucket)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a rank needs, and free memory of its node and GPU, in bytes."""

    host_bytes: int
    """Host memory of a load."""
    host_training_bytes: int
    """Additional host memory of gradients and optimizer state."""
    host_free_bytes: int
    """Free host memory of the node."""
    device_bytes: int
    """GPU memory of a load; 0 on CPUs."""
    device_training_bytes: int
    """GPU memory of gradients and optimizer state; 0 on CPUs."""
    device_free_bytes: int | None
    """Free memory of the GPU; `None` on CPUs."""


def memory_need(
    module: nn.Module, device: torch.device, loading: Loading, checkpoint_bytes: int, optimizer: OptimizerFactory | None
) -> MemoryNeed:
    """Return the memory that this rank needs to load a sharded module on meta. Not collective.

    Args:
        module: From `shard_module`; real tensors count as allocated.
        device: Device of the module.
        loading: Options of the load.
        checkpoint_bytes: Bytes of all tensors in the files.
        optimizer: Factory of the optimizer; `None`: no training. Counted only for a class or a `partial` of a class: a
            user's function is called once, after the load.
    """
    tensors = module_tensors(module)
    shards = ShardMap.of(tensors)
    index = shards.shard_index
    footprint = footprints(tensor_footprints(module), [index], optimizer if _is_class(optimizer) else None)[index]
    real = sum(local_tensor(tensor).nbytes for tensor in tensors.values() if not tensor.is_meta)
    shard = footprint.resident_bytes - real
    ring = load_bytes(loading, shards.num_shards, checkpoint_bytes, reads=shards.rank == 0)
    free = available_bytes()
    if not is_accelerator(device):
        # Mapped pages of files are page cache.
        return MemoryNeed(0 if loading.mmap else shard + ring, footprint.training_bytes, free, 0, 0, None)
    device_free = device_module(device).mem_get_info(device)[0]
    if is_offloaded(module):
        return MemoryNeed(shard + ring, footprint.training_bytes, free, ring, 0, device_free)
    return MemoryNeed(ring, 0, free, shard + ring, footprint.training_bytes, device_free)


def _is_class(factory: OptimizerFactory | None) -> bool:
    return isinstance(factory.func if isinstance(factory, partial) else factory, type)


def gathered_bytes(module: nn.Module, sharding: Sharding, groups: Sequence[tuple[str, ...]]) -> int:
    """Return the bytes of full parameters during computation: the root's group, kept groups, and up to two more.

    Args:
        module: The root, on meta, not yet sharded.
        sharding: `wrap`, `mixed_precision` and `reshard_after_forward` are used.
        groups: Result of `wrap_groups`.
    """
    weights = _group_bytes(module, sharding, groups)
    root = sum(weights.pop(names) for names in {("",), *unfreed_groups(module, sharding, groups)})
    others = sorted(weights.values(), reverse=True)
    if sharding.reshard_after_forward is False:
        return root + sum(others)
    kept = sharding.reshard_after_forward
    # With an int, a shard over that many ranks is kept after forward.
    parts = sum(others) // kept if isinstance(kept, int) and kept is not True else 0
    return root + sum(others[:2]) + parts


def _group_bytes(
    module: nn.Module, sharding: Sharding, groups: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], int]:
    ignored = ignored_parameters(module, sharding)
    low = mixed_precision_policy(sharding).param_dtype
    group_of = {name: names for names in groups for name in names}
    owner: dict[str, tuple[str, ...]] = {}
    weights = dict.fromkeys((*groups, ("",)), 0)
    seen: set[nn.Parameter] = set()
    for name, submodule in module.named_modules():
        owner[name] = group_of.get(name, owner[name.rpartition(".")[0]] if name else ("",))
        dtype = None if stays_in_full_precision(submodule) else low
        for parameter in submodule._parameters.values():
            if parameter is None or parameter in seen or parameter in ignored or not is_cut(parameter):
                continue
            seen.add(parameter)
            weights[owner[name]] += parameter.numel() * (dtype or parameter.dtype).itemsize
    return weights
