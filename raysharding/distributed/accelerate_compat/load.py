"""Loading of rank 0's tensors into a sharded module, under the names of its `state_dict()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm import agreeing, get_rank, require_group
from raysharding.distributed.fully_shard import mark_offloaded, materialize, message_device, over_ranks_of, reshard
from raysharding.distributed.loading import distribute_state_dict
from raysharding.distributed.transfer import saved_tensors, tied_names
from raysharding.models import clean_name


@over_ranks_of("model")
def fsdp2_load_full_state_dict(
    accelerator: Any,
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    cpu_offload: bool = False,
    *,
    timeout_s: float = 120.0,
) -> nn.Module:
    """Load a full state dict, held by rank 0, into a sharded model in place; collective.

    As accelerate's function of this name, by `distribute_state_dict`. For buffers, a dict of another dtype than the
    model's, or a key that is missing on rank 0, accelerate's function fails or hangs; this function works, or raises on
    every rank. The model keeps dtypes and ties.

    Args:
        accelerator: accelerate's `Accelerator`, the process group of the model's mesh, or `None`: it is only checked.
        model: Sharded with FSDP2 (1-D or HSDP), here or by others; on meta or real. Checkpoint wrappers
            and compiled modules may be in it.
        full_sd: On rank 0 name → full tensor, as `model.state_dict()` names them before sharding; one name of a tied
            tensor is enough. Ignored on the other ranks: pass an empty dict.
        cpu_offload: Put the shards of a model on meta into host memory, as its `CPUOffloadPolicy` wants.
        timeout_s: Longest wait for one item or bucket.

    Returns:
        The same model. Wire: each shard once to each rank that holds it. Memory above the shards: two buckets of 32
        MiB, and on rank 0 one item where items load on access.

    Raises:
        PlanError: On every rank, before data moves: each key that is missing or does not fit. A model that was on meta
            is there again. Keys that the model has no place for are a UserWarning on rank 0 (accelerate says nothing).
        ValueError: On every rank: a process group of other ranks than the mesh.
    """
    if isinstance(accelerator, dist.ProcessGroup):
        require_group(accelerator)
    if cpu_offload:
        mark_offloaded(model)
    # A rank that raised alone would leave the others in the load.
    with agreeing():
        values = _by_own_names(model, full_sd) if get_rank() == 0 else {}
    fill(model, saved_tensors, values, timeout_s)
    return model


def fill(
    model: nn.Module,
    collect: Callable[[nn.Module], dict[str, torch.Tensor]],
    values: Mapping[str, torch.Tensor],
    timeout_s: float = 120.0,
) -> None:
    """Copy rank 0's values into the tensors of a sharded model; collective.

    Args:
        model: The model; tensors on meta get memory, if `collect` returns them.
        collect: Function that returns the tensors by name, each once: `saved_tensors` or `module_tensors`.
        values: On rank 0 name, as from `collect` → full tensor.
        timeout_s: Longest wait for one item or bucket.

    Raises:
        PlanError: On every rank, before data moves; what was on meta is there again.
    """
    reshard(model)
    wanted = {id(tensor) for tensor in collect(model).values()}
    with ExitStack() as on_error:
        # A rank without memory must not leave the others in the load.
        with agreeing():
            on_error.callback(materialize(model, message_device(model), only=wanted))
        distribute_state_dict(values, collect(model), timeout_s=timeout_s)
        on_error.pop_all()


def _by_own_names(model: nn.Module, full_sd: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict under the FQNs of the model, without second names of tied tensors."""
    first_of = {**{name: name for name in saved_tensors(model)}, **tied_names(model)}
    present = {clean_name(key): key for key in full_sd}
    keys: dict[str, str] = {}
    for name, first in first_of.items():
        if name in present:
            keys.setdefault(first, present[name])
    if unused := sorted(key for name, key in present.items() if name not in first_of):
        more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
        message = f"the state dict holds what {type(model).__name__} has no place for: {', '.join(unused[:6])}{more}"
        warnings.warn(message, UserWarning, stacklevel=5)
    return {name: full_sd[key] for name, key in keys.items()}
