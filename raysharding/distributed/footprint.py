"""Memory of one rank of a sharded module, in bytes: arithmetic on layouts, before allocation.

Note: exactness.
    Bytes of parameters, buffers and gradients are exact. (FSDP2 pads a shard that is shorter than the longest, by at
    most one row per tensor.) Optimizer state is the state that the factory's optimizer makes in one step on meta
    tensors of these shapes and dtypes, which is exact for AdamW and SGD. torch's Adafactor, whose step needs values, is
    exact, too; other optimizers of that kind are unknown. Buffers of a load or save are an upper bound: which rank
    needs them depends on the transport, which is decided once the ranks have looked for the files. Full parameters of
    running groups are an estimate: the root's group, groups that are not freed after forward, and two others, one of
    which is prefetched. Activations depend on the batch and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from raysharding.config import Loading, Sharding
from raysharding.distributed.comm import all_gather_json, device_module, device_uuid, is_accelerator
from raysharding.distributed.fully_shard import (
    ShardMap,
    TensorLayout,
    bytes_to_keep,
    compute_device,
    is_offloaded,
    module_tensors,
    over_ranks_of,
    tensor_layout,
)
from raysharding.distributed.optim import OptimizerFactory, call_factory
from raysharding.distributed.transfer import (
    BUCKET_BYTES,
    GATHER_BUCKET_BYTES,
    RING_SIZE,
    available_bytes,
    host_identity,
    round_up_pinned,
)
from raysharding.errors import PlanError
from raysharding.models import full_precision_groups, low_dtype, unfreed_groups, whole_parameters
from raysharding.tree import leaves
from raysharding.units import format_bytes

Trained = tuple[tuple[TensorLayout, tuple[int, ...]], ...]
"""Layout and local shape of each tensor with a gradient."""


@dataclass(frozen=True, slots=True)
class TensorFootprint:
    """Memory of a parameter or buffer of a module."""

    layout: TensorLayout
    """Layout of the tensor."""
    is_parameter: bool
    """True for a parameter, False for a buffer, which is replicated."""
    is_trained: bool
    """True if the tensor gets a gradient."""

    def local_shape(self, shard_index: int) -> tuple[int, ...]:
        """Return the shape of a shard."""
        shape = self.layout.shape
        if not self.layout.num_shards:
            return shape
        start, stop = self.layout.local_range(shard_index)
        return (stop - start) * shape[0] // self.layout.num_elements, *shape[1:]

    def local_bytes(self, shard_index: int) -> int:
        """Return the bytes of a shard."""
        start, stop = self.layout.local_range(shard_index)
        return (stop - start) * self.layout.dtype.itemsize


class Held(NamedTuple):
    """Memory of one kind that a rank holds, in bytes."""

    resident: int
    """Bytes of parameters and buffers."""
    training: int
    """Bytes that training adds, as far as known."""


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
    replicated_bytes: int
    """Of `parameter_bytes`, those of parameters that are not sharded, which `Sharding(cpu_offload=True)` leaves on the
    device. Their gradients and optimizer state are counted with those of the shards."""
    pinned_bytes: int
    """Shards in pinned host memory, where each takes the next power of two; for `Sharding(cpu_offload=True)`."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return self.parameter_bytes + self.buffer_bytes

    def held(self, device_type: str, *, offload: bool) -> tuple[Held, Held]:
        """Return what is held in host memory, and what on the device.

        Args:
            device_type: Device type of the rank.
            offload: `Sharding.cpu_offload`: shards, gradients and optimizer state are in host memory.
        """
        training = self.gradient_bytes + (self.optimizer_bytes or 0)
        if device_type == "cpu":
            return Held(self.resident_bytes, training), Held(0, 0)
        if offload:
            return Held(self.pinned_bytes, training), Held(self.replicated_bytes + self.buffer_bytes, 0)
        return Held(0, 0), Held(self.resident_bytes, training)


def tensor_footprints(module: nn.Module) -> list[TensorFootprint]:
    """Return the tensors of a module with their current sharding. Not collective."""
    return [_tensor_footprint(tensor, tensor_layout(fqn, tensor)) for fqn, tensor in module_tensors(module).items()]


