"""A root's inputs come to the device it computes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from raysharding.tree import leaves, map_leaves


def move_inputs(tree: Any, device: torch.device) -> Any:
    """Copy what is not on `device` yet; containers are made anew only where something moved.

    Args:
        tree: Tensors in dicts, lists, tuples, namedtuples, dataclasses, and any mapping such as transformers'
            `BatchEncoding`. A `DTensor` stays where its mesh is; other objects are left alone.
        device: The target, with its index.

    Returns:
        `tree` itself if nothing had to move, else a tree of the same types.
    """
    if not any(_is_elsewhere(leaf, device) for _, leaf in leaves(tree, leaf=PackedSequence)):
        return tree
    return map_leaves(
        lambda _, leaf: leaf.to(device, non_blocking=True) if _is_elsewhere(leaf, device) else leaf,
        tree,
        leaf=PackedSequence,
    )


def _is_elsewhere(leaf: Any, device: torch.device) -> bool:
    if isinstance(leaf, PackedSequence):
        return leaf.data.device != device
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device != device


def move_inputs_before_forward(module: nn.Module, device: torch.device) -> None:
    """Make a root's forward move its inputs first, as FSDP1's does; each rank alone.

    FSDP2 does it on GPUs only, and for tensors in plain dicts, lists, tuples and namedtuples: it finds nothing left to
    move. A pinned tensor is copied without waiting for it.

    Args:
        module: The root, after `fully_shard`.
        device: Where it computes.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return move_inputs(args, device), move_inputs(kwargs, device)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
