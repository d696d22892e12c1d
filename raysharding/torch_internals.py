"""torch's private names that several rooms use; FSDP2's are in `fully_shard/internals.py`, DTensor's in `layout.py`.

Seen in torch 2.13. torch has no public name for any of them, so there is no fallback: a name that torch moves
fails at import, here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp.wrap import _recursive_wrap as recursive_wrap
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode

_UNSIGNED = 1 << 64


def saved(node: Any, name: str) -> Any:
    """Return what a node of the autograd graph saved under `name`; a dim as the caller gave it, maybe negative.

    Reading a tensor of a checkpointed region computes the region anew.
    """
    value = getattr(node, f"_saved_{name}")
    return tuple(map(_signed, value)) if isinstance(value, tuple) else _signed(value)


def saved_tensors_hooks() -> Any:
    """Return the hooks through which autograd saves tensors now, such as those of a checkpoint; `None` without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _signed(value: Any) -> Any:
    is_wrapped = isinstance(value, int) and value >= _UNSIGNED >> 1
    return value - _UNSIGNED if is_wrapped else value


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    """Return the shape of a forward result: of output number `output` of the operation that made the node."""
    return tuple(node._input_metadata[output].shape)


def num_process_groups() -> int:
    """Return the number of process groups that this process is in."""
    return len(_world.pg_names)


@contextmanager
def no_bound_device() -> Iterator[None]:
    """Make groups that connect by themselves: NCCL would split the default group, in a call of all its ranks."""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
