"""Sharded modules for users with their own launcher: wrapping, and distribution of rank 0's tensors.

    mesh = init_mesh("cuda")
    with torch.device("meta"):
        model = DistModule(Model())
    apply_fsdp2(model, mesh)
    model.load_state_dict(load_state_dict("model.safetensors"))     # on every rank; only rank 0 reads

All functions use the same stream as `load_checkpoint`, which is faster if every rank sees the files: each rank then
reads its own part.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import read_state_dict
from raysharding.distributed.accelerate_compat.patch import AcceleratePatch, FileStateDict
from raysharding.distributed.comm import current_group, get_rank, rank_name, require_member
from raysharding.distributed.fully_shard import inner_tensor, meta_like, over_ranks_of
from raysharding.distributed.loading import distribute_state_dict, load_full_state_dict
from raysharding.torch_internals import IncompatibleKeys

# Extra state is not delegated: torch assumes it if a class overrides `get_extra_state`.
_OWN = {
    "forward",
    "load_state_dict",
    "get_extra_state",
    "set_extra_state",
    "register_backward_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
}
"""Public methods of `nn.Module` that act on the `DistModule` itself."""


class DistModule(nn.Module):
    """A proxy of a module, whose `load_state_dict` distributes rank 0's tensors.

    Reading and writing attributes, `parameters`, `named_*`, `buffers`, `modules`, `train`, `to_empty` and the rest of
    `nn.Module`'s methods act on the wrapped module, under names without a prefix; `forward` calls it. Hooks that are
    registered on a `DistModule` are its own.

    Args:
        module: The module, before or after `apply_fsdp2`; it is not copied. A `DistModule` counts as its module.
    """

    module: nn.Module
    """The wrapped module."""

    def __init__(self, module: nn.Module) -> None:
        while isinstance(module, DistModule):
            module = module.module
        if not isinstance(module, nn.Module):
            raise ValueError(f"DistModule({type(module).__name__}): give a torch.nn.Module")
        # The set-up of nn.Module sets attributes of this object, not of the wrapped module.
        object.__setattr__(self, "_is_ready", False)
        super().__init__()
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "_is_ready", True)
        del self.__dict__["training"]
        # Code that reads a module's tables, such as torch's, must see those of the wrapped module.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, table, getattr(module, table))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, timeout_s: float = 120.0
    ) -> IncompatibleKeys:
        """Distribute rank 0's full state dict into the wrapped module; collective.

        The interface is that of `torch.nn.Module.load_state_dict`.

        Args:
            state_dict: On rank 0 FQN → full tensor (parameters and persistent buffers), on any device; a mapping whose
                items load on access can be larger than memory. Ignored on the other ranks, which can pass an empty
                dict. Extra state is set on every rank. `load_state_dict` post-hooks of the modules run at the end;
                pre-hooks do not run, because no module gets a state dict of its own.
            strict: True if missing and unexpected keys are errors. If False, missing tensors stay as they are.
            assign: False: tensors of the module keep dtype and device, and tensors on meta get memory on the device of
                the mesh (torch would silently do nothing). True: new tensors with the incoming dtypes.
            timeout_s: Longest wait for one item or bucket, in seconds.

        Returns:
            `missing_keys` and `unexpected_keys`, the same on every rank. Wire: each shard once to each rank that holds
            it. Memory above the shards: two buckets of 32 MiB, and on rank 0 one item where items load on access.

        Raises:
            PlanError: On every rank, before data moves, with all mismatches of keys, shapes and kinds of dtype. A
                ValueError, where torch raises a RuntimeError on one rank.
            RuntimeError: From the process group, if a rank times out.
        """
        values = state_dict.rank_0_values if isinstance(state_dict, FileStateDict) else state_dict
        return load_full_state_dict(self.module, values, strict=strict, assign=assign, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this object lacks.
        if "module" not in self.__dict__:
            raise AttributeError(f"DistModule has no attribute {name!r} yet")
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_is_ready"):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        return f"DistModule({self.module!r})"

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]  # as the wrapped module has it, or its TypeError

    def __bool__(self) -> bool:
        return True  # an empty container is a module, too

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]  # as above


def _delegate(name: str) -> Any:
    def call(self: DistModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        # Methods such as `to` return the module; `get_submodule("")` is asked for the wrapped one.
        return self if result is self.module and name != "get_submodule" else result

    call.__name__ = name
    call.__qualname__ = f"DistModule.{name}"
    call.__doc__ = f"The wrapped module's `{name}`."
    return call


for _name, _method in vars(nn.Module).items():
    if callable(_method) and _name not in _OWN and (_name == "_apply" or not _name.startswith("_")):
        setattr(DistModule, _name, _delegate(_name))


def load_state_dict(
    checkpoint_file: str | os.PathLike[str],
    device_map: str | int | torch.device | Mapping[str, str | int | torch.device] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Read a checkpoint file on rank 0, like accelerate's function of that name. Not collective.

    Args:
        checkpoint_file: A `.safetensors` file, or a file of `torch.save`, which is read with `weights_only=True`.
        device_map: Device of all tensors, or module-name prefix → device (the longest matching prefix counts, `""` is
            the whole model, and the default is the CPU). Default: the CPU, where values are mapped pages of the file,
            read on access: a file can be larger than memory.
        group: Process group whose rank 0 reads: that of the module's mesh. Default: the current group, of all ranks.

    Returns:
        On rank 0, and in a process without a process group, FQN → full tensor; on the other ranks an empty dict.

    Raises:
        CheckpointError: On rank 0 only: the file is unreadable or unsafe.
        ValueError: On rank 0 only: `device_map` names an unknown device.
    """
    require_member(group)
    if dist.is_initialized() and dist.get_rank(group or current_group()) != 0:
        return {}
    return read_state_dict(checkpoint_file, device_map)


