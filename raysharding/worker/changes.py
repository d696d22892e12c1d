"""Detection of changes to a module or its optimizer: torch counts the writes to a tensor; other state is compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import named_submodules, num_writes, parameter_groups

Version = tuple[object, ...]
"""State of a rank's module and optimizer, as far as changes to it can be detected."""


def version(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Version:
    """Return the version of this rank's module and optimizer. No collective.

    If two versions are equal, nothing changed between them, except through `.data` or a pointer: torch does not count
    such writes.

    Args:
        module: The root module.
        optimizer: The optimizer over the module's parameters, if any.
    """
    held = list(_held(module))
    trained = tuple(tensor.requires_grad for tensor in held)
    if optimizer is None:
        return sum(map(num_writes, held)), trained
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    # A schedule sets hyperparameters without a write to a tensor; and the optimizer may be another one.
    return sum(map(num_writes, (*held, *kept))), trained, id(optimizer), *map(_hyperparameters, optimizer.param_groups)


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield shards and unsharded tensors; tied ones repeatedly. Every call needs them, so one walk must suffice."""
    copies: set[int] = set()
    for _, submodule in named_submodules(module):
        for item in chain.from_iterable(parameter_groups(submodule)):
            yield item.shard
            # A gathered parameter is a copy, and writes to the copy are lost. A group's modules precede the modules
            # inside them, and so precede every module that registers the group's parameters.
            if item.is_registered:
                copies.add(id(item.full))
        for tensor in (*submodule._parameters.values(), *submodule._buffers.values()):
            if tensor is not None and not isinstance(tensor, DTensor) and id(tensor) not in copies:
                yield tensor


def _hyperparameters(group: dict[str, Any]) -> str:
    return repr([(name, _plain(value)) for name, value in group.items() if name != "params"])


def _plain(value: Any) -> Any:
    # A tensor's value may be on a GPU: a read would wait for all work queued there.
    return (id(value), num_writes(value)) if isinstance(value, torch.Tensor) else value
