"""Making a module right again after an exception that every rank raised, and running it without leaving a trace.

A sharded module that outlives its process group: `rejoin` gives it the groups of a new one, shards untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raysharding.config import Sharding
from raysharding.distributed.comm import init_mesh
from raysharding.distributed.fully_shard.execution_order import forget_execution_order
from raysharding.distributed.fully_shard.internals import (
    drop_unreduced_gradients,
    fsdp_modules,
    has_run,
    renew_process_groups,
    reshard,
)
from raysharding.distributed.fully_shard.layout import computes_on_cuda
from raysharding.distributed.fully_shard.same_parameters import compare_before_forward


def recover(module: nn.Module, *, in_backward: bool) -> bool:
    """Drop what an aborted forward or backward left in a module. Every rank calls it, after the same exception.

    After an exception inside backward FSDP2 is silently wrong: later gradients stay unreduced. `reset_iter_state`
    repairs that, and the gradients have to go before it (they would be taken for accumulated ones) and after it (the
    reset may finish a reduction that was under way). After an exception in forward or in the loss FSDP2 is right.

    Args:
        module: The root module.
        in_backward: Whether the exception came out of backward.

    Returns:
        Whether later steps are right. False only where this torch has no `reset_iter_state` and backward was aborted.
    """
    # Groups that were inside backward have their full parameters registered: this drops the gradients of those,
    # which resharding would hide from the `zero_grad` below and keep for the next backward.
    module.zero_grad(set_to_none=True)
    roots = fsdp_modules(module, root_only=True)  # which own the iteration state
    has_reset = all(hasattr(root, "reset_iter_state") for root in roots)
    for root in roots if has_reset else []:
        # Before its first forward a root has no iteration state, and resetting that raises.
        if has_run(root):
            root.reset_iter_state()
    reshard(module)
    module.zero_grad(set_to_none=True)
    drop_unreduced_gradients(module)
    if computes_on_cuda(module):
        torch.cuda.synchronize()  # nothing before this tells a dead context from one that works
    return has_reset or not in_backward


def reset(module: nn.Module, *, in_backward: bool = True) -> bool:
    """`recover` where a whole call has failed: no rank goes on with it. Each rank alone, no collective.

    Args:
        module: The root module.
        in_backward: As for `recover`. Default: nobody knows.

    Returns:
        As `recover`.
    """
    is_right = recover(module, in_backward=in_backward)
    # Ranks may have failed at different places: what they ran says nothing about the next forward.
    forget_execution_order(module)
    return is_right


def recover_after(error: BaseException, module: nn.Module, *, in_backward: bool) -> bool:
    """`reset` for use in an `except` block: a failure of its own is noted on `error`, which stays the cause.

    Returns:
        Whether later steps are right; false where `reset` failed, or a device has.
    """
    try:
        return reset(module, in_backward=in_backward) and not is_device_error(error)
    except Exception as failure:  # noqa: BLE001 - the user's error is the one to report
        error.add_note(f"raysharding: resetting the module failed too: {type(failure).__name__}: {failure}")
        return False


def is_device_error(error: BaseException | None) -> bool:
    """Return True if a GPU raised an exception, or its cause: what is on it cannot be used any more."""
    return error is not None and (isinstance(error, torch.AcceleratorError) or is_device_error(error.__cause__))


@contextmanager
def module_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put every submodule into train or eval mode, and each back into its own mode at the end."""
    changed = [submodule for submodule in module.modules() if submodule.training != training]
    for submodule in changed:
        submodule.training = training
    try:
        yield
    finally:
        for submodule in changed:
            submodule.training = not training


@contextmanager
def without_trace(module: nn.Module) -> Iterator[None]:
    """Run forwards in eval mode, without gradients, leaving modes and random-number state as they were."""
    with module_mode(module, training=False), torch.random.fork_rng(devices=generator_devices(module)), torch.no_grad():
        yield


def generator_devices(module: nn.Module) -> list[int]:
    """GPUs whose random generators a module's forward draws from, for `fork_rng`, which knows the CPU's."""
    return [torch.cuda.current_device()] if computes_on_cuda(module) else []


def rejoin(module: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Make a module work in the default process group, after the one that it was sharded in is gone. Collective.

    Nothing is copied, nothing is sent but what makes the groups: parameters, hooks, and the optimizers that hold the
    parameters stay what they are. Gradients are dropped.

    Args:
        module: The root module.
        mesh: The mesh that it was sharded over, by `init_mesh`; the same ranks have the same numbers now.
        sharding: The one that `mesh` was made with.

    Raises:
        RuntimeError: The new groups cannot take the old ones' place; the module must be built again.
    """
    renewed = init_mesh(mesh.device_type, sharding)
    renew_process_groups(module, mesh, renewed)
    # Only now: what an aborted backward left may have to be reduced before it is dropped.
    if not reset(module):
        raise RuntimeError("this torch cannot reset a module after an aborted backward")
    compare_before_forward(module)  # the first comparison may have ended on some ranks only


_UNUSABLE = "raysharding: this rank's module or optimizer was left half-way; restart the group before the next step"
_RESET = "raysharding: the module was reset; if every rank raised this error, later steps are right"


def mark_recovery(error: BaseException, usable: bool, *, torn: bool) -> None:
    """Say on an exception what it left behind: in a note, and for code in attributes.

    Args:
        error: The exception.
        usable: Whether the module is right for later steps, given that every rank raised this.
        torn: Whether weights or optimizer state were changed in part.
    """
    error.add_note(_RESET if usable else _UNUSABLE)
    error.raysharding_recovered = usable  # type: ignore[attr-defined]
    error.raysharding_torn = torn  # type: ignore[attr-defined]


def is_recoverable(error: BaseException) -> bool:
    """Whether a group may go on after this exception, given that every rank raised it alike."""
    return bool(getattr(error, "raysharding_recovered", True)) and not is_device_error(error)


def is_torn(error: BaseException) -> bool:
    """Whether an exception left weights or optimizer state changed in part."""
    return bool(getattr(error, "raysharding_torn", False))
