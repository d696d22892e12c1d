"""One loss denominator for the whole batch: each rank's loss becomes its share of the loss one process would compute.

The mean over all counted labels is sum / count, so a rank whose own mean covers `local` of `total` counted labels owes
`mean * local / total`; a model that honours `num_items_in_batch` divides its sum by `total` itself. What counts as a
label, and who honours the argument, is found by running the loss (`probe.py`), never from a signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.loss_call import LossFunction, call_loss, call_model, loss_of
from raysharding.distributed.metadata import metadata_device
from raysharding.distributed.probe import LabelKind, LossTraits, find_traits, label_kind

IGNORED_LABEL = -100
IGNORED_PIXEL = 255
"""Label that segmentation models leave out by default."""


@dataclass(frozen=True)
class Counts:
    """What could be the denominator, on one rank; `probe.py` finds which of them is."""

    rows: int
    """Rows of this rank; 0 for a dummy, 1 where the call has no `Split` (all ranks weigh the same)."""
    labels: int
    """Labels that are not -100, or elements where labels are floats; 0 for a dummy."""
    shifted: int
    """Labels that are not -100, the first position left out: what a causal model counts."""
    pixels: int
    """Labels that are neither -100 nor 255."""

    def counted(self, kind: LabelKind, traits: LossTraits) -> int:
        """The number of items that this rank's mean is taken over."""
        if kind is LabelKind.ABSENT:
            return self.rows
        if traits.shifts_labels:
            return self.shifted
        return self.pixels if traits.ignores_255 else self.labels


def count_items(batch: RankBatch) -> Counts:
    """Count this rank's rows and labels; no collective."""
    if batch.is_dummy:
        return Counts(0, 0, 0, 0)
    rows = 1 if batch.num_rows is None else batch.num_rows
    labels = batch.kwargs.get("labels")
    if not isinstance(labels, torch.Tensor):
        return Counts(rows, 0, 0, 0)
    if labels.is_floating_point():
        return Counts(rows, labels.numel(), labels.numel(), labels.numel())
    counted = labels != IGNORED_LABEL
    shifted = counted[..., 1:] if labels.ndim > 1 else counted
    pixels = counted & (labels != IGNORED_PIXEL)
    # One transfer from the device rather than three.
    return Counts(rows, *torch.stack([counted.sum(), shifted.sum(), pixels.sum()]).tolist())


