"""One loss denominator for the whole batch: each rank's loss becomes its share of the loss one process would compute.

The mean over all counted labels is sum / count, so a rank whose own mean covers `local` of `total` counted labels owes
`mean * local / total`; a model that honours `num_items_in_batch` divides its sum by `total` itself. What counts as a
label, and who honours the argument, is found by running the loss (`loss_probe.py`), never from a signature.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import all_gather_ints, metadata_device
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
    """What all ranks know of one call."""

    labels: Labels
    """This rank's labels; their kind is every rank's."""
    counts: list[Counts]
    """By rank."""
    traits: LossTraits
    """What the loss does."""

    def items(self) -> list[int]:
        """What each rank's loss has to be weighted by, by rank."""
        if self.traits.reduction is LossReduction.ITEMS:
            field = counted_field(self.labels.kind, self.traits)
            return [getattr(count, field) for count in self.counts]
        rows = [count.rows for count in self.counts]
        return rows if self.traits.reduction is LossReduction.ROWS else [int(num > 0) for num in rows]

    @property
    def total(self) -> int:
        """What the weighted losses have to be divided by."""
        return 1 if self.traits.reduction is LossReduction.SUM else sum(self.items())


def _agree(module: nn.Module, batch: RankBatch, loss: LossFunction | None) -> _Agreed:
    """Gather every rank's counts and find the loss's traits, by a probe if any rank lacks them; collective."""
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
    # The probe is collective: all ranks run it or none does.
    if known is None or not all(row[1] for row in rows):
        known = find_traits(module, batch, loss, labels)
    return _Agreed(labels, counts, known)


@dataclass(frozen=True)
class LossWeight:
    """How this rank's own loss becomes its share of the whole batch's loss."""

    num_items_in_batch: int | None
    """The count of all ranks, for a model that divides by it; `None` for the others."""
    factor: float
    """What to multiply the rank's loss with. 0 for a rank without counted items."""
    total: int | None
    """What counts on all ranks together, in the loss's own unit; `None` where the loss counts for itself, or is a
    sum."""
    is_sum: bool = False
    """Whether the loss of the whole is the sum of the parts' losses."""


class LossShare(NamedTuple):
    """A rank's part of a batch's loss."""

    value: torch.Tensor
    """0-dim, fp32, with its graph. The ranks' values add up to the loss of the batch."""
    weight: float | None
    """What the loss of the batch weighs beside those of other batches: the number of its counted items, which may be
    0, the same on every rank. `None`: the loss is a sum, and such losses are added."""


def weigh(
    module: nn.Module, batch: RankBatch, loss: LossFunction | None = None, *, may_be_empty: bool = False
) -> LossWeight:
    """Find this rank's weight in the batch's loss; collective over the default group.

    The first call for a model (and for each kind of labels and loss function) runs some forwards more, ten at most,
    without gradients: they show what the loss does with masked labels and with `num_items_in_batch`, and whether the
    losses of parts of the batch make up that of the whole. Model and loss are given labels then that the caller never
    had: the batch's own with others masked by -100 (maps: by 255), and with one of its classes, 0 where it has none, in
    the place of masked ones. An operation that would be given a label that it does not have does not run.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: The caller's loss function, or `None` for the model's own.
        may_be_empty: Whether it is no error that no label of the whole batch counts. Default: it is.

    Raises:
        EmptyBatchError: On every rank, when no label of the whole batch counts.
        ValueError: On every rank, when labels differ in kind, the caller gives `num_items_in_batch`, or the loss is no
            mean over labels or rows and no sum, or is NaN or infinite in that first call: then it says since when, and
            names a parameter or argument that is not finite.
    """
    return _weight(_agree(module, batch, loss), batch.is_dummy, may_be_empty)


