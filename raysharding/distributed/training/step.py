"""Training steps over batches that are dealt out to all ranks, equal to those that one process would take.

`Accumulation`: backward passes that add up to the gradient of one loss over all of their rows.

The loss of several batches is the mean over what counts in all of them: the sum of each one's loss times what it
weighs, by the sum of the weights. How much the later batches weigh is not known yet when the first one's backward
runs. So its gradients are taken as they are, those of the others are scaled to its weight, and all are divided, before
the update, by what the first one weighs among all. One pass alone is scaled by nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.fully_shard import (
    check_execution_order,
    clip_grad_norm_,
    drop_unreduced_gradients,
    gradient_sync,
    mark_recovery,
    module_mode,
    note_update,
    recover_after,
    reshard,
    scale_gradients,
    unwrapped,
)
from raysharding.distributed.optim import check_schedule_has_loss, step_schedule
from raysharding.distributed.training.loss import LossShare, loss_share
from raysharding.distributed.training.loss_call import LossFunction
from raysharding.errors import EmptyBatchError


class Accumulation:
    """The passes since the last update. The same on every rank; no collectives."""

    def __init__(self) -> None:
        """No passes yet."""
        self.num_passes = 0
        self.is_reduced = True
        self._weighed_loss = 0.0
        self._weight = 0.0
        self._first = 0.0
        self._is_sum = False

    def scale(self, share: LossShare) -> float:
        """Return what the next pass's share is to be multiplied with before its backward.

        Raises:
            ValueError: On every rank, when its loss is a sum and earlier ones are means, or the other way round.
        """
        # A pass in which nothing counted may not have shown its loss to be a sum.
        if (self._is_sum or self._weight) and self._is_sum != (share.weight is None):
            kinds = "a mean", "a sum"
            raise ValueError(
                f"the loss of this batch is {kinds[share.weight is None]}, those accumulated before it are "
                f"{kinds[self._is_sum]}: one update needs one kind of loss; call optim_step or zero_grad in between"
            )
        return 1.0 if share.weight is None or not self._first else share.weight / self._first

    def add(self, loss: float, weight: float | None, *, is_reduced: bool) -> None:
        """Note a pass.

        Args:
            loss: Of its whole batch.
            weight: See `LossShare`.
            is_reduced: Whether its backward reduced the gradients of all passes so far.
        """
        self.num_passes += 1
        self.is_reduced = is_reduced
        self._is_sum = weight is None
        self._weight += weight or 0.0
        self._first = self._first or (weight or 0.0)
        if weight is None:
            self._weighed_loss += loss
        elif weight:  # the loss of nothing may be NaN, and NaN · 0 is no 0
            self._weighed_loss += loss * weight

    def loss(self) -> float:
        """Return the loss over all passes; NaN where nothing counted in any of them."""
        if self._is_sum:
            return self._weighed_loss
        return self._weighed_loss / self._weight if self._weight else float("nan")

    def finish(self, module: nn.Module) -> None:
        """Make the gradients of the passes that of the loss over all of them.

        Raises:
            EmptyBatchError: On every rank, when nothing counted in any pass.
            ValueError: On every rank, when they were not reduced.
        """
        if not self.is_reduced:
            raise ValueError(
                "the gradients were not reduced: the last forward_backward before optim_step must have sync=True"
            )
        if self.num_passes and not self._is_sum and not self._weight:
            raise EmptyBatchError(
                "no label counts in any of the accumulated batches, so there is nothing to learn from"
            )
        if self.num_passes > 1 and not self._is_sum:
            scale_gradients(module, self._first / self._weight)


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
    gradient_accumulation_steps: int = 1,
) -> dict[str, float]:
    """Forward, backward and one optimizer step; collective, every rank calls it with its own batch.

    `zero_grad`, `forward_backward` of each part of the batch, and `optim_step`; the gradients stay until the next step.
    Loss, gradient norm and update are those of one process on all rows, whatever the number of ranks and however
    labels are masked. Wire: FSDP's own traffic, gradients reduced once, and a few numbers.

    Args:
        module: The sharded root module.
        optimizer: Over the module's parameters.
        batch: This rank's part, from `deal`.
        loss: See `loss.loss_share`: the first step also runs it on labels that are made up. Default: the output's
            `.loss`.
        max_grad_norm: Clip to this global 2-norm, above 0. Default: only measure.
        training: Train mode rather than eval mode. Default train. Each submodule's own mode is put back.
        gradient_accumulation_steps: Parts that the rows are taken in, one after the other, for less memory: activations
            are those of one part, but between parts each rank holds full, unsharded gradients. Default 1.

    Returns:
        `loss` of the whole batch and `grad_norm` before clipping, equal on every rank; with a schedule also `lr`.

    Raises:
        EmptyBatchError: On every rank, when nothing counts in the batch: no update was taken, and the gradients are
            dropped. (`Fit` skips such a batch.)
        ValueError: On every rank, when `max_grad_norm` is not positive, or there are no rows to take in parts.
        Exception: Whatever the model, the loss or the optimizer raised. If all ranks raise it alike, the module has
            been reset and later steps are right, unless a note on the exception says otherwise (`is_recoverable`).
    """
    check_max_grad_norm(max_grad_norm)
    parts = batch.parts(gradient_accumulation_steps)
    done = Accumulation()
    zero_grad(module, optimizer)
    for part in parts:
        is_last = part is parts[-1]
        forward_backward(module, part, done, loss=loss, training=training, sync=is_last, may_be_empty=len(parts) > 1)
    return optim_step(module, optimizer, done, max_grad_norm=max_grad_norm)


def zero_grad(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Drop all gradients, also those that were not reduced yet; no collective.

    Args:
        module: The sharded root module.
        optimizer: What else it may hold. Default: nothing.
    """
    module = unwrapped(module)
    # A forward before this may have left full parameters registered; gradients hang on the shards.
    reshard(module)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    # Parameters that the optimizer leaves out would add up over the steps and into the norm.
    module.zero_grad(set_to_none=True)
    drop_unreduced_gradients(module)


