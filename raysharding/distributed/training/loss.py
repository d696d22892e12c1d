"""One loss denominator for the whole batch: the loss of each rank becomes its share of the loss of one process.

The mean over all counted labels is sum / count, so the share of a rank whose mean covers `local` of `total` counted
labels is `mean * local / total`; a model that honours `num_items_in_batch` divides its sum by `total` itself. Running
the loss shows which labels count and whether the model honours the argument (`loss_probe.py`); signatures do not.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import all_gather_ints, metadata_device, to_host
from raysharding.distributed.fully_shard import compute_device, move_inputs
from raysharding.distributed.training.labels import Counts, LabelKind, Labels, count_items, find_labels, has_own_count
from raysharding.distributed.training.loss_call import LossFunction, find_loss, loss_of, run_loss
from raysharding.distributed.training.loss_probe import (
    LossReduction,
    LossTraits,
    counted_field,
    find_traits,
    forget,
    recall,
)
from raysharding.errors import EmptyBatchError
from raysharding.tree import leaves


@dataclass(frozen=True)
class _Agreed:
    """The state of one call that all ranks agree on."""

    labels: Labels
    """This rank's labels, of the same kind on every rank."""
    counts: list[Counts]
    """Counts, by rank."""
    traits: LossTraits
    """Traits of the loss."""

    def items(self) -> list[int]:
        """Return the weight of each rank's loss, by rank."""
        if self.traits.reduction is LossReduction.ITEMS:
            field = counted_field(self.labels.kind, self.traits)
            return [getattr(count, field) for count in self.counts]
        rows = [count.rows for count in self.counts]
        return rows if self.traits.reduction is LossReduction.ROWS else [int(num > 0) for num in rows]

    @property
    def total(self) -> int:
        """Return the divisor of the weighted losses."""
        return 1 if self.traits.reduction is LossReduction.SUM else sum(self.items())


def _agree(module: nn.Module, batch: RankBatch, loss: LossFunction | None) -> _Agreed:
    """Gather the counts of all ranks and the traits of the loss, by a probe if a rank lacks them; collective."""
    labels = find_labels(module, batch, loss)
    own = count_items(batch, labels)
    known = recall(module, batch, loss, labels.kind)
    facts = [labels.kind.value, known is not None, has_own_count(module, batch), *astuple(own)]
    rows = all_gather_ints([int(fact) for fact in facts])
    kinds = [LabelKind(row[0]).name.lower() for row in rows]
    if len(set(kinds)) > 1:
        raise ValueError(f"labels differ over the ranks: {kinds}; give every rank labels of one dtype and shape")
    if any(row[2] for row in rows):
        raise ValueError("num_items_in_batch is computed by raysharding over all ranks; leave it out of the call")
    counts = [Counts(*row[3:]) for row in rows]
    if any(count.half_masked for count in counts):
        raise ValueError(
            "start_positions and end_positions leave out different rows, so the loss has no single denominator; leave "
            "out both positions of a row, or pass loss= a function that returns (sum, count)"
        )
    # The probe is collective: all ranks run it, or none.
    if known is None or not all(row[1] for row in rows):
        known = find_traits(module, batch, loss, labels)
    return _Agreed(labels, counts, known)


@dataclass(frozen=True)
class LossWeight:
    """How the loss of this rank becomes its share of the loss of the whole batch."""

    num_items_in_batch: int | None
    """Count over all ranks, for a model that divides by it; else `None`."""
    factor: float
    """Factor of the rank's loss; 0 for a rank without counted items."""
    total: int | None
    """Number of counted items on all ranks, in the unit of the loss; `None` if the loss returns counts, or is a sum."""
    is_sum: bool = False
    """True if the loss of the batch is the sum of the losses of its parts."""


class LossShare(NamedTuple):
    """Share of one rank in the loss of a batch."""

    value: torch.Tensor
    """0-dim, fp32, with its graph. The values of all ranks sum to the loss of the batch."""
    weight: float | None
    """Weight of the batch's loss among other batches: its number of counted items, which may be 0, the same on every
    rank. `None` if the loss is a sum; such losses are added."""

    def total(self) -> float:
        """Return the loss of the batch; collective."""
        value = self.value.detach().clone()
        # Every rank calls this, ranks without rows with a zero: the others would wait in the all-reduce.
        dist.all_reduce(value)
        return float(to_host(value))


def _weight(agreed: _Agreed, is_dummy: bool, may_be_empty: bool) -> LossWeight:
    """Return the weight of this rank in the loss of the batch.

    Raises:
        EmptyBatchError: No label of the whole batch counts, and `may_be_empty` is False.
    """
    traits = agreed.traits
    if traits.returns_pair:
        return LossWeight(num_items_in_batch=None, factor=float(not is_dummy), total=None)
    if sum(agreed.items()) == 0 and not may_be_empty:
        raise EmptyBatchError(_nothing_counted(agreed.labels.kind, traits))
    local, total = agreed.items()[dist.get_rank()], agreed.total
    if traits.honours_count:
        return LossWeight(num_items_in_batch=max(total, 1), factor=float(local > 0), total=total)
    if traits.reduction is LossReduction.SUM:
        return LossWeight(num_items_in_batch=None, factor=float(local), total=None, is_sum=True)
    return LossWeight(num_items_in_batch=None, factor=local / max(total, 1), total=total)


def _nothing_counted(kind: LabelKind, traits: LossTraits) -> str:
    if kind is LabelKind.ABSENT:
        return "the batch has no rows on any rank"
    if kind is LabelKind.SPANS:
        return "no row counts: every answer lies behind its text, so the mean loss is undefined; skip this batch"
    where = " after the first position" if traits.shifts_labels else ""
    return f"no label counts: all labels of the batch{where} are masked, so its mean loss is undefined; skip this batch"


