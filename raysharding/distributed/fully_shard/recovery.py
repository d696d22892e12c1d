"""Recovery of a module after an exception on all ranks, and forwards without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from raysharding.distributed.comm import device_module, is_accelerator
from raysharding.distributed.fully_shard.execution_order import forget_execution_order
from raysharding.distributed.fully_shard.internals import (
    drop_unreduced_gradients,
    fsdp_modules,
    reset_iteration,
    reshard,
)
from raysharding.distributed.fully_shard.layout import compute_device


def reset(module: nn.Module) -> None:
    """Reset a module after a call failed as a whole: no rank continues it. Not collective.

    After an exception inside backward FSDP2 is silently wrong: later gradients are not reduced. `reset_iteration`
    repairs that. Gradients must be dropped before it (they would count as accumulated) and after it (it may finish a
    pending reduction).

    Args:
        module: The root module.
    """
    # Groups that were inside backward have registered full parameters: this drops the gradients of these, which
    # resharding would hide from the `zero_grad` below and keep for the next backward.
    module.zero_grad(set_to_none=True)
    drop_unreduced_gradients(module)
    for root in fsdp_modules(module, root_only=True):  # roots own the iteration state
        reset_iteration(root)
    reshard(module)
    module.zero_grad(set_to_none=True)
    device = compute_device(module)
    if is_accelerator(device):
        device_module(device).synchronize(device)  # raises if the device is unusable
    # Ranks may have failed at different places: their records are irrelevant to the next forward.
    forget_execution_order(module)


def recover_after(error: BaseException, module: nn.Module) -> bool:
    """Call `reset` in an `except` block; an error of `reset` becomes a note on `error`.

    Returns:
        True if later steps are correct; False if `reset` or a device failed.
    """
    try:
        reset(module)
        return not is_device_error(error)
    except Exception as failure:  # noqa: BLE001 - the user's error is the one to report
        error.add_note(f"raysharding: resetting the module failed too: {type(failure).__name__}: {failure}")
        return False


def is_device_error(error: BaseException | None) -> bool:
    """Return True if an exception, or its cause, is a GPU error, after which data on the GPU is unusable."""
    return error is not None and (isinstance(error, torch.AcceleratorError) or is_device_error(error.__cause__))


@contextmanager
def module_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set train or eval mode on all submodules, and restore the mode of each at the end."""
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
    """Run forwards in eval mode, without gradients, and restore modes and random-number state."""
    with module_mode(module, training=False), fork_rng_of(module), torch.no_grad():
        yield


def fork_rng_of(module: nn.Module) -> AbstractContextManager[None]:
    """Restore on exit the state of the generators that a module's forward uses: the CPU's, and its accelerator's."""
    device = compute_device(module)
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index], device_type=device.type)


_UNUSABLE = "raysharding: this rank's module or optimizer was left half-way; restart the group before the next step"
_RESET = "raysharding: the module was reset; if every rank raised this error, later steps are right"


def mark_recovery(error: BaseException, usable: bool, *, torn: bool) -> None:
    """Record on an exception the state that it left: in a note, and in attributes.

    Args:
        error: The exception.
        usable: True if later steps are correct, provided that every rank raised this.
        torn: True if weights or optimizer state were changed in part.
    """
    error.add_note(_RESET if usable else _UNUSABLE)
    error.raysharding_recovered = usable  # type: ignore[attr-defined]
    error.raysharding_torn = torn  # type: ignore[attr-defined]


class CallProgress:
    """Progress of a call, which decides whether the module is usable after a failure."""

    in_optimizer = False
    has_queued_update = False
    """True if the update of an earlier call may not have run yet."""


@contextmanager
def recovering(module: nn.Module) -> Iterator[CallProgress]:
    """Reset the module after an exception, and mark on the exception whether that succeeded. Not collective."""
    progress = CallProgress()
    try:
        yield progress
    except BaseException as error:
        usable = recover_after(error, module)  # waits for what is queued
        torn = progress.in_optimizer or is_torn(error) or (progress.has_queued_update and not usable)
        mark_recovery(error, usable and not torn, torn=torn)
        raise


def is_recoverable(error: BaseException) -> bool:
    """Return True if a group can continue after this exception, provided that every rank raised it."""
    return bool(getattr(error, "raysharding_recovered", True)) and not is_device_error(error)


def is_torn(error: BaseException) -> bool:
    """Return True if an exception left weights or optimizer state changed in part."""
    return bool(getattr(error, "raysharding_torn", False))
