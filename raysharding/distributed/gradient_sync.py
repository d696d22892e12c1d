"""`no_sync`: backward passes that add up gradients on each rank, before one that reduces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharding.distributed.layout import named_submodules


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's own group objects of a module and what is in it, each once, outer ones first; no collective."""
    found = (fsdp_group(submodule) for _, submodule in named_submodules(module))
    return list({id(group): group for group in found if group is not None}.values())


def fsdp_group(module: nn.Module) -> Any:
    """FSDP2's own group object of one module, which others may share; `None` where it has none."""
    # torch has no public way to read the flags that its setters set.
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def syncs_gradients(module: nn.Module) -> bool:
    """Whether the next backward reduces gradients: not inside `no_sync`; no collective."""
    return all(group.reduce_grads for group in fsdp_groups(module))


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication, for all backward passes but the last; every rank enters it alike.

    As FSDP1's `no_sync()`. Backward passes inside add full gradients up on each rank; the first one outside reduces
    the sum, once for each FSDP group, those of replicated parameters included. The gradient is then that of the mean
    over ranks, summed over the passes: equal to one large batch's if each loss is divided by the number of passes.

    Wire: nothing for gradients inside; parameters are gathered as always. Memory: each rank holds full, unsharded
    gradients between the passes, where accumulating without `no_sync` holds shards and reduces every time.

    Inside, and until a backward outside, the shards have no gradients: an optimizer step or `clip_grad_norm_` comes
    after that. To give the sum up, call `drop_unreduced_gradients`, as `train_step` does; `zero_grad` cannot see it.

    Args:
        module: The sharded root module.

    Raises:
        ValueError: On every rank, when nothing in `module` is sharded.
    """
    if not fsdp_groups(module):
        raise ValueError(f"no_sync: nothing in this {type(module).__name__} is sharded; call shard_module first")
    with gradient_sync(module, False):
        yield


@contextmanager
def gradient_sync(module: nn.Module, sync: bool) -> Iterator[None]:
    """Reduce gradients in the backward passes inside, or do not, whatever was set before; no collective.

    Args:
        module: The sharded root module.
        sync: Whether to reduce them; if not, as in `no_sync`.
    """
    groups = fsdp_groups(module)
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    _set((group, sync, sync) for group in groups)
    try:
        yield
    finally:
        _set(before)


def _set(flags: Any) -> None:
    for group, reduce, all_reduce in flags:
        group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Forget what backward passes inside `no_sync` have added up on this rank; no collective.

    FSDP2 keeps these gradients beside the shards, where neither `zero_grad` nor `reset_iter_state` finds them: after
    an accumulation that was given up they would go into the next reduction.

    Args:
        module: The sharded root module.
    """
    for group in fsdp_groups(module):
        # HSDP: reduced over the replica's shards, not yet over the replicas.
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
