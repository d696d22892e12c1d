"""What one rank of a sharded module will hold, in bytes: arithmetic on layouts, before anything is allocated.

Note: what is exact, and what is not.
    Parameters, buffers and gradients are the bytes of the local tensors, to the byte. (FSDP2 pads a shard that is
    shorter than the longest: at most one row of each tensor more.) Optimizer state is what the factory's optimizer
    makes in one step on tensors of those shapes and dtypes, without memory (on meta): AdamW and SGD then
    hold just that; unknown where a step needs values. A load's buckets are an upper bound. Full parameters of groups
    that compute are an estimate: the root's group, those that are not freed after forward, and two others, of which one
    is gathered ahead. Activations are left out: they depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from raysharding.config import Loading, Sharding
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

Trained = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""FQN, local shape and dtype of each tensor that gets a gradient."""


@dataclass(frozen=True, slots=True)
class TensorFootprint:
    """A parameter or buffer of a module."""

    layout: TensorLayout
    """How it is cut."""
    is_parameter: bool
    """Whether it is a parameter; else a buffer, which every rank holds whole."""
    is_trained: bool
    """Whether it gets a gradient."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one rank holds."""

    parameter_bytes: int
    """Its shards, and the parameters that every rank holds whole."""
    buffer_bytes: int
    """Buffers."""
    gradient_bytes: int
    """Gradients of its shards, in training; 0 where no optimizer is planned."""
    optimizer_bytes: int | None
    """State of the optimizer after its first step; 0 without one, `None` where only a real step would show it."""

    @property
    def resident_bytes(self) -> int:
        """What stays, whatever the group does."""
        return self.parameter_bytes + self.buffer_bytes

    @property
    def training_bytes(self) -> int:
        """What training adds, as far as it is known."""
        return self.gradient_bytes + (self.optimizer_bytes or 0)


def tensor_footprints(module: nn.Module) -> list[TensorFootprint]:
    """The tensors of a module as they are cut now; each rank alone, no collective."""
    return [_tensor_footprint(tensor, tensor_layout(fqn, tensor)) for fqn, tensor in module_tensors(module).items()]


def planned_tensors(module: nn.Module, sharding: Sharding, num_shards: int) -> list[TensorFootprint]:
    """The tensors of a whole module as `shard_module` will cut them; nothing is changed.

    Args:
        module: The root, on meta.
        sharding: How it will be cut.
        num_shards: Ranks of one replica.

    Raises:
        PlanError: `ignored_modules` names what is not there.
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
    """What the ranks with certain shards hold; each process alone, no collective.

    Args:
        tensors: From `tensor_footprints` or `planned_tensors`.
        shard_indexes: Which shards.
        optimizer: Factory of the optimizer, called with meta parameters; `None`: no training.

    Returns:
        Shard index → footprint.

    Raises:
        PlanError: The factory raised.
    """
    states: dict[Trained, int | None] = {}  # most shards are of the same shapes
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
    """Bytes of parameters and of buffers, and what gets a gradient."""
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
    """Bytes of the state that one step makes, on tensors without memory; `None` where the step needs values."""
    if not trained:
        return 0
    named = [(fqn, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))) for fqn, shape, dtype in trained]
    try:
        optimizer = call_factory(factory, named)
    except Exception as error:  # whatever the user's code raises: it keeps its traceback as the cause
        name = getattr(factory, "__qualname__", repr(factory))
        raise PlanError(f"optimizer={name} raised {type(error).__name__}: {error}") from error
    for group in optimizer.param_groups:
        # Kernels for meta exist only one tensor a time, and none can be captured; the state is the same.
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
    for _, parameter in named:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
        return None
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in _tensors(state))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def load_bytes(loading: Loading, num_shards: int, checkpoint_bytes: int, *, reads: bool) -> int:
    """The most that a rank's ring of buckets takes; none is needed where ranks read straight into their shards.

    Args:
        loading: `auto` counts as `scatter`, which takes more than `local` where shards are whole rows.
        num_shards: Ranks of one replica.
        checkpoint_bytes: Bytes of all tensors.
        reads: Whether the rank reads for others, as rank 0 does; else it receives its part.
    """
    bucket = min(loading.bucket_bytes or BUCKET_BYTES, checkpoint_bytes)
    is_part = not reads and loading.transport in ("auto", "scatter")
    return RING_SIZE * (-(-bucket // num_shards) if is_part else bucket)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a rank will take, and what its node and GPU have left. Bytes."""

    host_bytes: int
    """Host memory that a load will take."""
    host_training_bytes: int
    """Host memory that gradients and optimizer state will take beside it."""
    host_free_bytes: int
    """Host memory that is free on its node."""
    device_bytes: int
    """GPU memory that a load will take; 0 on CPUs."""
    device_training_bytes: int
    """GPU memory that gradients and optimizer state will take; 0 on CPUs."""
    device_free_bytes: int | None
    """Free memory of its GPU; `None` on CPUs."""


def memory_need(
    module: nn.Module, device: torch.device, loading: Loading, checkpoint_bytes: int, optimizer: OptimizerFactory | None
) -> MemoryNeed:
    """What this rank will take to load a sharded module that is on meta; each rank alone, no collective.

    Args:
        module: From `shard_module`; what of it is real already needs nothing.
        device: Where it computes.
        loading: How it will be loaded.
        checkpoint_bytes: Bytes of all tensors in the files.
        optimizer: Factory of the optimizer; `None`: no training. Only counted where it is a class, or a `partial` of
            one: a function of the user's is called once, when there are values.
    """
    tensors = module_tensors(module)
    shards = ShardMap.of(tensors)
    index = shards.shard_index
    footprint = footprints(tensor_footprints(module), [index], optimizer if _is_class(optimizer) else None)[index]
    real = sum(local_tensor(tensor).nbytes for tensor in tensors.values() if not tensor.is_meta)
    shard = footprint.resident_bytes - real
    ring = load_bytes(loading, shards.num_shards, checkpoint_bytes, reads=shards.rank == 0)
    free = available_bytes()
    if device.type != "cuda":
        # Mapped pages of files are not taken from anybody.
        return MemoryNeed(0 if loading.mmap else shard + ring, footprint.training_bytes, free, 0, 0, None)
    device_free = torch.cuda.mem_get_info(device)[0]
    if is_offloaded(module):
        return MemoryNeed(shard + ring, footprint.training_bytes, free, ring, 0, device_free)
    return MemoryNeed(ring, 0, free, shard + ring, footprint.training_bytes, device_free)


def _is_class(factory: OptimizerFactory | None) -> bool:
    return isinstance(factory.func if isinstance(factory, partial) else factory, type)


def gathered_bytes(module: nn.Module, sharding: Sharding, groups: Sequence[tuple[str, ...]]) -> int:
    """Full parameters that a rank holds while it computes: the root's group, others that are kept, and two more or all.

    Args:
        module: The root, on meta, not yet sharded.
        sharding: Its `wrap`, `mixed_precision` and `reshard_after_forward` are read.
        groups: From `wrap_groups`.
    """
    weights = _group_bytes(module, sharding, groups)
    root = sum(weights.pop(names) for names in {("",), *unfreed_groups(module, sharding, groups)})
    others = sorted(weights.values(), reverse=True)
    if sharding.reshard_after_forward is False:
        return root + sum(others)
    kept = sharding.reshard_after_forward
    # An int keeps, after forward, the shard of a mesh of that many ranks.
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
