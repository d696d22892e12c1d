"""Training steps over batches whose rows are distributed over the ranks, equal to steps of one process.

`Accumulation`: backward passes whose gradients sum to the gradient of one loss over all their rows.

The loss of several batches is the mean over the counted items of all: the sum of each loss times its weight, divided by
the sum of the weights. The weights of later batches are unknown at the first backward. Its gradients are therefore not
scaled, the gradients of later passes are scaled relative to the first weight, and before the update all gradients are
multiplied by the share of the first weight. A single pass is not scaled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import to_host
from raysharding.distributed.fully_shard import (
    check_execution_order,
    clip_grad_norm_,
    drop_unreduced_gradients,
    gradient_sync,
    module_mode,
    note_update,
    recovering,
    reshard,
    scale_gradients,
    unwrapped,
)
from raysharding.distributed.optim import check_schedule_has_loss, step_schedule
from raysharding.distributed.training.loss import LossShare, loss_share
from raysharding.distributed.training.loss_call import LossFunction
from raysharding.errors import EmptyBatchError


class Accumulation:
    """Backward passes since the last update. The same on every rank; not collective."""

    def __init__(self) -> None:
        """Start without passes."""
        self.num_passes = 0
        self.is_reduced = True
        self._weighted_loss = 0.0
        self._weight = 0.0
        self._first = 0.0
        self._is_sum = False

    def scale(self, share: LossShare) -> float:
        """Return the factor of the next pass's share before its backward.

        Raises:
            ValueError: On every rank, if its loss is a sum and earlier losses are means, or vice versa.
        """
        # A pass without counted items does not show that its loss is a sum.
        if (self._is_sum or self._weight) and self._is_sum != (share.weight is None):
            kinds = "a mean", "a sum"
            raise ValueError(
                f"the loss of this batch is {kinds[share.weight is None]}, those accumulated before it are "
                f"{kinds[self._is_sum]}: one update needs one kind of loss; call optim_step or zero_grad in between"
            )
        return 1.0 if share.weight is None or not self._first else share.weight / self._first

    def add(self, loss: float, weight: float | None, *, is_reduced: bool) -> None:
        """Record a pass.

        Args:
            loss: Loss of its whole batch.
            weight: See `LossShare`.
            is_reduced: True if its backward reduced the gradients of all passes so far.
        """
        self.num_passes += 1
        self.is_reduced = is_reduced
        self._is_sum = weight is None
        self._weight += weight or 0.0
        self._first = self._first or (weight or 0.0)
        if weight is None:
            self._weighted_loss += loss
        elif weight:  # without counted items the loss may be NaN, and NaN · 0 is NaN
            self._weighted_loss += loss * weight

    def loss(self) -> float:
        """Return the loss over all passes; NaN without counted items."""
        if self._is_sum:
            return self._weighted_loss
        return self._weighted_loss / self._weight if self._weight else float("nan")

    def finish(self, module: nn.Module) -> None:
        """Scale the gradients to the gradient of the loss over all passes.

        Raises:
            EmptyBatchError: On every rank, if no pass has counted items.
            ValueError: On every rank, if the gradients were not reduced.
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
    """Forward, backward and one optimizer step; collective, each rank passes its own batch.

    Runs `zero_grad`, `forward_backward` on each part of the batch, and `optim_step`; gradients stay until the next one.
    Loss, gradient norm and update are those of one process on all rows, whatever the number of ranks and however
    labels are masked. Wire: FSDP's own traffic, gradients reduced once, and a few numbers.

    Args:
        module: The sharded root module.
        optimizer: Optimizer over the module's parameters.
        batch: This rank's part, from `deal`.
        loss: See `loss.loss_share`; the first step also runs it on made-up labels. Default: the output's `.loss`.
        max_grad_norm: Clip to this global 2-norm, above 0. Default: only measure.
        training: True for train mode, False for eval mode. Default True. Modes of submodules are restored.
        gradient_accumulation_steps: Number of parts that the rows are processed in, which saves memory: activations are
            those of one part, but between parts each rank holds full, unsharded gradients. Default 1.

    Returns:
        `loss` of the whole batch and `grad_norm` before clipping, equal on every rank; with a schedule also `lr`.

    Raises:
        EmptyBatchError: On every rank, if the batch has no counted items: there was no update, and the gradients are
            dropped. (`Fit` skips such a batch.)
        ValueError: On every rank, if `max_grad_norm` is not positive, or there are no rows to split into parts.
        Exception: Any error of the model, the loss or the optimizer. If all ranks raise the same, the module has been
            reset and later steps are correct, unless a note on the exception says otherwise (`is_recoverable`).
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
    """Drop all gradients, including gradients that were not reduced. Not collective.

    Args:
        module: The sharded root module.
        optimizer: Optimizer, which may hold more parameters. Default: none.
    """
    module = unwrapped(module)
    # A forward may have left full parameters registered; gradients belong to the shards.
    reshard(module)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    # Gradients of parameters that the optimizer lacks would accumulate over steps, and count in the norm.
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
    """Run forward and backward; collective, each rank passes its own batch.

    The gradients are added to those of earlier passes. Wire: FSDP's own traffic, and a few numbers.

    Args:
        module: The sharded root module.
        batch: This rank's part, from `deal`.
        done: The passes since the last update; this pass is recorded there.
        loss: See `loss.loss_share`. Default: the output's `.loss`.
        training: As for `train_step`.
        sync: True to reduce the gradients, including those of earlier passes, as the last pass before an update must.
            Otherwise each rank holds full, unsharded gradients. Default True.
        may_be_empty: True if a batch without counted items adds nothing; otherwise it is an error. Default True.

    Returns:
        `loss` of the whole batch, equal on every rank; NaN without counted items.

    Raises:
        ValueError: On every rank, as from `loss_share`, or if the loss is of another kind than in earlier passes.
        Exception: Any error of the model or the loss. The gradients of all passes are dropped.
    """
    module = unwrapped(module)
    with recovering(module), module_mode(module, training=training):
        if not done.num_passes:
            reshard(module)  # gradients belong to the shards
        share = loss_share(module, batch, loss, may_be_empty=may_be_empty)
        check_execution_order(module)
        scale = done.scale(share)
        with gradient_sync(module, sync):
            # FSDP averages gradients over the ranks; the shares of the loss are to be summed.
            torch.autograd.backward(share.value * (scale * dist.get_world_size()))
        value = share.total()
    done.add(value, share.weight, is_reduced=sync)
    return {"loss": float("nan") if share.weight == 0 else value}


def optim_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, done: Accumulation, *, max_grad_norm: float | None = None
) -> dict[str, float]:
    """Update the parameters with the current gradients; collective. The gradients stay.

    Args:
        module: The sharded root module.
        optimizer: Optimizer over the module's parameters.
        done: The passes that made the gradients; without passes if user code made them.
        max_grad_norm: As for `train_step`.

    Returns:
        `loss` over the rows of all passes, if there are any, and `grad_norm` before clipping, equal on every rank; with
        a schedule also `lr`, the learning rate of this update.

    Raises:
        ValueError: On every rank, if `max_grad_norm` is not positive; or, with the gradients dropped, if the last pass
            did not reduce them, no pass has counted items, or the schedule needs a loss and there is none.
        Exception: Any error of the optimizer. See `train_step`.
    """
    check_max_grad_norm(max_grad_norm)
    module = unwrapped(module)
    with recovering(module) as progress:
        done.finish(module)
        loss = done.loss() if done.num_passes else None
        check_schedule_has_loss(optimizer, loss)
        # The all-reduce completes on no rank before all ranks have reached it: after an earlier failure or death of a
        # rank, no other rank is updated.
        grad_norm = float(to_host(clip_grad_norm_(module, max_grad_norm)))
        progress.in_optimizer = True
        optimizer.step()
        if loss is not None:
            note_update(module, loss)
        rate = step_schedule(optimizer, loss)
    return {**({} if loss is None else {"loss": loss}), "grad_norm": grad_norm, **rate}


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raise if a gradient norm to clip to is invalid.

    Raises:
        ValueError: It is not positive: some read 0 as "do not clip", and clipping to 0 would prevent learning.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: give a positive number, or None to only measure")
