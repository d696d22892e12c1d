"""How a module on meta gets its memory, as FSDP2 wants it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from raysharding.distributed.layout import named_submodules, tensor_layout
from raysharding.distributed.sharded_module import is_offloaded


def materialize(
    module: nn.Module,
    device: torch.device,
    memory: Mapping[torch.Tensor, torch.Tensor] | None = None,
    only: Container[int] | None = None,
) -> Callable[[], None]:
    """Give every parameter and buffer on meta uninitialised memory on `device`; each rank alone, no collective.

    Unlike `Module.to_empty` this keeps ties (a parameter that two modules share stays one), leaves tensors alone that
    are real already, and allocates each tensor once. The values are garbage until a load writes them. Shards of a
    module under `Sharding(cpu_offload=True)` are allocated in host memory.

    Args:
        module: A module, sharded or not.
        device: Where the memory comes from.
        memory: Tensor on meta → this rank's part of it, where there is one already.
        only: `id` of the tensors that get memory; the others stay on meta. Default: all.

    Returns:
        A function that puts the tensors back on meta, for a load that fails: garbage must not be left to run on.
    """
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def undo() -> None:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor
        tell_fsdp(module)

    try:
        _allocate(module, device, memory or {}, only, replaced)
        tell_fsdp(module)
        _cut_padding(replaced)
    except (RuntimeError, MemoryError):
        undo()
        raise
    return undo


def tell_fsdp(module: nn.Module) -> None:
    """Let FSDP2 take the parameters that are in the module's tables now; each rank alone, no collective.

    It keeps references, and renews them in hooks after a `load_state_dict`. Called with an empty state dict
    that takes ten times as long, warns of what is on meta, and runs the users' hooks before there are values.
    """
    nothing = _IncompatibleKeys([], [])
    for _, submodule in named_submodules(module):
        for hook in submodule._load_state_dict_post_hooks.values():
            if is_fsdp_hook(hook):
                hook(submodule, nothing)


def is_fsdp_hook(hook: object) -> bool:
    """Whether FSDP2 registered a hook."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def _cut_padding(replaced: Iterable[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
    """Let shards that are shorter than other ranks' end where they end, now that FSDP2 knows the memory behind them.

    FSDP2 wants all shards of one length. Shown a short one it makes a longer copy, and the load would wait for the
    first touch of all memory twice; shown one that is long already it keeps it.
    """
    for tensors, name, before in replaced:
        if isinstance(before, DTensor):
            length = len(before._local_tensor)
            local = tensors[name]._local_tensor
            if len(local) > length:
                with torch.no_grad():
                    local[length:].zero_()  # travels in all-gathers: it need not be a NaN
                tensors[name]._local_tensor = local.narrow(0, 0, length)


def _longest_shard(tensor: DTensor) -> tuple[int, ...]:
    """Shape of the longest shard on any rank."""
    num_shards = tensor_layout("", tensor).num_shards
    shape = tuple(tensor._local_tensor.shape)
    return (-(-tensor.shape[0] // num_shards), *shape[1:]) if num_shards else shape


def _allocate(
    module: nn.Module,
    device: torch.device,
    memory: Mapping[torch.Tensor, torch.Tensor],
    only: Container[int] | None,
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]],
) -> None:
    """Put new tensors into the module's tables; what they replace is appended to `replaced`."""
    new: dict[torch.Tensor, torch.Tensor] = {}
    shard_device = torch.device("cpu") if is_offloaded(module) else device
    for tensors in _registries(module):
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_meta or (only is not None and id(tensor) not in only):
                continue
            if tensor not in new:
                new[tensor] = _filled_like(tensor, shard_device if isinstance(tensor, DTensor) else device, memory)
            replaced.append((tensors, name, tensor))
            tensors[name] = new[tensor]


def _registries(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The parameter and buffer tables of every submodule."""
    for _, submodule in named_submodules(module):
        yield submodule._parameters
        yield submodule._buffers


def _filled_like(
    tensor: torch.Tensor, device: torch.device, memory: Mapping[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """A tensor as `tensor`, of the memory that there is for it, or of new memory on `device`."""
    shape = _longest_shard(tensor) if isinstance(tensor, DTensor) else tuple(tensor.shape)
    value = memory.get(tensor)
    if value is None:
        value = torch.empty(shape, dtype=tensor.dtype, device=device)  # empty_like of meta takes 50 times as long
    if isinstance(tensor, DTensor):
        # As FSDP2 makes its own; `DTensor.from_local` takes ten times as long, which thousands of parameters feel.
        value = DTensor(value, tensor._spec, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # Attributes that models hang on tensors (transformers' `_is_hf_initialized`, weight-decay marks) stay, and those by
    # which torch knows a parameter or buffer of another class than `nn.Parameter` or `nn.Buffer`.
    value.__dict__.update(tensor.__dict__)
    return value