def _weight(agreed: _Agreed, is_dummy: bool, may_be_empty: bool) -> LossWeight:
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
    """Run the forward and return this rank's share of the batch's loss; the shares of all ranks add up to it.

    Collective: every rank calls it with its part of one call, in the same mode.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call, on any device.
        loss: `None`: the output's `.loss`. Else called as `loss_call.call_loss` says; it returns a scalar, the mean
            over counted labels (rows, where there are no labels) or over rows, a sum, or a pair (sum, count), taken
            as it is. Labels are what the call or the loss names `labels`, masked by -100. The first call runs it on
            made-up labels, too: see `weigh`.
        may_be_empty: As for `weigh`; the loss of a batch in which nothing counts is 0 then, and so are its gradients.

    Returns:
        The share; exactly 0, with zero gradients, on a rank without counted items.

    Raises:
        EmptyBatchError: On every rank, when nothing counts.
        ValueError: On every rank, when there is no loss, it is not a scalar, or as for `weigh`.
    """
    # A sharded root moves what its forward takes; labels that the loss function alone takes would stay where they are.
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
    """A zero that hangs on the output rather than on a loss of NaN, whose gradient stays NaN even times 0."""
    loss = find_loss(output)
    tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf is not loss]
    # Backward has to pass through the same parameters as on the other ranks: FSDP reduces their gradients together.
    parts = [tensor.float().nan_to_num().sum() * 0.0 for tensor in tensors if tensor.requires_grad]
    if not parts and not share.requires_grad:
        return torch.zeros_like(share)  # nobody runs backward
    return torch.stack(parts).sum() if parts else share


def _share_of(
    module: nn.Module, result: torch.Tensor | tuple[torch.Tensor, float], weight: LossWeight, may_be_empty: bool
) -> LossShare:
    """Weigh what the caller's loss function returned; collective, and the same on every rank."""
    is_pair = isinstance(result, tuple)
    # Of a dummy, and where labels were replaced by harmless ones, nothing counts.
    count = float(result[1]) if isinstance(result, tuple) and weight.factor else 0.0
    mine = torch.tensor([float(is_pair), count], dtype=torch.float64, device=metadata_device())
    # Every rank reduces, whatever its loss returned: the ranks must agree on mean or pair before they scale by it.
    dist.all_reduce(mine)
    num_pairs, total = mine.tolist()
    if num_pairs not in (0, dist.get_world_size()):
        raise ValueError(
            "the loss returned (sum, count) on some ranks and a mean on others; return one kind everywhere"
        )
    if not isinstance(result, tuple) and (weight.total is not None or weight.is_sum):
        return LossShare(result.float() * weight.factor, None if weight.total is None else float(weight.total))
    if not isinstance(result, tuple):
        # What was found out about it holds no longer; the next call probes it anew.
        forget(module)
        raise ValueError("the loss returned (sum, count) in an earlier call and a mean now; return one kind always")
    if total < 0:
        raise ValueError(f"the counts that the loss returned add up to {total:g}; a count is 0 or more")
    if total == 0 and not may_be_empty:
        raise EmptyBatchError("nothing counts: the counts that the loss returned add up to 0; skip this batch")
    return LossShare(result[0].float() * (1.0 / total if weight.factor and total else 0.0), total)


def reduce_loss(module: nn.Module, batch: RankBatch, loss: torch.Tensor) -> torch.Tensor:
    """Turn the mean loss of this rank's forward into the loss of the whole batch; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: 0-dim, the forward's own loss; may be NaN where nothing counts.

    Returns:
        0-dim tensor of `loss`'s dtype, equal on every rank; NaN if nothing counts on any rank, as in one process.
    """
    agreed = _agree(module, batch, None)
    local = agreed.items()[dist.get_rank()]
    share = loss.detach().double() * local if local else torch.zeros((), dtype=torch.float64, device=loss.device)
    # Every rank adds its share, empty ranks a zero: a rank that skipped it would leave the others waiting.
    dist.all_reduce(share)
    return (share / agreed.total).to(loss.dtype)
