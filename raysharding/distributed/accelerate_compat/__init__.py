"""accelerate's FSDP2 functions, under their names, by this library's sharding and loading.

An `accelerator` is accelerate's `Accelerator` or any object with the attributes that a function reads. Only
`FullyShardedDataParallelPlugin` needs accelerate: it is imported on first use, and not in `__all__`, so that a star
import works without accelerate.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from raysharding.distributed.accelerate_compat.environment import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from raysharding.distributed.accelerate_compat.load import fsdp2_load_full_state_dict
from raysharding.distributed.accelerate_compat.optimizer import fsdp2_switch_optimizer_parameters
from raysharding.distributed.accelerate_compat.prepare_model import fsdp2_prepare_model
from raysharding.distributed.accelerate_compat.wrap_policy import fsdp2_prepare_auto_wrap_policy
from raysharding.distributed.fully_shard import contexts_of, named_submodules
from raysharding.errors import PlanError
from raysharding.imports import lazy_names
from raysharding.torch_internals import ActivationWrapper, checkpoint_wrapper, offload_wrapper

if TYPE_CHECKING:
    from raysharding.distributed.accelerate_compat.plugin import FullyShardedDataParallelPlugin

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fsdp2_apply_ac",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
]

__getattr__, __dir__ = lazy_names(__name__, ("FullyShardedDataParallelPlugin",), ("plugin",))


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Put activation checkpointing around the modules that the wrap policy picks, in place. Not collective.

    As accelerate's function of this name: each picked module, the root left out, is replaced by torch's
    `CheckpointWrapper`, which keeps its inputs for backward and computes the rest again; under
    `activation_checkpointing_offload` by an `OffloadWrapper` around that, which keeps those inputs in host memory.
    Names in `state_dict()` stay. Call it before the model is sharded; `fsdp2_prepare_model` does not call it.

    It differs where accelerate's results do: the random state is kept, so that dropout drops the same values again
    (accelerate's gradients are of two different forwards); BatchNorm's statistics take a batch once; containers without
    a forward are left alone; a module in two places is wrapped once; wrapping twice does nothing; a plugin without a
    policy is an error that says so.

    Args:
        accelerator: Its `state.fsdp_plugin` is read.
        model: The root, not sharded yet.

    Returns:
        The same model.

    Raises:
        PlanError: (a ValueError) The plugin has no wrap policy, or names a class that the model does not have.
    """
    plugin = accelerator.state.fsdp_plugin
    predicate = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if predicate is None:
        raise PlanError(
            "activation checkpointing goes by the wrap policy, and the plugin has none: set auto_wrap_policy to "
            "'transformer_based_wrap' or 'size_based_wrap'"
        )
    modules = [module for _, module in named_submodules(model)]
    done = {
        child for module in modules if isinstance(module, ActivationWrapper) for child in (module, *module.children())
    }
    wrappers: dict[nn.Module, nn.Module] = {}
    for module in modules[1:]:
        has_forward = type(module).forward is not nn.Module.forward
        if module not in done and has_forward and predicate(module):
            wrapped = checkpoint_wrapper(module, context_fn=partial(contexts_of, module))
            wrappers[module] = offload_wrapper(wrapped) if plugin.activation_checkpointing_offload else wrapped
    for parent in modules:
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]
    return model