def forward_backward(
    module: nn.Module,
    batch: RankBatch,
    done: Accumulation,
    *,
    loss: LossFunction | None = None,
    training: bool = True,
    sync: bool = True,
    may_be_empty: bool = True,
) -> dict[str, float]:
    """Run forward and backward; collective, every rank calls it with its own batch.

    The gradients are added to those of earlier passes. Wire: FSDP's own traffic, and a few numbers.

    Args:
        module: The sharded root module.
        batch: This rank's part, from `deal`.
        done: The passes since the last update; this one is noted there.
        loss: See `loss.loss_share`. Default: the output's `.loss`.
        training: As for `train_step`.
        sync: Whether to reduce the gradients, those of earlier passes with them: the last pass before an update has to.
            Without it each rank holds full, unsharded gradients. Default yes.
        may_be_empty: Whether a batch in which nothing counts adds nothing, rather than being an error. Default it may.

    Returns:
        `loss` of this whole batch, equal on every rank; NaN where nothing counts in it.

    Raises:
        ValueError: On every rank, as `loss_share`, or when the loss is of another kind than in earlier passes.
        Exception: Whatever the model or the loss raised. The gradients of all passes are dropped then.
    """
    module = unwrapped(module)
    progress = _Progress()
    with _recovering(module, progress), module_mode(module, training=training):
        if not done.num_passes:
            reshard(module)  # gradients hang on the shards
        share = loss_share(module, batch, loss, may_be_empty=may_be_empty)
        check_execution_order(module)
        scale = done.scale(share)
        progress.in_backward = True
        with gradient_sync(module, sync):
            # FSDP averages gradients over all ranks; the shares of the loss have to be added up.
            torch.autograd.backward(share.value * (scale * dist.get_world_size()))
        total = share.value.detach().clone()
        # Every rank adds its share, empty ranks a zero: a rank that skipped it would leave the others waiting.
        dist.all_reduce(total)
        value = float(total)
    done.add(value, share.weight, is_reduced=sync)
    return {"loss": float("nan") if share.weight == 0 else value}


def optim_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, done: Accumulation, *, max_grad_norm: float | None = None
) -> dict[str, float]:
    """Update the parameters with the gradients that are there; collective. The gradients stay.

    Args:
        module: The sharded root module.
        optimizer: Over the module's parameters.
        done: The passes that the gradients are of; none, where they are somebody else's.
        max_grad_norm: As for `train_step`.

    Returns:
        `loss` over the rows of all passes, where there were any, and `grad_norm` before clipping, equal on every rank;
        with a schedule also `lr`, the learning rate of this update.

    Raises:
        ValueError: On every rank, when `max_grad_norm` is not positive; or, and then the gradients are dropped, when
            the last pass did not reduce them, nothing counted in any pass, or the schedule looks at a loss that there
            is not.
        Exception: Whatever the optimizer raised. See `train_step`.
    """
    check_max_grad_norm(max_grad_norm)
    module = unwrapped(module)
    progress = _Progress()
    with _recovering(module, progress):
        done.finish(module)
        loss = done.loss() if done.num_passes else None
        check_schedule_has_loss(optimizer, loss)
        # Its all-reduce ends on no rank until all have come so far: a rank that fails or dies earlier leaves no other
        # one updated.
        grad_norm = float(clip_grad_norm_(module, max_grad_norm))
        progress.in_optimizer = True
        optimizer.step()
        if loss is not None:
            note_update(module, loss)
        rate = step_schedule(optimizer, loss)
    return {**({} if loss is None else {"loss": loss}), "grad_norm": grad_norm, **rate}


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Refuse a bound that no step has.

    Raises:
        ValueError: It is not positive: to some it means "do not clip", and a norm of 0 would learn nothing.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: give a positive number, or None to only measure")


@contextlib.contextmanager
def _recovering(module: nn.Module, progress: _Progress) -> Iterator[None]:
    """After an exception: make the module right again, and say on the exception whether it is."""
    try:
        yield
    except BaseException as error:
        usable = recover_after(error, module, in_backward=progress.in_backward) and not progress.in_optimizer
        mark_recovery(error, usable, torn=progress.in_optimizer)
        raise