def _gather_counts(batch: RankBatch, kind: LabelKind) -> list[Counts]:
    """Every rank's counts, by rank; collective. Ranks whose labels differ in kind all raise."""
    own = count_items(batch)
    device = metadata_device()
    mine = torch.tensor([kind.value, own.rows, own.labels, own.shifted, own.pixels], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    # Every rank gathers, dummies too: a rank that skipped it would leave the others waiting here.
    dist.all_gather(gathered, mine)
    rows = torch.stack(gathered).tolist()
    kinds = [LabelKind(row[0]).name.lower() for row in rows]
    if len(set(kinds)) > 1:
        raise ValueError(f"labels differ over the ranks: {kinds}; give every rank labels of one dtype and shape")
    return [Counts(*row[1:]) for row in rows]


@dataclass(frozen=True)
class LossWeight:
    """How this rank's own loss becomes its share of the whole batch's loss."""

    num_items_in_batch: int | None
    """The count of all ranks, for a model that divides by it; `None` for the others."""
    factor: float
    """What to multiply the rank's loss with. 0 for a rank without counted items."""
    total: int
    """Counted items of all ranks; 0 where the caller's loss function counts for itself."""


def weigh(module: nn.Module, batch: RankBatch, loss: LossFunction | None = None) -> LossWeight:
    """Find this rank's weight in the batch's loss; collective over the default group.

    The first call for a model (and for each kind of labels and loss function) runs two or three forwards more, without
    gradients, to see what the loss does with masked labels and with `num_items_in_batch`.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: The caller's loss function, or `None` for the model's own.

    Raises:
        ValueError: On every rank, when no label of the whole batch counts, or when labels differ in kind.
    """
    kind = label_kind(batch)
    counts = _gather_counts(batch, kind)
    traits = find_traits(module, batch, loss, kind)
    if traits.returns_pair:
        return LossWeight(num_items_in_batch=None, factor=float(not batch.is_dummy), total=0)
    counted = [count.counted(kind, traits) for count in counts]
    total = sum(counted)
    if total == 0:
        raise ValueError(_nothing_counted(kind, traits))
    local = counted[dist.get_rank()]
    if traits.honours_count:
        return LossWeight(num_items_in_batch=total, factor=float(local > 0), total=total)
    return LossWeight(num_items_in_batch=None, factor=local / total, total=total)


def _nothing_counted(kind: LabelKind, traits: LossTraits) -> str:
    if kind is LabelKind.ABSENT:
        return "the batch has no rows on any rank"
    where = " after the first position" if traits.shifts_labels else ""
    return f"no label counts: all labels of the batch{where} are masked, so its mean loss is undefined; skip this batch"


def loss_share(module: nn.Module, batch: RankBatch, loss: LossFunction | None = None) -> torch.Tensor:
    """Run the forward and return this rank's share of the batch's loss; the shares of all ranks add up to it.

    Collective: every rank calls it with its part of one call, in the same mode.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: `None`: the output's `.loss`. Else called as `loss_call.call_loss` says; it returns a scalar, the mean
            over counted labels (rows, where there are no labels), or a pair (sum, count), taken as it is.

    Returns:
        0-dim fp32 tensor with its graph; exactly 0, with zero gradients, on a rank without counted items.

    Raises:
        ValueError: On every rank, when there is no loss, it is not a scalar, or nothing counts.
    """
    weight = weigh(module, batch, loss)
    kwargs = dict(batch.kwargs)
    if weight.factor == 0:
        kwargs = _harmless(kwargs)
    if loss is None:
        extra = {} if weight.num_items_in_batch is None else {"num_items_in_batch": weight.num_items_in_batch}
        output = module(*batch.args, **kwargs, **extra)
        return loss_of(output).float() * weight.factor
    output = call_model(module, batch.args, kwargs, loss)
    result = call_loss(loss, output, batch.args, kwargs)
    return _share_of(result, weight, is_dummy=batch.is_dummy)


def _harmless(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Labels that all count, in place of labels none of which does: a mean over none is NaN, and NaN * 0 stays NaN."""
    labels = kwargs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return dict(kwargs)
    return {**kwargs, "labels": torch.zeros_like(labels)}


def _share_of(result: torch.Tensor | tuple[torch.Tensor, float], weight: LossWeight, *, is_dummy: bool) -> torch.Tensor:
    """Weigh what the caller's loss function returned; collective, and the same on every rank."""
    is_pair = isinstance(result, tuple)
    count = 0.0 if is_dummy or not isinstance(result, tuple) else float(result[1])
    mine = torch.tensor([float(is_pair), count], dtype=torch.float64, device=metadata_device())
    # Every rank reduces, whatever its loss returned: the ranks must agree on mean or pair before they scale by it.
    dist.all_reduce(mine)
    num_pairs, total = mine.tolist()
    if num_pairs not in (0, dist.get_world_size()):
        raise ValueError(
            "the loss returned (sum, count) on some ranks and a mean on others; return one kind everywhere"
        )
    if not isinstance(result, tuple):
        return result.float() * weight.factor
    if total <= 0:
        raise ValueError(f"the counts that the loss returned add up to {total:g}; skip a batch in which nothing counts")
    return result[0].float() * (0.0 if is_dummy else 1.0 / total)


def reduce_loss(module: nn.Module, batch: RankBatch, loss: torch.Tensor) -> torch.Tensor:
    """Turn the mean loss of this rank's forward into the loss of the whole batch; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        loss: 0-dim, the forward's own loss; may be NaN where nothing counts.

    Returns:
        0-dim tensor of `loss`'s dtype, equal on every rank; NaN if nothing counts on any rank, as in one process.
    """
    kind = label_kind(batch)
    counts = _gather_counts(batch, kind)
    traits = find_traits(module, batch, None, kind)
    counted = [count.counted(kind, traits) for count in counts]
    local = counted[dist.get_rank()]
    share = loss.detach().double() * local if local else torch.zeros((), dtype=torch.float64, device=loss.device)
    # Every rank adds its share, empty ranks a zero: a rank that skipped it would leave the others waiting.
    dist.all_reduce(share)
    return (share / sum(counted)).to(loss.dtype)
