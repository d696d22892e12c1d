"""Finding out, by running it on parts of a batch, what a loss adds up by: counted labels, rows, or itself."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch, Split
from raysharding.distributed.labels import IGNORED_LABEL, INTEGER_KINDS, Labels, count_items, find_labels
from raysharding.distributed.loss_call import LossFunction, run_loss
from raysharding.distributed.loss_history import not_finite
from raysharding.distributed.metadata import metadata_device
from raysharding.distributed.recovery import recover
from raysharding.tree import leaves, map_leaves


class Weighing(enum.Enum):
    """How the losses of parts make up the loss of the whole. The values travel between ranks."""

    ITEMS = 0
    """A mean over counted labels (rows, where there are none)."""
    ROWS = 1
    """A mean over rows, masked labels or not."""
    SUM = 2
    """A sum."""


TOLERANCE = 1e-3
"""Relative. Above the rounding of fp32 and the balancing loss of a mixture of experts, far below a wrong weight."""
LOW_PRECISION_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Part:
    """The loss of some rows, and what it could be weighed by."""

    value: float | None
    """`None`: the loss cannot be told."""
    items: int
    """Counted labels, or rows."""
    rows: int
    """Rows, counted or not."""
    tolerance: float
    """Relative."""

    def weighed(self, weighing: Weighing) -> float:
        """This part's contribution; that of a part in which nothing counts is 0."""
        assert self.value is not None
        if weighing is Weighing.ITEMS:
            return self.value * self.items if self.items else 0.0
        return self.value * self.rows if weighing is Weighing.ROWS else self.value


def fits(whole: Part, parts: list[Part], weighing: Weighing) -> bool:
    """Whether the parts add up to the whole; true where that cannot be told."""
    if any(part.value is None for part in (whole, *parts)) or whole.items == 0:
        return True
    want, have = whole.weighed(weighing), [part.weighed(weighing) for part in parts]
    size = max(abs(want), sum(abs(value) for value in have), 1e-6)
    # A NaN or an infinity makes this comparison false: finite where all labels count, the loss has a mask of its own.
    return abs(want - sum(have)) <= max(part.tolerance for part in (whole, *parts)) * size


@dataclass(frozen=True)
class Weigher:
    """Evaluates a loss on all rows of this rank and on its two halves. Every rank runs the same forwards."""

    module: nn.Module
    loss: LossFunction | None
    item: str
    """The field of `Counts` that the loss is a mean over."""

    def find(self, batch: RankBatch, labels: Labels, valid: int) -> Weighing:
        """Return how the loss adds up; collective. `valid` is a label that counts.

        Raises:
            ValueError: On every rank, when it adds up in no known way on some rank, or is not finite there.
        """
        if not agree([_can_cut(batch, labels)])[0]:
            return Weighing.ITEMS
        votes, value = [True] * len(Weighing), 0.0
        for synthetic in (False, True) if labels.kind in INTEGER_KINDS else (False,):
            whole, parts = self._evaluate(batch, labels, valid if synthetic else None)
            votes = [vote and fits(whole, parts, weighing) for vote, weighing in zip(votes, Weighing, strict=True)]
            if not synthetic and whole.items and whole.value is not None:
                value = whole.value
        is_finite, *votes = agree([math.isfinite(value), *votes])
        if not is_finite:
            raise not_finite(self.module, batch, value)
        found = [weighing for weighing, vote in zip(Weighing, votes, strict=True) if vote]
        if not found:
            raise ValueError(
                "the loss of this batch is neither the mean over labels that are not -100, nor the mean over rows, nor "
                "a sum, so the ranks' losses do not make up one process's; pass the labels as labels=, masked by -100, "
                "or pass loss= a function that returns (sum, count)"
            )
        return found[0]

    def _evaluate(self, batch: RankBatch, labels: Labels, valid: int | None) -> tuple[Part, list[Part]]:
        num_rows = _num_rows(batch)
        rows = list(range(num_rows)) if num_rows > 1 else [0, 0]
        half = len(rows) // 2
        whole = _cut(batch, rows)
        if valid is not None:
            whole = _unevenly_masked(whole, find_labels(self.module, whole, self.loss), valid, half)
        indices = list(range(len(rows)))
        parts = [_cut(whole, indices[:half]), _cut(whole, indices[half:])]
        # The batch as it is fails as the real forward would; what the probe makes of it may fail silently.
        is_own = valid is None and num_rows > 1
        return self._part(whole, lenient=not is_own), [self._part(part, lenient=True) for part in parts]

    def _part(self, batch: RankBatch, *, lenient: bool) -> Part:
        counts = count_items(batch, find_labels(self.module, batch, self.loss))
        try:
            output, value = run_loss(self.module, batch.args, batch.kwargs, self.loss, compiled=False)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # A rank that raised here alone would leave the others in the next forward.
            if not lenient:
                raise
            recover(self.module, in_backward=False)
            return Part(None, 0, 0, 0.0)
        usable = isinstance(value, torch.Tensor) and value.numel() == 1
        tolerance = LOW_PRECISION_TOLERANCE if self._is_low_precision((output, value)) else TOLERANCE
        return Part(float(value.float()) if usable else None, getattr(counts, self.item), counts.rows, tolerance)

    def _is_low_precision(self, output: Any) -> bool:
        tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        floats = [item for item in (*tensors, *self.module.parameters()) if item.is_floating_point()]
        return any(item.itemsize < 4 for item in floats)


