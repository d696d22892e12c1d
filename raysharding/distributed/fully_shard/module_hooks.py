"""Hooks and wrappers around the forward of modules: precision, compilation, input devices, prefetching.

- BatchNorm under mixed precision computes in the dtype that it is stored in, between modules that compute in another.
- `Sharding.compile`: `torch.compile` of the blocks, one by one.
- A root's inputs are moved to the device that it computes on.
- FSDP1's `forward_prefetch` and `backward_prefetch`, which issue a group's all-gather ahead of time, on FSDP2.
- `warn_once`: a warning that is given at the first call only.

Note: effect of the two prefetch options.
    FSDP2 issues each all-gather on a stream of its own and, in backward, one group ahead (`BACKWARD_PRE`). Explicit
    prefetching issues it earlier from the CPU, or further ahead. On CPUs an all-gather is waited for where it is
    issued, so that prefetching only moves it, and holds more memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from raysharding.config import Sharding
from raysharding.distributed.comm import device_module, is_accelerator
from raysharding.distributed.fully_shard.execution_order import last_execution_order
from raysharding.distributed.fully_shard.internals import cast_floating
from raysharding.tree import leaves, map_leaves


def compile_blocks(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> None:
    """Compile the forwards of the FSDP groups that have modules inside; each rank alone, no collective.

    Only `forward` is compiled: the hooks around it, which gather and free the parameters, run as they are. Alike
    blocks share what was compiled for the first of them.

    Args:
        module: The root, before activations are checkpointed: what is computed again is compiled, too.
        groups: Result of `wrap_groups`.
        sharding: Its `compile` is read.
    """
    if sharding.compile is False:
        return
    backend = "inductor" if sharding.compile is True else sharding.compile
    for names in groups:
        for block in map(module.get_submodule, names):
            if any(True for _ in block.children()):
                # The signature stays: callers inspect it to find out which arguments a module takes.
                compiled = torch.compile(block.forward, backend=backend)
                block.forward = functools.update_wrapper(compiled, block.forward)


def leave_hooks_out(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> None:
    """Keep dynamo out of this library's hooks on modules inside compiled blocks; each rank alone.

    After a graph break dynamo compiles every function that runs, and fails in a hook when a weak reference dies.

    Args:
        module: The root, with all hooks.
        groups: Result of `wrap_groups`.
        sharding: Its `compile` is read.
    """
    blocks = [module.get_submodule(name) for names in groups for name in names] if sharding.compile is not False else []
    inner = {one for block in blocks for one in block.modules() if one is not block}
    for hooks in (hooks for one in inner for hooks in (one._forward_pre_hooks, one._forward_hooks)):
        for key, hook in hooks.items():
            if str(getattr(hook, "func", hook).__module__).startswith("raysharding."):
                hooks[key] = torch.compiler.disable(hook)


def move_inputs(tree: Any, device: torch.device) -> Any:
    """Copy what is not on `device` yet; containers are made anew only where something moved.

    Args:
        tree: Tensors in dicts, lists, tuples, namedtuples, dataclasses, and any mapping such as transformers'
            `BatchEncoding`. A `DTensor` stays where its mesh is; other objects are left alone.
        device: The target, with its index.

    Returns:
        `tree` itself if nothing had to move, else a tree of the same types. On an accelerator, strided tensors of the
        host come by way of page-locked memory, on a stream for copies: neither the host nor the copy waits for what the
        current stream holds, such as the step before.
    """

    def moved(_: str, leaf: Any) -> Any:
        values = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if not isinstance(values, torch.Tensor) or isinstance(values, DTensor) or values.device == device:
            return leaf
        is_plain = values is leaf and leaf.layout == torch.strided and leaf.device.type == "cpu"
        if not (is_accelerator(device) and is_plain):
            return leaf.to(device, non_blocking=True)
        with device_module(device).stream(copies := _copy_stream(device)):
            # `pin_memory` keeps strides, and cannot fill what overlaps itself, such as expanded positions.
            pinned = leaf if leaf.is_pinned() else torch.empty_like(leaf, pin_memory=True).copy_(leaf)
            copy = pinned.to(device, non_blocking=True)
        current = device_module(device).current_stream(device)
        current.wait_stream(copies)
        copy.record_stream(current)  # its memory is of the other stream, which would give it out again too soon
        return copy

    return map_leaves(moved, tree, is_leaf=lambda one: isinstance(one, PackedSequence))


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    stream: torch.Stream = device_module(device).Stream(device)
    return stream


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


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Give a UserWarning, the first time only that this process has this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=4)


_UNCAST = ("position_embeddings",)
"""Arguments of transformers' layers whose dtype the model chooses: Ernie 4.5 rotates by cosines in fp32."""


