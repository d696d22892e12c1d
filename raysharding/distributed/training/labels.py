"""Labels of a call: their place among the arguments, their kind, and their counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch, Split
from raysharding.distributed.training.loss_call import LossFunction, position_of

IGNORED_LABEL = -100
IGNORED_PIXEL = 255
"""Label that segmentation models ignore by default."""

_SPAN_NAMES = ("start_positions", "end_positions")


class LabelKind(enum.Enum):
    """Kind of the labels of a call. Ranks exchange the values."""

    ABSENT = 0
    """No tensor `labels`: rows count."""
    FLOAT = 1
    """Regression or multi-label targets: every element counts."""
    CLASSES = 2
    """Integers, one per row."""
    TOKENS = 3
    """Integers in two dims: positions, which a causal model shifts by one."""
    PIXELS = 4
    """Integers in three dims or more: maps, in which 255 may also be a mask."""
    SPANS = 5
    """Answer positions in place of `labels`: a row counts if both are within its text."""


INTEGER_KINDS = (LabelKind.CLASSES, LabelKind.TOKENS, LabelKind.PIXELS)


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of one rank's call."""

    kind: LabelKind
    """Kind of the labels."""
    place: int | str | None = None
    """Index of the positional argument, or keyword; `None` without a tensor `labels`."""
    tensor: torch.Tensor | None = None
    """The labels."""
    row_dim: int | None = None
    """Dim of the rows; `None` if the labels are in no `Split`."""

    @property
    def position_dim(self) -> int:
        """Dim of the positions of a row: the last, unless that is the dim of the rows."""
        return -2 if self.tensor is not None and self.tensor.ndim == 2 and self.row_dim == 1 else -1

    def put(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: torch.Tensor | Split
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other labels in place of these."""
        if isinstance(self.place, int):
            return (*args[: self.place], labels, *args[self.place + 1 :]), dict(kwargs)
        return args, dict(kwargs) if self.place is None else {**kwargs, self.place: labels}

    def harmless(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with labels that all count, in place of labels that do not.

        A mean over no labels is NaN, and NaN * 0 is NaN.
        """
        if self.kind is LabelKind.SPANS:
            return args, {**kwargs, **{name: torch.zeros_like(kwargs[name]) for name in _SPAN_NAMES}}
        if self.tensor is None or self.kind not in INTEGER_KINDS:
            return args, dict(kwargs)
        return self.put(args, kwargs, torch.zeros_like(self.tensor))


def find_labels(module: nn.Module, batch: RankBatch, loss: LossFunction | None) -> Labels:
    """Find `labels` among the arguments, by keyword or by position in the model's or the loss's signature."""
    place = _place(module, batch, loss)
    wrapped = None if place is None else _at(batch, place)
    tensor = wrapped.value if isinstance(wrapped, Split) else wrapped
    if not isinstance(tensor, torch.Tensor):
        return Labels(LabelKind.SPANS if loss is None and _spans(batch) else LabelKind.ABSENT)
    row_dim = wrapped.dim % tensor.ndim if isinstance(wrapped, Split) else None
    by_dims = {0: LabelKind.CLASSES, 1: LabelKind.CLASSES, 2: LabelKind.TOKENS}
    kind = LabelKind.FLOAT if tensor.is_floating_point() else by_dims.get(tensor.ndim, LabelKind.PIXELS)
    return Labels(kind, place, tensor, row_dim)


def _at(batch: RankBatch, place: int | str) -> Any:
    return batch.wrapped_args[place] if isinstance(place, int) else batch.wrapped_kwargs[place]


def _place(module: nn.Module, batch: RankBatch, loss: LossFunction | None) -> int | str | None:
    if "labels" in batch.wrapped_kwargs:
        return "labels"
    if not batch.wrapped_args:
        return None
    in_loss = None if loss is None else position_of(loss, "labels")
    # The loss takes the model's output before the call's own arguments.
    for index in (position_of(module, "labels"), in_loss - 1 if in_loss else None):
        if index is not None and index < len(batch.wrapped_args):
            return index
    return None


def has_own_count(module: nn.Module, batch: RankBatch) -> bool:
    """Return True if the caller passed `num_items_in_batch`."""
    index = position_of(module, "num_items_in_batch")
    if index is not None and index < len(batch.wrapped_args):
        return batch.wrapped_args[index] is not None
    return batch.wrapped_kwargs.get("num_items_in_batch") is not None


def _spans(batch: RankBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return start and end positions, flat; `None` if the call has no such pair of integer tensors."""
    start, end = (batch.kwargs.get(name) for name in _SPAN_NAMES)
    if not (isinstance(start, torch.Tensor) and isinstance(end, torch.Tensor)):
        return None
    if start.is_floating_point() or end.is_floating_point() or start.numel() != end.numel():
        return None
    return start.flatten(), end.flatten()


@dataclass(frozen=True)
class Counts:
    """Possible denominators on one rank; `loss_probe.py` finds which of them the loss uses."""

    rows: int = 0
    """Rows of this rank; 0 for a dummy, 1 if the call has no `Split` (equal weights)."""
    labels: int = 0
    """Labels that are not -100; elements of float labels; rows with an answer; else rows. 0 for a dummy."""
    shifted: int = 0
    """Labels that are not -100, without the first position, as a causal model counts."""
    pixels: int = 0
    """Labels that are neither -100 nor 255."""
    half_masked: int = 0
    """Rows with one answer position within the text, and the other outside."""


def count_items(batch: RankBatch, labels: Labels) -> Counts:
    """Count this rank's rows and labels. Not collective."""
    if batch.is_dummy:
        return Counts()
    rows = 1 if batch.num_rows is None else batch.num_rows
    if labels.kind is LabelKind.SPANS:
        return _count_spans(batch, rows)
    tensor = labels.tensor
    if tensor is None:
        return Counts(rows, rows)
    if labels.kind is LabelKind.FLOAT:
        return Counts(rows, tensor.numel())
    counted = tensor != IGNORED_LABEL
    first = 1 if tensor.ndim > 1 and tensor.shape[labels.position_dim] else 0
    shifted = counted.movedim(labels.position_dim, 0)[first:] if tensor.ndim else counted
    pixels = counted & (tensor != IGNORED_PIXEL)
    # One transfer from the device, not three.
    return Counts(rows, *torch.stack([counted.sum(), shifted.sum(), pixels.sum()]).tolist())


def _count_spans(batch: RankBatch, rows: int) -> Counts:
    """Count the rows with an answer: models ignore positions at or after the end of the text."""
    spans = _spans(batch)
    assert spans is not None
    texts = [batch.kwargs.get("input_ids"), batch.kwargs.get("inputs_embeds"), *batch.args[:1]]
    lengths = [text.shape[1] for text in texts if isinstance(text, torch.Tensor) and text.ndim >= 2]
    if not lengths:
        return Counts(rows, rows)
    start, end = spans[0] < lengths[0], spans[1] < lengths[0]
    answered, half_masked = torch.stack([(start & end).sum(), (start != end).sum()]).tolist()
    # Replicated rows have no weight: every rank computes the loss of the whole batch.
    return Counts(rows, answered, half_masked=half_masked if batch.rows else 0)