def planned_tensors(
    module: nn.Module, sharding: Sharding, groups: Sequence[tuple[str, ...]], num_shards: int
) -> list[TensorFootprint]:
    """Return the tensors of a module with the sharding that `shard_module` would apply; the module is not changed.

    Args:
        module: The root, on meta.
        sharding: Planned sharding.
        groups: Result of `wrap_groups`.
        num_shards: Ranks of one replica.

    Raises:
        PlanError: `ignored_modules` names a missing module.
    """
    whole = whole_parameters(module, sharding, groups)
    layouts = []
    for fqn, tensor in module_tensors(module).items():
        is_sharded = isinstance(tensor, nn.Parameter) and tensor not in whole
        layout = TensorLayout(fqn, tuple(tensor.shape), tensor.dtype, num_shards if is_sharded else 0)
        layouts.append(_tensor_footprint(tensor, layout))
    return layouts


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
    parameters = [one for one in tensors if one.is_parameter]
    buffers = [one for one in tensors if not one.is_parameter]
    trained = [one for one in tensors if one.is_trained and optimizer is not None]
    replicated = full_bytes([one for one in parameters if not one.layout.num_shards])
    # FSDP2 gives every rank the length of the longest shard, which is the first.
    pinned = sum(round_up_pinned(one.local_bytes(0)) for one in tensors if one.layout.num_shards)
    states: dict[Trained, int | None] = {}  # most shards have the same shapes
    found = {}
    for index in shard_indexes:
        shapes = tuple((one.layout, one.local_shape(index)) for one in trained)
        if shapes not in states:
            states[shapes] = _optimizer_bytes(optimizer, shapes)
        held, buffer, gradient = (
            sum(one.local_bytes(index) for one in some) for some in (parameters, buffers, trained)
        )
        found[index] = Footprint(held, buffer, gradient, states[shapes], replicated, pinned)
    return found


def _optimizer_bytes(factory: OptimizerFactory | None, trained: Trained) -> int | None:
    """Return the bytes of optimizer state after one step on meta tensors; `None` if the step needs values."""
    if factory is None or not trained:
        return 0
    named = [(one.fqn, nn.Parameter(torch.empty(shape, dtype=one.dtype, device="meta"))) for one, shape in trained]
    try:
        optimizer = call_factory(factory, named)
    except Exception as error:  # any error of user code, which stays the cause
        name = getattr(factory, "__qualname__", repr(factory))
        raise PlanError(f"optimizer={name} raised {type(error).__name__}: {error}") from error
    if isinstance(optimizer, torch.optim.Adafactor):  # whose step needs values
        return sum(4 + one.dtype.itemsize * _num_means(one.shape, shape) for one, shape in trained)
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


def _num_means(shape: tuple[int, ...], local: tuple[int, ...]) -> int:
    """Return the elements of Adafactor's means: over rows and columns of a matrix, on every rank, or over nothing."""
    whole = torch.Size(shape)
    return whole[:-1].numel() + whole.numel() // shape[-2] if len(shape) > 1 else torch.Size(local).numel()


def full_bytes(tensors: Iterable[TensorFootprint]) -> int:
    """Return the bytes of full tensors."""
    return sum(one.layout.num_elements * one.layout.dtype.itemsize for one in tensors)


def load_buffers(num_bytes: int, bucket_bytes: int | None, device_type: str) -> tuple[int, int]:
    """Return the host memory and the device memory of a load's buffers on a rank, at most. Not collective.

    Args:
        num_bytes: Bytes of the full weights.
        bucket_bytes: `Loading.bucket_bytes`.
        device_type: Device type of the ranks.
    """
    bucket = min(bucket_bytes or BUCKET_BYTES, num_bytes)
    if device_type == "cpu":
        return RING_SIZE * bucket, 0
    return RING_SIZE * round_up_pinned(bucket), RING_SIZE * bucket


def save_buffers(num_bytes: int, device_type: str, *, is_one_host: bool) -> tuple[int, int]:
    """Return the host memory and the device memory of a save's buffers on a rank, at most. Not collective.

    Of a checkpoint of several files each rank gathers its own, in a part of these buffers.

    Args:
        num_bytes: Bytes of the full weights or of the full optimizer state, whichever are more.
        device_type: Device type of the ranks.
        is_one_host: True if all ranks are on one host, where each writes what it holds.
    """
    bucket = min(GATHER_BUCKET_BYTES, num_bytes)
    received = 0 if is_one_host else bucket
    return (received, 0) if device_type == "cpu" else (round_up_pinned(bucket), received)


