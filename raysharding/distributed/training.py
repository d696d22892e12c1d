"""One optimizer step over a batch that is dealt out to all ranks, equal to the step one process would take."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.execution import check_execution_order
from raysharding.distributed.gradient_sync import drop_unreduced_gradients
from raysharding.distributed.gradients import clip_grad_norm_
from raysharding.distributed.layout import unwrapped
from raysharding.distributed.loss import loss_share
from raysharding.distributed.loss_call import LossFunction
from raysharding.distributed.recovery import module_mode, recover_after
from raysharding.distributed.sharded_module import reshard


class _Progress:
    """How far a step has come: decides what a failure leaves behind."""

    in_backward = False
    in_optimizer = False


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RankBatch,
    *,
    loss: LossFunction | None = None,
    max_grad_norm: float | None = None,
    training: bool = True,
) -> dict[str, float]:
    """Forward, backward and one optimizer step; collective, every rank calls it with its own batch.

    Loss, gradient norm and update are those of one process on all rows, whatever the number of ranks and however
    labels are masked. Gradients of earlier calls are dropped first. Wire: FSDP's own traffic and a few numbers.

    Args:
        module: The sharded root module.
        optimizer: Over the module's parameters.
        batch: This rank's part, from `deal`.
        loss: See `loss.loss_share`. Default: the output's `.loss`.
        max_grad_norm: Clip to this global 2-norm, above 0. Default: only measure.
        training: Train mode rather than eval mode. Default train. Each submodule's own mode is put back.

    Returns:
        `loss` of the whole batch and `grad_norm` before clipping, equal on every rank.

    Raises:
        ValueError: On every rank, when `max_grad_norm` is not positive.
        Exception: Whatever the model, the loss or the optimizer raised. If all ranks raise it alike, the module has
            been reset and later steps are right, unless a note on the exception says otherwise (`is_recoverable`).
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        # To some it means "do not clip", and a norm of 0 would be a step that learns nothing.
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: give a positive number, or None to only measure")
    module = unwrapped(module)
    progress = _Progress()
    try:
        with module_mode(module, training=training):
            return _step(module, optimizer, batch, loss, max_grad_norm, progress)
    except Exception as error:
        usable = recover_after(error, module, in_backward=progress.in_backward) and not progress.in_optimizer
        mark_recovery(error, usable, torn=progress.in_optimizer)
        raise


def _step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RankBatch,
    loss: LossFunction | None,
    max_grad_norm: float | None,
    progress: _Progress,
) -> dict[str, float]:
    # A forward before this one may have left full parameters registered; gradients hang on the shards.
    reshard(module)
    optimizer.zero_grad(set_to_none=True)
    # Parameters that the optimizer leaves out would add up over the steps and into the norm.
    module.zero_grad(set_to_none=True)
    drop_unreduced_gradients(module)
    share = loss_share(module, batch, loss)
    check_execution_order(module)
    progress.in_backward = True
    # FSDP averages gradients over all ranks; the shares of the loss have to be added up.
    torch.autograd.backward(share * dist.get_world_size())
    grad_norm = clip_grad_norm_(module, max_grad_norm)
    total = share.detach().clone()
    # Every rank adds its share, empty ranks a zero: a rank that skipped it would leave the others waiting. Before the
    # update: it ends on no rank until all have come so far, so a rank that fails or dies earlier leaves no other one
    # updated.
    dist.all_reduce(total)
    progress.in_backward, progress.in_optimizer = False, True
    optimizer.step()
    return {"loss": float(total), "grad_norm": float(grad_norm)}


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
    return bool(getattr(error, "raysharding_recovered", True))


def is_torn(error: BaseException) -> bool:
    """Whether an exception left weights or optimizer state changed in part."""
    return bool(getattr(error, "raysharding_torn", False))
