"""Training steps over batches whose rows are distributed over the ranks, equal to steps of one process.

`Accumulation`: backward passes whose gradients sum to the gradient of one loss over all their rows.

Each term of the loss of several batches is the sum of its N over all, divided by the sum of its counts. The counts of
later batches are unknown at the first backward: all gradients are made with the first batch's counts, and multiplied
before the update by their share. Terms whose shares differ need all counts first: `train_step` runs the losses of later
parts once without a graph.

Note [Waits]: what the host of an accelerator waits for in a step.
    The sums and counts of the loss are copied to the host before the backward is queued, and read after it: the host
    decides about the update (a batch without counted items, terms that differ, a schedule that looks at the loss) while
    the device runs the backward. Norm, clipping and update are queued without a wait, so the device does not idle
    between them. The norm comes last: `train_step` waits for it, and `Fit` once the next step's backward is queued.
    A rank that dies in the backward leaves the others' updates queued behind a collective that does not end, and that
    an abort may let run: an error before the norm was read leaves weights that nobody may use (`is_torn`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch, Split
from raysharding.distributed.comm import HostCopy, all_gather_ints, get_rank, get_world_size
from raysharding.distributed.fully_shard import (
    check_execution_order,
    clip_grad_norm_,
    drop_unreduced_gradients,
    finish_backward,
    gradient_sync,
    mark_recovery,
    module_mode,
    over_ranks_of,
    recovering,
    reshard,
    scale_gradients,
    training_dtypes,
    unwrapped,
    warn_once,
    without_trace,
)
from raysharding.distributed.optim import adapt, check_schedule_has_loss, step_schedule
from raysharding.distributed.training.losses import BatchLoss, LossFunction, loss_of_batch
from raysharding.distributed.training.passes import Passes, passes_of_call
from raysharding.errors import EmptyBatchError
from raysharding.models import class_name

_SAME_RATIO = 1e-9
"""Largest difference of shares that are the same: of quotients of whole numbers in fp64."""


class PendingStep:
    """An update that is queued, and its metrics, the same on every rank. See Note [Waits]."""

    def __init__(self, metrics: dict[str, float], grad_norm: HostCopy) -> None:
        """Start to wait.

        Args:
            metrics: Metrics that are known.
            grad_norm: The gradient norm.
        """
        self.metrics = metrics
        """`grad_norm` is NaN until `read`."""
        self._grad_norm: HostCopy | None = grad_norm

    def read(self) -> dict[str, float]:
        """Wait until the gradients were reduced, and return all metrics. Idempotent.

        Raises:
            RuntimeError: A device or another rank failed. Weights and optimizer are not to be used (`is_torn`).
        """
        copy, self._grad_norm = self._grad_norm, None
        if copy is not None:
            try:
                self.metrics["grad_norm"] = float(copy.result())
            except BaseException as error:
                mark_recovery(error, usable=False, torn=True)
                raise
        return self.metrics


class Accumulation:
    """Losses since the last update, or of an evaluation. The same on every rank."""

    def __init__(self, earlier: PendingStep | None = None) -> None:
        """Start without passes.

        Args:
            earlier: The step before, which is read once a backward is queued behind it. Default: none that is unread.
        """
        self.earlier = earlier
        self.num_passes = 0
        self.is_reduced = True
        self.counts: torch.Tensor | None = None
        """Counts of the terms over all passes, fp64, if they are known before the first backward."""
        self._names: tuple[str, ...] = ()
        self._first_on_device: torch.Tensor | None = None  # as `_first`, which a copy would wait for
        # fp64, on the CPU. One a term, but for `_fixed`, which ends with the constant.
        self._is_sum = self._sums = self._counts = self._first = self._fixed = torch.zeros(1, dtype=torch.float64)

    def scales(self, loss: BatchLoss) -> torch.Tensor:
        """Return the factor of each term's gradient in the next backward: of this rank's N.

        Raises:
            ValueError: On every rank, if the terms are not those of earlier passes.
        """
        self._check_names(loss)
        counts = loss.counts if self.counts is None else self.counts
        if self.counts is None and self._first_on_device is not None:
            counts = torch.where(self._first_on_device > 0, self._first_on_device, counts)
        # FSDP averages gradients over the ranks; the shares of the loss are to be summed.
        divisor = torch.where(loss.is_sum, 1.0, counts)
        return torch.where(divisor > 0, get_world_size() / divisor, 0.0)

    def _check_names(self, loss: BatchLoss) -> None:
        if self.num_passes and loss.names != self._names:
            raise ValueError(
                f"the terms of this batch's loss are {', '.join(loss.names)}, those of the batches before it "
                f"{', '.join(self._names)}: one update, or evaluation, needs the same terms; call optim_step or "
                "zero_grad in between"
            )

    def add(self, loss: BatchLoss, *, is_reduced: bool = True, may_be_empty: bool = True) -> float:
        """Record a pass, and return the loss of its batch, NaN where nothing counts.

        Args:
            loss: Its loss.
            is_reduced: True if its backward reduced the gradients of all passes so far.
            may_be_empty: True if a batch in which a term has no counted items is no error.

        Raises:
            EmptyBatchError: On every rank, if `may_be_empty` is False.
            ValueError: On every rank, if factors or constants differ over the ranks or passes, or a count is negative.
        """
        self._check_names(loss)
        if self.earlier is not None:
            self.earlier.read()  # first, as on the stream: an error is then that of the step that it came in
            self.earlier = None
        found, num_terms = loss.numbers.result(), len(loss.names)
        differs, is_sum, sums, counts, fixed = found.split([1, num_terms, num_terms, num_terms, num_terms + 1])
        if differs or (self.num_passes and not torch.equal(fixed, self._fixed)):
            where = "over the ranks" if differs else "between the parts of one update"
            raise ValueError(
                f"a factor or a constant of the loss differs {where}, so it was made from some rows: let loss= return "
                "(sum, count) pairs that it is in"
            )
        if not (counts >= 0).all():
            raise ValueError(f"the counts that the loss returned add up to {counts.min():g}; a count is 0 or more")
        self._names, self._is_sum, self._fixed = loss.names, is_sum > 0, fixed
        empty = self._empty(counts)
        # What is summed without a count (labels of weight 0, smoothed) would be missing from the gradients.
        if empty and (not may_be_empty or sums[(counts == 0) & (is_sum == 0)].any()):
            raise EmptyBatchError(f"nothing counts in {', '.join(empty)} of this batch, on any rank; skip this batch")
        first = loss.counts if self._first_on_device is None else self._first_on_device
        self._first_on_device = torch.where(first > 0, first, loss.counts)
        self._first = torch.where(self._first > 0, self._first, counts)
        self._sums, self._counts = self._sums + sums, self._counts + counts
        self.num_passes += 1
        self.is_reduced = is_reduced
        return self._loss(sums, counts)

    def loss(self, before: Accumulation | None = None) -> float:
        """Return the loss over all passes, or over those since the copy `before`; NaN without counted items."""
        since = before or Accumulation()
        return self._loss(self._sums - since._sums, self._counts - since._counts) if self.num_passes else math.nan

    def _empty(self, counts: torch.Tensor) -> list[str]:
        """Return the names of the means with a count of 0."""
        terms = zip(self._names, counts, self._is_sum, strict=True)
        return [name for name, count, is_sum in terms if not (count or is_sum)]

    def _loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float:
        means = torch.where(self._is_sum, sums, sums / counts.where(counts > 0, math.nan))
        return float((self._fixed[:-1] * means).sum() + self._fixed[-1])

    def last_scale(self) -> float:
        """Return what all gradients are to be multiplied by.

        Raises:
            ValueError: On every rank, if it is not the same for all terms.
        """
        if self.counts is not None:
            return 1.0
        scales = torch.where(self._is_sum, 1.0, self._first / self._counts)[self._is_sum | (self._counts > 0)]
        if len(scales) and scales.max() - scales.min() > _SAME_RATIO:
            raise ValueError(
                f"the loss has terms with counts of their own ({', '.join(self._names)}), whose ratio is not the same "
                "in all batches of this update: call train_step(gradient_accumulation_steps=), which counts them first"
            )
        return float(scales[0]) if len(scales) else 1.0

    def finish(self, module: nn.Module) -> None:
        """Scale the gradients to the gradient of the loss over all passes.

        Raises:
            EmptyBatchError: On every rank, if a term has no counted items in any pass.
            ValueError: On every rank, if the gradients were not reduced, or there are none.
        """
        if not self.is_reduced:
            raise ValueError(
                "the gradients were not reduced: the last forward_backward before optim_step must have sync=True"
            )
        if self.num_passes:
            if empty := self._empty(self._counts):
                names = ", ".join(empty)
                raise EmptyBatchError(f"nothing counts in {names} in any of the accumulated batches, on any rank")
            _check_gradients(module)
        if self.num_passes > 1:
            scale_gradients(module, self.last_scale())


@over_ranks_of("module")
def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RankBatch | Mapping[str, Any],
    *,
    loss: LossFunction | None = None,
    max_grad_norm: float | None = None,
    training: bool = True,
    gradient_accumulation_steps: int = 1,
) -> dict[str, float]:
    """Forward, backward and one optimizer step; collective, each rank passes its own batch.

    Runs `zero_grad`, `forward_backward` on each part of the batch, and `optim_step`; gradients stay until the next one.
    Loss, gradient norm and update are those of one process on all rows, whatever the number of ranks and however
    labels are masked. Wire: FSDP's own traffic, gradients reduced once, and a few numbers. If the loss has several
    terms with counts of their own, the forwards of all parts but the first run once more, without a graph, first.

    Args:
        module: The sharded root module.
        optimizer: Optimizer over the module's parameters.
        batch: This rank's part, from `deal`; or a mapping of the model's arguments by name, whose tensors hold this
            rank's rows in dim 0, one or more.
        loss: Function of the output; `losses.loss_of_batch` says what it returns. Default: the output's `.loss`.
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
    passes = passes_of_call(module, _rank_batch(batch), gradient_accumulation_steps, "train_step", loss)
    return queue_train_step(module, optimizer, passes, loss, max_grad_norm, training=training).read()