def cast_inputs_before_forward(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a forward cast its floating inputs first, as FSDP2 does, but for `_UNCAST`; each rank alone.

    Args:
        module: A module of an FSDP group.
        dtype: The dtype that the group computes in.
    """

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        others = {key: value for key, value in kwargs.items() if key not in _UNCAST}
        chosen = _floating([kwargs.get(key) for key in _UNCAST])
        is_cast = all(leaf.dtype == dtype for leaf in _floating((args, others)))
        if is_cast and not any(hasattr(leaf, "_follows_inputs") for leaf in chosen):
            return args, kwargs
        for leaf in chosen:
            # The model made it for hidden states in a wider dtype, and gives it to the later blocks, too.
            leaf._follows_inputs = True
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def keep_full_precision(module: nn.Module) -> None:
    """Cast a module's floating inputs to the dtype it is stored in, and its outputs back; each rank alone.

    As FSDP1 does with `MixedPrecision._module_classes_to_ignore`, which casts to fp32 whatever the module is stored in.

    Args:
        module: After `fully_shard` with a policy that keeps the stored dtype.
    """
    outside: list[torch.dtype] = []  # the inputs' own, of the last forward

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Of the parameters, or of the running statistics; fp32 where there are neither.
        stored = _floating([*module._parameters.values(), *module._buffers.values()])
        inside = stored[0].dtype if stored else torch.float32
        outside[:] = [leaf.dtype for leaf in _floating((args, kwargs)) if leaf.dtype != inside]
        return cast_floating(args, inside), cast_floating(kwargs, inside)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, outside[-1]) if outside else output

    # Behind FSDP2's hooks: after the parameters are gathered, and before they are freed.
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _floating(tree: Any) -> list[Any]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def set_prefetching(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> None:
    """Apply `forward_prefetch` and `backward_prefetch`; each rank alone, no collective.

    Args:
        module: The root, after `fully_shard` and `record_execution_order`.
        groups: What `wrap_groups` chose.
        sharding: Its two fields are read.
    """
    first = [*(module.get_submodule(names[0]) for names in groups), module]
    heads = [head for head in first if isinstance(head, FSDPModule)]  # all of them
    when = sharding.backward_prefetch
    name = (when.name if isinstance(when, Enum) else when or "").lower()
    if name == "backward_post":
        warn_once(
            "backward_prefetch='backward_post': FSDP2 gathers the next group before this one's gradients are computed, "
            "or when it is needed; it is taken as None, which needs as little memory"
        )
    if name != "backward_pre":
        for head in heads:
            # An empty list means FSDP2's own choice; a group that is gathered already costs nothing.
            head.set_modules_to_backward_prefetch([head])
    if sharding.forward_prefetch and groups:
        _prefetch_after_first_forward(module, heads, int(sharding.forward_prefetch))


def _prefetch_after_first_forward(module: nn.Module, heads: Sequence[FSDPModule], num_ahead: int) -> None:
    """Set what each group prefetches in forward, once the first forward of the root has shown the order."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        order = list(dict.fromkeys(last_execution_order(module)))
        for place, index in enumerate(order):
            ahead = order[place + 1 : place + 1 + num_ahead]
            heads[index].set_modules_to_forward_prefetch([heads[other] for other in ahead])

    handle = module.register_forward_hook(after)