def loss_share(
    module: nn.Module, batch: RankBatch, loss: LossFunction | None = None, *, may_be_empty: bool = False
) -> LossShare:
    """Run the forward and return this rank's share of the loss of the batch; the shares of all ranks sum to the loss.

    Collective: each rank passes its part of one call, in the same mode.

    The first call for a model (and for each kind of labels and loss function) runs up to ten extra forwards without
    gradients. They show how the loss treats masked labels and `num_items_in_batch`, and whether the losses of parts of
    the batch sum to that of the whole. Model and loss then see labels that the caller never passed: labels of the batch
    with others masked by -100 (maps: by 255), and with a class of the batch, or 0, in place of masked labels. An
    operation is not run on labels out of its range.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call, on any device.
        loss: `None` for the output's `.loss`. Otherwise called as by `loss_call.call_loss`; it returns a scalar: the
            mean over counted labels (over rows without labels) or over rows, a sum, or a pair (sum, count). Labels are
            the argument `labels` of the call or the loss, masked by -100.
        may_be_empty: True if a batch without counted items is no error; its loss and gradients are then 0.

    Returns:
        The share; exactly 0, with zero gradients, on a rank without counted items.

    Raises:
        EmptyBatchError: On every rank, if the batch has no counted items.
        ValueError: On every rank, if there is no loss, or it is not a scalar; labels differ in kind; the caller passes
            `num_items_in_batch`; or the loss is neither a mean over labels or rows nor a sum, or is not finite in the
            first call. The error then states since when, and names a parameter or argument that is not finite.
    """
    # A sharded root moves the arguments of its forward, but not labels that only the loss function takes.
    device = compute_device(module)
    batch = batch.replaced(lambda value: move_inputs(value, device))
    agreed = _agree(module, batch, loss)
    weight = _weight(agreed, batch.is_dummy, may_be_empty)
    args, kwargs = batch.args, batch.kwargs
    if weight.factor == 0:
        args, kwargs = agreed.labels.harmless(args, kwargs)
    if weight.num_items_in_batch is not None:
        kwargs["num_items_in_batch"] = weight.num_items_in_batch
    output, result = run_loss(module, args, kwargs, loss)
    if loss is None:
        share = LossShare(loss_of(output).float() * weight.factor, None if weight.is_sum else float(weight.total or 0))
    else:
        share = _share_of(module, result, weight, may_be_empty)
    if weight.factor == 0 and not bool(torch.isfinite(share.value)):
        return share._replace(value=_zero_of(output, share.value))
    return share


def _zero_of(output: Any, share: torch.Tensor) -> torch.Tensor:
    """Return a zero with the graph of the output, not of the loss: the gradient of a NaN stays NaN even times 0."""
    loss = find_loss(output)
    tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf is not loss]
    # Backward must reach the same parameters as on the other ranks, because FSDP reduces their gradients together.
    parts = [tensor.float().nan_to_num().sum() * 0.0 for tensor in tensors if tensor.requires_grad]
    if not parts and not share.requires_grad:
        return torch.zeros_like(share)  # there is no backward
    return torch.stack(parts).sum() if parts else share


def _share_of(
    module: nn.Module, result: torch.Tensor | tuple[torch.Tensor, float], weight: LossWeight, may_be_empty: bool
) -> LossShare:
    """Return the share for the result of the caller's loss function; collective."""
    is_pair = isinstance(result, tuple)
    # A dummy row, and labels that were replaced by harmless ones, do not count.
    count = float(result[1]) if isinstance(result, tuple) and weight.factor else 0.0
    mine = torch.tensor([float(is_pair), count], dtype=torch.float64, device=metadata_device())
    # Every rank calls this, whatever its loss returned: the ranks must agree on mean or pair before they scale.
    dist.all_reduce(mine)
    num_pairs, total = to_host(mine).tolist()
    if num_pairs not in (0, dist.get_world_size()):
        raise ValueError(
            "the loss returned (sum, count) on some ranks and a mean on others; return one kind everywhere"
        )
    if not isinstance(result, tuple) and (weight.total is not None or weight.is_sum):
        return LossShare(result.float() * weight.factor, None if weight.total is None else float(weight.total))
    if not isinstance(result, tuple):
        # The recorded traits are outdated; the next call probes the loss again.
        forget(module)
        raise ValueError("the loss returned (sum, count) in an earlier call and a mean now; return one kind always")
    if total < 0:
        raise ValueError(f"the counts that the loss returned add up to {total:g}; a count is 0 or more")
    if total == 0 and not may_be_empty:
        raise EmptyBatchError("nothing counts: the counts that the loss returned add up to 0; skip this batch")
    return LossShare(result[0].float() * (1.0 / total if weight.factor and total else 0.0), total)


def reduce_loss(module: nn.Module, batch: RankBatch, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of the whole batch from the mean loss of each rank's forward; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: 0-dim loss of the forward; may be NaN without counted items.

    Returns:
        0-dim tensor of `loss`'s dtype, equal on every rank; NaN if nothing counts on any rank, as in one process.
    """
    agreed = _agree(module, batch, None)
    local = agreed.items()[dist.get_rank()]
    share = loss.detach().double() * local if local else torch.zeros((), dtype=torch.float64, device=loss.device)
    # Every rank calls this, ranks without rows with a zero: the others would wait in the all-reduce.
    dist.all_reduce(share)
    return (share / agreed.total).to(loss.dtype)