def patch_accelerate() -> AcceleratePatch:
    """Make `accelerate.load_checkpoint_in_model(DistModule(m), checkpoint)` read on rank 0 only, and distribute.

    The patch is active from the call on, or inside `with patch_accelerate():`, and also covers
    `load_checkpoint_and_dispatch`. For a `DistModule` these functions are collective, file by file, with or without
    `broadcast_from_rank0`; missing keys stay as they are, as under `strict=False`. Tensors on meta get the dtypes of
    the files, as torch's `set_model_state_dict` requires. accelerate loads other modules as without the patch.

    Returns:
        The patch; `restore()` removes it.

    Raises:
        ModuleNotFoundError: accelerate is not installed.
    """
    return AcceleratePatch(DistModule)


@over_ranks_of("meta_sharded_state_dict")
def broadcast_and_shard_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    meta_sharded_state_dict: Mapping[str, torch.Tensor],
    sharded_state_dict: dict[str, torch.Tensor],
    *,
    timeout_s: float = 120.0,
) -> None:
    """Send each rank its shards of rank 0's state dict, and keep rank 0's own; collective, on rank 0.

    The other ranks call `shard_broadcasted_state_dict`. The result is ready for `load_state_dict(assign=True)`.

    Args:
        state_dict: FQN → full tensor on any device; items may load on access. Has the keys of
            `meta_sharded_state_dict`; other names of tied tensors may be left out.
        meta_sharded_state_dict: FQN → DTensor or replicated tensor: the `state_dict()` of the sharded module, on meta
            or real; not written to. The result has the dtypes of its tensors.
        sharded_state_dict: Filled with this rank's shards, on the device of the mesh; existing keys are replaced.
        timeout_s: Longest wait for one item or bucket, in seconds.

    Raises:
        ValueError: At once on a rank other than 0; the other ranks then wait until the process group times out.
        PlanError: On every rank, before data moves, with all mismatches of keys, shapes and kinds of dtype.
    """
    if get_rank() != 0:
        raise ValueError(f"rank {rank_name(get_rank())} has no full state dict: call shard_broadcasted_state_dict")
    _distribute(state_dict, meta_sharded_state_dict, sharded_state_dict, timeout_s)


@over_ranks_of("meta_sharded_state_dict")
def shard_broadcasted_state_dict(
    meta_sharded_state_dict: Mapping[str, torch.Tensor],
    sharded_state_dict: dict[str, torch.Tensor],
    *,
    timeout_s: float = 120.0,
) -> None:
    """Receive this rank's shards from `broadcast_and_shard_state_dict` on rank 0; collective, on the other ranks.

    Args:
        meta_sharded_state_dict: As on rank 0.
        sharded_state_dict: Filled with this rank's shards.
        timeout_s: As on rank 0.

    Raises:
        ValueError: On rank 0, at once.
        PlanError: On every rank, before data moves, with all mismatches.
    """
    if get_rank() == 0:
        raise ValueError("rank 0 has the full state dict: call broadcast_and_shard_state_dict")
    _distribute({}, meta_sharded_state_dict, sharded_state_dict, timeout_s)


def _distribute(
    state_dict: Mapping[str, torch.Tensor],
    meta_sharded_state_dict: Mapping[str, torch.Tensor],
    sharded_state_dict: dict[str, torch.Tensor],
    timeout_s: float,
) -> None:
    # Other names of a tied tensor share its memory, on meta too. The load identifies tensors by object, and finds a
    # value under any name.
    first_names: dict[tuple[int, ...], str] = {}
    first = {name: first_names.setdefault(_memory_of(tensor), name) for name, tensor in meta_sharded_state_dict.items()}
    made = {name: meta_like(meta_sharded_state_dict[name]) for name in first_names.values()}
    loaded = distribute_state_dict(state_dict, {name: made[first[name]] for name in first}, timeout_s=timeout_s)
    num_names = Counter(first.values())
    kept: dict[str, torch.Tensor] = {}
    for name, value in loaded.items():
        if (key := first[name]) not in kept:
            # `load_state_dict(assign=True)` makes a Parameter of each plain DTensor, and so two of a tied one.
            is_tied_parameter = num_names[key] > 1 and isinstance(value, DTensor) and value.is_floating_point()
            kept[key] = nn.Parameter(value) if is_tied_parameter else value
        sharded_state_dict[name] = kept[key]


def _memory_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the identity of a tensor's memory, equal for tied tensors."""
    local = inner_tensor(tensor)
    return local.untyped_storage()._cdata, local.storage_offset(), *tensor.shape


__all__ = [
    "DistModule",
    "broadcast_and_shard_state_dict",
    "load_state_dict",
    "patch_accelerate",
    "shard_broadcasted_state_dict",
]
