"""Activation checkpointing: a module keeps its inputs for backward and runs its forward again there.

Note: why modules are not wrapped.
    torch's `CheckpointWrapper` wraps the module in another: classes, paths and `isinstance` change, and names must be
    cleaned. Here the `forward` of the module is replaced, inside the hooks of `__call__`. FSDP2's hooks therefore run
    once: backward gathers the parameters before the second forward needs them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from raysharding.config import Sharding
from raysharding.distributed.comm import is_accelerator
from raysharding.errors import PlanError
from raysharding.models import class_name
from raysharding.torch_internals import NormBase

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments of transformers' layers for the key-value cache."""

_log = logging.getLogger("raysharding")


def checkpoint_activations(
    module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding, device: torch.device
) -> None:
    """Checkpoint the modules that `Sharding.activation_checkpointing` selects. Not collective.

    Args:
        module: The root, before `fully_shard`, which changes classes.
        groups: Result of `wrap_groups`.
        sharding: Its `activation_checkpointing` and `activation_checkpointing_offload` are read.
        device: Device of the mesh.

    Raises:
        PlanError: No module has the class name.
    """
    if sharding.activation_checkpointing is False:
        return
    names = _chosen(module, groups, sharding)
    # Nested checkpointing saves no more.
    chosen = [name for name in names if not any(name.startswith(other + ".") for other in names)]
    if not chosen:
        _log.warning("activation_checkpointing: no module of %s is checkpointed", type(module).__name__)
    for name in chosen:
        submodule = module.get_submodule(name)
        forward = _Checkpointed(submodule, sharding.activation_checkpointing_offload, device)
        # The signature stays: callers inspect it for the arguments of a module.
        submodule.forward = functools.update_wrapper(forward, submodule.forward)


def _chosen(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> list[str]:
    wanted = sharding.activation_checkpointing
    modules = {name: submodule for name, submodule in module.named_modules() if name}
    if wanted is True:
        # Checkpointing a leaf saves little.
        return [name for names in groups for name in names if any(True for _ in modules[name].children())]
    if callable(wanted):
        return [name for name, submodule in modules.items() if wanted(submodule)]
    assert not isinstance(wanted, bool), "the caller handles False"
    classes = {name: class_name(submodule) for name, submodule in modules.items()}
    if missing := [name for name in wanted if name not in classes.values()]:
        names = ", ".join(sorted(set(classes.values())))
        raise PlanError(f"activation_checkpointing names {missing}, but no module has such a class; they have {names}")
    return [name for name, found in classes.items() if found in wanted]


class _Checkpointed:
    """Replacement of a module's `forward`."""

    def __init__(self, module: nn.Module, offload: bool, device: torch.device) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._offload = offload
        self._pins = is_accelerator(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # transformers' own option does the same; both together would run the forward a third time.
        if not torch.is_grad_enabled() or getattr(self._module, "gradient_checkpointing", False):
            return self._forward(*args, **kwargs)
        if any(kwargs.get(name) is not None for name in _CACHES):
            if not self._module.training:
                return self._forward(*args, **kwargs)
            kwargs = self._without_caches(kwargs)
        names = tuple(kwargs)
        num_args = len(args)

        def run(*values: Any) -> Any:
            return self._forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        # All as positional arguments: only those pass through the hooks that move inputs to host memory.
        with save_on_cpu(pin_memory=self._pins) if self._offload else nullcontext():
            contexts = functools.partial(contexts_of, self._module)
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    def _without_caches(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove caches, as transformers does: the second forward would write into a cache again."""
        for name in _CACHES:
            length = getattr(kwargs.get(name), "get_seq_length", lambda: 0)()
            if length:
                raise ValueError(
                    f"{name} holds {length} positions: a module under activation_checkpointing takes no filled cache "
                    "in training; leave it out, call eval(), or shard without activation_checkpointing"
                )
        dropped = {name: None for name in _CACHES if name in kwargs}
        return {**kwargs, **dropped, **({"use_cache": False} if "use_cache" in kwargs else {})}


def contexts_of(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first and second forward, for torch's `context_fn`."""
    return nullcontext(), _UnchangedStatistics(module)


class _UnchangedStatistics:
    """Keeps BatchNorm's running statistics unchanged in the second forward. Entered once per backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        norms = [inner for inner in self._module.modules() if isinstance(inner, NormBase) and inner.training]
        self._kept = [(norm._buffers, dict(norm._buffers)) for norm in norms]
        for buffers, kept in self._kept:
            buffers.update({name: one.clone() for name, one in kept.items() if one is not None})

    def __exit__(self, *_: object) -> None:
        for buffers, kept in self._kept:
            buffers.update(kept)
