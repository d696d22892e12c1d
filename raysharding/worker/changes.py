"""Whether anybody changed a module or its optimizer: torch counts the writes to every tensor, the rest is compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import inner_tensor, named_submodules, parameter_groups


class Version(NamedTuple):
    """What a rank holds, as far as two states of it can be told apart."""

    writes: int
    """In-place writes to this rank's shards, buffers and optimizer state so far."""
    trained: tuple[bool, ...]
    """Which tensors require gradients."""
    optimizer: int
    """The optimizer's identity; it may be replaced."""
    hyperparameters: tuple[str, ...]
    """The optimizer's, group by group: a schedule sets them, and no tensor is written."""


def version(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Version:
    """Say what this rank holds; no collective.

    Two equal versions have no change between them, but for what went through `.data` or a pointer, which nobody counts.

    Args:
        module: The root module.
        optimizer: Over its parameters, where there is one.
    """
    held = list(_held(module))
    kept = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return Version(
        sum(_writes(tensor) for tensor in (*held, *kept) if isinstance(tensor, torch.Tensor)),
        tuple(tensor.requires_grad for tensor in held),
        id(optimizer),
        () if optimizer is None else tuple(map(_hyperparameters, optimizer.param_groups)),
    )


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    """Shards, and what is not sharded. Tied ones come more than once: one walk, for each call asks."""
    copies: set[int] = set()
    for _, submodule in named_submodules(module):
        for item in chain.from_iterable(parameter_groups(submodule)):
            yield item.shard
            # A gathered parameter is a copy, and what is written into it is lost. A group's modules come before what
            # is inside them, so before any place where its parameters are registered.
            if item.is_registered:
                copies.add(id(item.full))
        for tensor in (*submodule._parameters.values(), *submodule._buffers.values()):
            if tensor is not None and not isinstance(tensor, DTensor) and id(tensor) not in copies:
                yield tensor


def _hyperparameters(group: dict[str, Any]) -> str:
    return repr([(name, _plain(value)) for name, value in group.items() if name != "params"])


def _plain(value: Any) -> Any:
    # A tensor's value may be on a GPU: to read it would wait for all that was queued there.
    return (id(value), _writes(value)) if isinstance(value, torch.Tensor) else value


def _writes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        # Writes to a DTensor are counted by itself, those to what `to_local` gives by the tensor inside.
        return tensor._version + _writes(inner_tensor(tensor))
    # An inference tensor has no counter, and nobody can write to it outside inference mode.
    return 0 if tensor.is_inference() else tensor._version