class Need(NamedTuple):
    """Memory of one kind that a rank needs, and what of it is free, in bytes."""

    load: int
    """Memory of a load."""
    training: int
    """Additional memory of gradients and optimizer state."""
    free: int
    """Free memory of the node, or of the GPU."""


class MemoryNeed(NamedTuple):
    """Memory that a rank needs, and free memory of its node and GPU."""

    host: Need
    """Host memory."""
    device: Need | None
    """GPU memory; `None` on CPUs."""


def memory_need(
    module: nn.Module, device: torch.device, loading: Loading, optimizer: OptimizerFactory | None
) -> MemoryNeed:
    """Return the memory that this rank needs to load a sharded module on meta. Not collective.

    Args:
        module: From `shard_module`; real tensors count as allocated.
        device: Device of the module.
        loading: Options of the load.
        optimizer: Factory of the optimizer; `None`: no training. Counted only for a class or a `partial` of a class: a
            user's function is called once, after the load.
    """
    tensors, layouts = module_tensors(module), tensor_footprints(module)
    index = ShardMap.of(tensors).shard_index
    new = footprints([one for one in layouts if tensors[one.layout.fqn].is_meta], [index], None)[index]
    whole = footprints(layouts, [index], optimizer if _is_class(optimizer) else None)[index]
    offload = is_offloaded(module)
    new_host, new_device = new.held(device.type, offload=offload)
    host, on_device = whole.held(device.type, offload=offload)
    host_buffers, device_buffers = load_buffers(full_bytes(layouts), loading.bucket_bytes, device.type)
    # Mapped pages of files are page cache.
    host_load = 0 if loading.mmap else new_host.resident + host_buffers
    on_host = Need(host_load, host.training, available_bytes())
    if not is_accelerator(device):
        return MemoryNeed(on_host, None)
    free = device_module(device).mem_get_info(device)[0]
    return MemoryNeed(on_host, Need(new_device.resident + device_buffers, on_device.training, free))


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
    whole = whole_parameters(module, sharding, groups)
    low, in_full = low_dtype(sharding), full_precision_groups(module, sharding, groups)
    group_of = {name: names for names in groups for name in names}
    owner: dict[str, tuple[str, ...]] = {}
    weights = dict.fromkeys((*groups, ("",)), 0)
    seen: set[nn.Parameter] = set()
    for name, submodule in module.named_modules():
        owner[name] = group_of.get(name, owner[name.rpartition(".")[0]] if name else ("",))
        dtype = None if owner[name] in in_full else low
        for parameter in submodule._parameters.values():
            if parameter is None or parameter in seen or parameter in whole:
                continue
            seen.add(parameter)
            weights[owner[name]] += parameter.numel() * (dtype or parameter.dtype).itemsize
    return weights


_KEPT_PART = 0.8
"""Part of the free memory that full parameters may take; activations and key-value caches need some, too."""


@over_ranks_of("module")
def missing_to_keep(module: nn.Module) -> str:
    """Return what says that the ranks lack the memory for `keep_gathered`; empty if all have it; collective.

    Args:
        module: The sharded root module, resharded.
    """
    device, need = compute_device(module), bytes_to_keep(module)
    if is_accelerator(device):
        of = device_module(device)
        cached = of.memory_reserved(device) - of.memory_allocated(device)
        where, free = [*host_identity(), device_uuid(device) or str(device)], of.mem_get_info(device)[0] + cached
    else:
        where, free = host_identity(), available_bytes()
    # Every rank sees the needs of all, and all decide alike: a rank that went by blocks alone would wait in a gather.
    every = all_gather_json([where, need, free])
    for rank, (place, _, left) in enumerate(every):
        together = sum(one for other, one, _ in every if other == place)
        if together > _KEPT_PART * left:
            lacking = format_bytes(together - int(_KEPT_PART * left))
            return (
                f"parameters are gathered by blocks, anew in each forward: to keep them takes {format_bytes(need)} a "
                f"rank, and {lacking} are missing where rank {rank} is ({format_bytes(left)} are free, of which a "
                "fifth is for activations and caches); use fewer ranks a host or GPU, Sharding(mixed_precision='bf16') "
                "or a smaller batch; summon_full_params=False goes by blocks without this line"
            )
    return ""