@over_ranks_of("module")
def queue_train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: Passes,
    loss: LossFunction | None,
    max_grad_norm: float | None,
    *,
    training: bool = True,
    earlier: PendingStep | None = None,
) -> PendingStep:
    """Take one optimizer step over passes, without a wait for the update; see Note [Waits]. Collective.

    The step before, `earlier`, is read once the backward is queued.
    """
    check_max_grad_norm(max_grad_norm)
    all_passes = [one for part in passes for one in part]
    done = Accumulation(earlier)
    zero_grad(module, optimizer)
    may_be_empty, first_reduced = len(all_passes) > 1, len(all_passes) - len(passes[-1])
    for index, one in enumerate(all_passes):
        sync, later = index >= first_reduced, all_passes[index + 1 :]
        _run_pass(module, one, done, loss, training=training, sync=sync, may_be_empty=may_be_empty, later=later)
    return _queue_update(module, optimizer, done, max_grad_norm)


def _rank_batch(batch: RankBatch | Mapping[str, Any]) -> RankBatch:
    """Return a rank's rows as its part of a call; collective for a mapping.

    Raises:
        ValueError: On every rank, if tensors of one rank differ in their number of rows, or have none.
    """
    if isinstance(batch, RankBatch):
        return batch
    rows = {name: len(value) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    # The ranks' numbers of rows may differ, and each rank needs all: to cut them into as many parts.
    found = [one for (one,) in all_gather_ints([next(iter(rows.values()), 0) if len(set(rows.values())) == 1 else 0])]
    if not all(found):
        raise ValueError(
            f"rank {found.index(0)} has no rows, or tensors of different numbers of rows (this rank: {rows}): give "
            "every rank a row or more, in dim 0 of every tensor, or the rows of all ranks by raysharding.batch.deal, "
            "where images are no rows as Split(examples, collate_fn=...)"
        )
    kwargs = {name: Split(value) if name in rows else value for name, value in batch.items()}
    return RankBatch(wrapped_kwargs=kwargs, num_rows=found[get_rank()], rows=tuple(found))


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


@over_ranks_of("module")
def forward_backward(
    module: nn.Module,
    batch: RankBatch,
    done: Accumulation,
    *,
    loss: LossFunction | None = None,
    training: bool = True,
    sync: bool = True,
) -> dict[str, float]:
    """Run forward and backward; collective, each rank passes its own batch.

    The gradients are added to those of earlier passes. Wire: FSDP's own traffic, and a few numbers.

    Args:
        module: The sharded root module.
        batch: This rank's part, from `deal`.
        done: The passes since the last update; this pass is recorded there.
        loss: Function of the output; `losses.loss_of_batch` says what it returns. Default: the output's `.loss`.
        training: True for train mode, False for eval mode. Default True.
        sync: True to reduce the gradients, including those of earlier passes, as the last pass before an update must.
            Otherwise each rank holds full, unsharded gradients. Default True.

    Returns:
        `loss` of the whole batch, equal on every rank; NaN without counted items, which add nothing.

    Raises:
        ValueError: On every rank, as from `loss_of_batch`, or if the loss has other terms than in earlier passes.
        Exception: Any error of the model or the loss. The gradients of all passes are dropped.
    """
    (passes,) = passes_of_call(module, batch, 1, "forward_backward", loss)
    before, value = copy(done), math.nan
    for one in passes:
        value = _run_pass(module, one, done, loss, training=training, sync=sync, may_be_empty=True)
    return {"loss": value if len(passes) == 1 else done.loss(before)}


def _run_pass(
    module: nn.Module,
    batch: RankBatch,
    done: Accumulation,
    loss: LossFunction | None,
    *,
    training: bool,
    sync: bool,
    may_be_empty: bool,
    later: Sequence[RankBatch] = (),
) -> float:
    """Run forward and backward of one pass, which the passes `later` follow before the update; collective.

    Returns:
        Its loss.
    """
    module = unwrapped(module)
    with recovering(module) as progress, module_mode(module, training=training):
        progress.has_queued_update = done.earlier is not None
        if not done.num_passes:
            reshard(module)  # gradients belong to the shards
            _refuse_float16(module)
        found = loss_of_batch(module, batch, loss)
        if later and not done.num_passes and found.has_several_counts:
            done.counts = found.counts + _counts_of(module, later, loss)
        check_execution_order(module)
        scales = done.scales(found)
        with gradient_sync(module, sync):
            found.backward(scales)
            if found.may_lack_graph:
                finish_backward(module)
        value = done.add(found, is_reduced=sync, may_be_empty=may_be_empty)
        done.last_scale()  # raises if there is none
    return value


def _refuse_float16(module: nn.Module) -> None:
    """Raise if gradients would be computed in float16, where small ones are 0 without loss scaling; not collective.

    Raises:
        ValueError: On every rank: parameters that are trained, or are in an FSDP group with them, compute in float16.
    """
    if torch.float16 in training_dtypes(module):
        raise ValueError(
            f"{class_name(module)} would be trained in float16: without loss scaling, gradients below 6e-8 are 0. Load "
            'with Loading(dtype="float32") and compute with Sharding(mixed_precision="bf16"), or without it'
        )


def _check_gradients(module: nn.Module) -> None:
    """Raise if no backward of an update reached what is trained; not collective.

    Raises:
        ValueError: No trainable parameter has a gradient.
    """
    reshard(module)  # a forward behind the backward has left full parameters registered, which have no gradient
    if any(parameter.grad is not None for parameter in module.parameters()):  # mostly the first
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    raise ValueError(
        f"the backward gave none of the {len(trained)} trainable parameters of {class_name(module)} a gradient: the "
        "loss depends on none of them; look for detach(), no_grad(), tensors made anew from the output, and batches of "
        "which no row reaches them (of text alone, where a vision tower or its projector is trained)"
    )


def _counts_of(module: nn.Module, parts: Sequence[RankBatch], loss: LossFunction | None) -> torch.Tensor:
    """Return the counts of each term, summed over parts; collective."""
    warn_once(
        "this loss has several terms with counts of their own: with gradient_accumulation_steps, the forwards of all "
        "parts but the first run twice, once without a graph, because the first backward needs all counts"
    )
    with without_trace(module):
        found = [loss_of_batch(module, part, loss, with_backward=False) for part in parts]
    return torch.stack([one.counts for one in found]).sum(0)


@over_ranks_of("module")
def optim_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, done: Accumulation, *, max_grad_norm: float | None = None
) -> dict[str, float]:
    """Update the parameters with the current gradients; collective. The gradients stay.

    Args:
        module: The sharded root module.
        optimizer: Optimizer over the module's parameters.
        done: The passes that made the gradients; without passes if user code made them.
        max_grad_norm: Clip to this global 2-norm, above 0. Default: only measure.

    Returns:
        `loss` over the rows of all passes, if there are any, and `grad_norm` before clipping, equal on every rank; with
        a schedule also `lr`, the learning rate of this update.

    Raises:
        ValueError: On every rank, if `max_grad_norm` is not positive; or, with the gradients dropped, if the last pass
            did not reduce them, no pass has counted items, or the schedule needs a loss and there is none.
        Exception: Any error of the optimizer. If all ranks raise the same, later steps are correct, unless a note on
            the exception says otherwise (`is_recoverable`).
    """
    check_max_grad_norm(max_grad_norm)
    return _queue_update(module, optimizer, done, max_grad_norm).read()


def _queue_update(
    module: nn.Module, optimizer: torch.optim.Optimizer, done: Accumulation, max_grad_norm: float | None
) -> PendingStep:
    """Queue the update of the passes' gradients; collective."""
    adapt(optimizer)
    module = unwrapped(module)
    with recovering(module) as progress:
        done.finish(module)
        loss = done.loss() if done.num_passes else None
        check_schedule_has_loss(optimizer, loss)
        # The all-reduce completes on no rank before all ranks have reached it: after an earlier failure or death of a
        # rank, no other rank is updated, but by an abort.
        grad_norm = HostCopy(clip_grad_norm_(module, max_grad_norm))
        progress.in_optimizer = True
        optimizer.step()
        rate = step_schedule(optimizer, loss)
    known = {} if loss is None else {"loss": loss}
    return PendingStep({**known, "grad_norm": math.nan, **rate}, grad_norm)


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raise if a gradient norm to clip to is invalid.

    Raises:
        ValueError: It is not positive: some read 0 as "do not clip", and clipping to 0 would prevent learning.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: give a positive number, or None to only measure")