def agree(flags: list[bool]) -> list[bool]:
    """Take for true what holds on every rank; collective."""
    votes = torch.tensor(flags, dtype=torch.int32, device=metadata_device())
    # Ranks that went on with different answers would run different forwards, and wait for each other.
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return [bool(vote) for vote in votes.tolist()]


def _splits(batch: RankBatch) -> list[Split]:
    wrapped = (batch.wrapped_args, dict(batch.wrapped_kwargs))
    return [leaf for _, leaf in leaves(wrapped, leaf=Split) if isinstance(leaf, Split)]


def _num_rows(batch: RankBatch) -> int:
    """Rows that this rank holds: 1 for a dummy."""
    return _splits(batch)[0].num_rows()


def _can_cut(batch: RankBatch, labels: Labels) -> bool:
    """Whether some rows can be taken out: no tensor outside the Splits holds this rank's rows."""
    if not batch.rows or not _splits(batch) or (labels.tensor is not None and labels.row_dim is None):
        return False
    wrapped = (batch.wrapped_args, dict(batch.wrapped_kwargs))
    whole = [leaf for _, leaf in leaves(wrapped, leaf=Split) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    num_rows = _num_rows(batch)
    return num_rows == 1 or not any(leaf.shape[0] == num_rows for leaf in whole)


def _cut(batch: RankBatch, rows: list[int]) -> RankBatch:
    """The same call on these rows, on the device they are on."""

    def take(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Split):
            return leaf
        dim = leaf.dim
        return Split(map_leaves(lambda _, item: item.index_select(dim, _index(rows, item)), leaf.value), dim)

    cut = batch.replaced(lambda value: map_leaves(take, value, leaf=Split))
    return replace(cut, num_rows=len(rows))


def _index(rows: list[int], tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, device=tensor.device)


def _unevenly_masked(batch: RankBatch, labels: Labels, valid: int, half: int) -> RankBatch:
    """All labels count in the second half of the rows, some in the first: means over labels and over rows differ."""
    assert labels.tensor is not None
    tensor = torch.where(labels.tensor == IGNORED_LABEL, valid, labels.tensor)
    row_dim = labels.row_dim or 0
    if tensor.ndim == 1:
        tensor[0] = IGNORED_LABEL
    else:
        size = tensor.shape[labels.position_dim]
        keep = min(size, max(2, size // 2))
        tensor.narrow(row_dim, 0, half).narrow(labels.position_dim, keep, size - keep).fill_(IGNORED_LABEL)
    args, kwargs = labels.put(batch.wrapped_args, batch.wrapped_kwargs, Split(tensor, row_dim))
    return replace(batch, wrapped_args=args, wrapped_kwargs=kwargs)
