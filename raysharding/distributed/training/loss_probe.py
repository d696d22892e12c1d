"""Probe of a loss, once per model: how it treats masked labels and `num_items_in_batch`, found by running it.

A signature does not show that: BERT, T5, BART and ResNet accept `num_items_in_batch` and ignore it.

`identity` compares loss functions that are pickled anew for each call. `_Probe` also runs a loss on parts of a batch to
find whether it is a mean over counted labels, a mean over rows, or a sum.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raysharding.batch import RankBatch, Split
from raysharding.distributed.comm import all_gather_ints, any_rank, to_host
from raysharding.distributed.fully_shard import not_finite, recover, without_trace
from raysharding.distributed.training.index_checks import IndexChecks
from raysharding.distributed.training.labels import (
    IGNORED_LABEL,
    IGNORED_PIXEL,
    INTEGER_KINDS,
    LabelKind,
    Labels,
    count_items,
    find_labels,
)
from raysharding.distributed.training.loss_call import LossFunction, run_loss
from raysharding.tree import leaves, map_leaves

_MAX_DEPTH = 6
"""Depth limit, because closures may contain themselves."""


def identity(value: Any, depth: int = _MAX_DEPTH) -> object:
    """Return a hashable identity of a function, or of a value that it contains: its code, its settings, its type.

    Settings, which select a reduction or a mask, are integers, strings and flags. Floats and tensors (weights, an
    annealed smoothing) count by type only, so that a loss with a new one in each call stays the same.
    """
    if value is None or isinstance(value, bool | int | str | bytes | enum.Enum | type | CodeType):
        return type(value), value
    parts: list[Any] = []
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, FunctionType):
        # An empty cell, of a name without a value, has no contents.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif callable(value):
        parts = [getattr(value, "__qualname__", None), getattr(value, "__dict__", None)]
    return type(value), *(identity(part, depth - 1) for part in parts if depth)


class LossReduction(enum.Enum):
    """How the losses of parts make up the loss of the whole. Ranks exchange the values."""

    ITEMS = 0
    """A mean over counted labels, or over rows without labels."""
    ROWS = 1
    """A mean over rows, whether their labels are masked or not."""
    SUM = 2
    """A sum."""


TOLERANCE = 1e-3
"""Relative; above the rounding of fp32 and the balancing loss of a mixture of experts, far below a wrong weight."""
LOW_PRECISION_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Part:
    """Loss of some rows, and its possible weights."""

    value: float | None
    """The loss; `None` if it is unknown."""
    items: int
    """Number of counted labels, or rows."""
    rows: int
    """Number of rows, counted or not."""
    tolerance: float
    """Relative tolerance."""

    def weighted(self, reduction: LossReduction) -> float:
        """Return the contribution of this part; 0 without counted items."""
        assert self.value is not None
        if reduction is LossReduction.ITEMS:
            return self.value * self.items if self.items else 0.0
        return self.value * self.rows if reduction is LossReduction.ROWS else self.value


def fits(whole: Part, parts: list[Part], reduction: LossReduction) -> bool:
    """Return True if the parts sum to the whole, or if that is unknown."""
    if any(part.value is None for part in (whole, *parts)) or whole.items == 0:
        return True
    want, have = whole.weighted(reduction), [part.weighted(reduction) for part in parts]
    size = max(abs(want), sum(abs(value) for value in have), 1e-6)
    # False for NaN or infinity: a loss that is finite if all labels count, and here is not, has a mask of its own.
    return abs(want - sum(have)) <= max(part.tolerance for part in (whole, *parts)) * size


def all_ranks(flags: list[bool]) -> list[bool]:
    """Return, for each flag, whether it is True on every rank; collective."""
    # Ranks with different flags would run different forwards, and hang.
    return [all(votes) for votes in zip(*all_gather_ints(flags), strict=True)]


def _splits(batch: RankBatch) -> list[Split]:
    wrapped = (batch.wrapped_args, dict(batch.wrapped_kwargs))
    return [leaf for _, leaf in leaves(wrapped, leaf=Split) if isinstance(leaf, Split)]


def _num_rows(batch: RankBatch) -> int:
    """Return the number of rows of this rank; 1 for a dummy."""
    return _splits(batch)[0].num_rows()


def _can_cut(batch: RankBatch, labels: Labels) -> bool:
    """Return True if rows can be left out: no tensor outside the Splits has this rank's rows."""
    if not batch.rows or not _splits(batch) or (labels.tensor is not None and labels.row_dim is None):
        return False
    wrapped = (batch.wrapped_args, dict(batch.wrapped_kwargs))
    whole = [leaf for _, leaf in leaves(wrapped, leaf=Split) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    num_rows = _num_rows(batch)
    return num_rows == 1 or not any(leaf.shape[0] == num_rows for leaf in whole)


def _cut(batch: RankBatch, rows: list[int]) -> RankBatch:
    """Return the call with only these rows, on their device."""

    def take(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Split):
            return leaf
        dim = leaf.dim

        def chosen(_: str, item: torch.Tensor) -> torch.Tensor:
            return item.index_select(dim, torch.tensor(rows, device=item.device))

        return Split(map_leaves(chosen, leaf.value), dim)

    cut = batch.replaced(lambda value: map_leaves(take, value, leaf=Split))
    return replace(cut, num_rows=len(rows))


def _unevenly_masked(batch: RankBatch, labels: Labels, valid: int, half: int) -> RankBatch:
    """Mask some labels in the first half of the rows only, so that means over labels and over rows differ."""
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


_LARGE_COUNT = 1024
"""A power of two, by which division is exact: a loss that honours it is smaller by exactly this factor."""


@dataclass(frozen=True)
class LossTraits:
    """Result of a probe. The defaults are those of a loss without labels."""

    honours_count: bool = False
    """The loss is a sum divided by `num_items_in_batch`."""
    shifts_labels: bool = False
    """The label at position 0 never counts."""
    ignores_255: bool = False
    """The label 255 never counts."""
    returns_pair: bool = False
    """The caller's loss function returns (sum, count)."""
    reduction: LossReduction = LossReduction.ITEMS
    """How the losses of the ranks make up the loss of the whole batch."""


def counted_field(kind: LabelKind, traits: LossTraits) -> str:
    """Return the field of `Counts` that the loss is a mean over."""
    if kind in INTEGER_KINDS and traits.shifts_labels:
        return "shifted"
    return "pixels" if kind in INTEGER_KINDS and traits.ignores_255 else "labels"


_found: WeakKeyDictionary[nn.Module, dict[object, LossTraits]] = WeakKeyDictionary()

_MAX_REMEMBERED = 64
"""Largest number of results per model: a loss function that differs in each call must not fill the memory."""


def _key(batch: RankBatch, loss: LossFunction | None, kind: LabelKind) -> object:
    # Without rows to split, the probe does not find the reduction; its result must not apply to calls with rows.
    return kind, bool(batch.rows), identity(loss)


def recall(module: nn.Module, batch: RankBatch, loss: LossFunction | None, kind: LabelKind) -> LossTraits | None:
    """Return the recorded traits for such a call, `None` if `find_traits` has not run. Not collective."""
    return _found.get(module, {}).get(_key(batch, loss, kind))


def forget(module: nn.Module) -> None:
    """Drop the recorded traits of a model's losses. Not collective."""
    _found.pop(module, None)


def find_traits(module: nn.Module, batch: RankBatch, loss: LossFunction | None, labels: Labels) -> LossTraits:
    """Probe the loss and record its traits, unless no label of the batch counts; collective.

    Model and loss run on labels that the caller never passed; see `loss.loss_share`.

    Args:
        module: The sharded root module.
        batch: This rank's part of a call.
        loss: The caller's loss function, or `None` for the model's own.
        labels: Labels of the call, of the same kind on every rank.

    Raises:
        ValueError: On every rank, if the losses of the ranks do not make up that of one process, or are not finite.
    """
    # The probe makes up labels that a loss may take for classes, e.g. -100 if its mask is 255.
    with without_trace(module), IndexChecks():  # type: ignore[no-untyped-call]
        traits, is_shown = _Probe(module, batch, loss, labels).run()
    if not is_shown:
        return traits
    known = _found.setdefault(module, {})
    while len(known) >= _MAX_REMEMBERED:
        known.pop(next(iter(known)))
    known[_key(batch, loss, labels.kind)] = traits
    return traits


@dataclass(frozen=True)
class _Probe:
    """A few forwards on labels that are chosen so that their losses distinguish the traits.

    Every rank runs the same forwards in the same order (an FSDP forward is collective), whatever they return.
    """

    module: nn.Module
    batch: RankBatch
    loss: LossFunction | None
    labels: Labels

    def run(self) -> tuple[LossTraits, bool]:
        """Return the traits, and True if this batch has labels that show them."""
        is_integer = self.labels.kind in INTEGER_KINDS
        valid = self._valid_label() if is_integer else None
        counting = self._all_counting(valid or 0) if is_integer else self.labels.tensor
        is_pair, honours, value = self._first_look(counting)
        lacks_labels = is_integer and valid is None
        # Ranks with different denominators would train on a wrong loss: all use one result.
        is_pair, is_finite, all_lack = all_ranks([is_pair, math.isfinite(value) or lacks_labels, lacks_labels])
        if is_pair:
            return LossTraits(returns_pair=True), True
        if not is_finite:
            raise not_finite(self.module, self.batch, value)
        masks = self._masks(valid or 0) if is_integer else (False, False)
        honours, shifts, pixels = all_ranks([honours, *masks])
        traits = LossTraits(honours, shifts, pixels)
        if traits.honours_count or all_lack:
            return traits, not all_lack
        reduction = self._reduction(counted_field(self.labels.kind, traits), valid or 0)
        return replace(traits, reduction=reduction), True

    def _counted(self) -> torch.Tensor:
        """Return which labels are no masks, as far as is known."""
        labels = self.labels.tensor
        assert labels is not None
        counted = labels != IGNORED_LABEL
        return counted & (labels != IGNORED_PIXEL) if self.labels.kind is LabelKind.PIXELS else counted

    def _valid_label(self) -> int | None:
        """Return a label that counts at any position; `None` if this rank has none."""
        assert self.labels.tensor is not None
        found = self.labels.tensor[self._counted()]
        return int(found[0]) if found.numel() else None

    def _all_counting(self, valid: int) -> torch.Tensor:
        assert self.labels.tensor is not None
        return torch.where(self._counted(), self.labels.tensor, valid)

    def _first_look(self, labels: torch.Tensor | None) -> tuple[bool, bool, float]:
        """Return whether the loss function returns (sum, count), whether the model honours the count, and the loss."""
        if self.loss is not None:
            found = self._run(labels)
            return isinstance(found, tuple), False, _number(found)
        return (False, False, 1.0) if labels is None else (False, *self._honours_count(labels))

    def _honours_count(self, labels: torch.Tensor) -> tuple[bool, float]:
        """Return True if the model's loss is a sum divided by the count that it is passed; and the loss."""
        try:
            one = self._evaluate(labels, num_items_in_batch=1)
            many = self._evaluate(labels, num_items_in_batch=_LARGE_COUNT)
        except TypeError:
            # The forward refuses the argument, and so does not honour it. Any other error recurs in the real forward.
            recover(self.module)
            return False, self._evaluate(labels)
        return one != 0 and math.isclose(one, many * _LARGE_COUNT, rel_tol=1e-3), one

    def _masks(self, valid: int) -> tuple[bool, bool]:
        """Return whether labels at position 0 never count, and whether 255 never does. Collective."""
        labels, kind = self.labels.tensor, self.labels.kind
        assert labels is not None
        if kind is LabelKind.TOKENS:
            first_only = torch.full_like(labels, IGNORED_LABEL)
            first_only.narrow(self.labels.position_dim, 0, 1).fill_(valid)
            return self._is_empty(first_only), False
        # The next forward is collective: all ranks run it, or none.
        pixels = kind is LabelKind.PIXELS and any_rank(bool((labels == IGNORED_PIXEL).any()))
        return False, pixels and self._is_empty(torch.full_like(labels, IGNORED_PIXEL))

    def _is_empty(self, labels: torch.Tensor) -> bool:
        """Return True if none of these labels counts: the mean is then NaN, or 0 if the model guards against NaN."""
        try:
            value = self._evaluate(labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a rank that raised here alone would leave the others in a forward
            # The loss takes the mask for a class and raises, or divides by a count: the label counts.
            recover(self.module)
            return isinstance(error, ZeroDivisionError)
        return math.isnan(value) or value == 0

    def _evaluate(self, labels: torch.Tensor, **extra: int) -> float:
        return _number(self._run(labels, **extra))

    def _run(self, labels: torch.Tensor | None, **extra: int) -> Any:
        args, kwargs = self.batch.args, self.batch.kwargs
        if labels is not None:
            args, kwargs = self.labels.put(args, kwargs, labels)
        return run_loss(self.module, args, {**kwargs, **extra}, self.loss, compiled=False)[1]

    def _reduction(self, field: str, valid: int) -> LossReduction:
        """Run the loss on all rows of this rank and on both halves; return its reduction. Collective.

        Args:
            field: Field of `Counts` that the loss is a mean over.
            valid: A label that counts.

        Raises:
            ValueError: On every rank, if the loss fits no known reduction on some rank, or is not finite there.
        """
        if not all_ranks([_can_cut(self.batch, self.labels)])[0]:
            return LossReduction.ITEMS
        votes, value = [True] * len(LossReduction), 0.0
        for synthetic in (False, True) if self.labels.kind in INTEGER_KINDS else (False,):
            whole, parts = self._whole_and_halves(field, valid if synthetic else None)
            votes = [
                vote and fits(whole, parts, reduction) for vote, reduction in zip(votes, LossReduction, strict=True)
            ]
            if not synthetic and whole.items and whole.value is not None:
                value = whole.value
        is_finite, *votes = all_ranks([math.isfinite(value), *votes])
        if not is_finite:
            raise not_finite(self.module, self.batch, value)
        found = [reduction for reduction, vote in zip(LossReduction, votes, strict=True) if vote]
        if not found:
            raise ValueError(
                "the loss of this batch is neither the mean over labels that are not -100, nor the mean over rows, nor "
                "a sum, so the ranks' losses do not make up one process's; pass the labels as labels=, masked by -100, "
                "or pass loss= a function that returns (sum, count)"
            )
        return found[0]

    def _whole_and_halves(self, field: str, valid: int | None) -> tuple[Part, list[Part]]:
        num_rows = _num_rows(self.batch)
        rows = list(range(num_rows)) if num_rows > 1 else [0, 0]
        half = len(rows) // 2
        whole = _cut(self.batch, rows)
        if valid is not None:
            whole = _unevenly_masked(whole, find_labels(self.module, whole, self.loss), valid, half)
        indices = list(range(len(rows)))
        parts = [_cut(whole, indices[:half]), _cut(whole, indices[half:])]
        # The unchanged batch raises as the real forward would; errors on changed batches are ignored.
        is_own = valid is None and num_rows > 1
        return self._part(whole, field, lenient=not is_own), [self._part(part, field, lenient=True) for part in parts]

    def _part(self, batch: RankBatch, field: str, *, lenient: bool) -> Part:
        counts = count_items(batch, find_labels(self.module, batch, self.loss))
        try:
            output, value = run_loss(self.module, batch.args, batch.kwargs, self.loss, compiled=False)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # A rank that raised here alone would leave the others waiting in the next forward.
            if not lenient:
                raise
            recover(self.module)
            return Part(None, 0, 0, 0.0)
        usable = isinstance(value, torch.Tensor) and value.numel() == 1
        tolerance = LOW_PRECISION_TOLERANCE if self._is_low_precision((output, value)) else TOLERANCE
        return Part(float(to_host(value)) if usable else None, getattr(counts, field), counts.rows, tolerance)

    def _is_low_precision(self, output: Any) -> bool:
        tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        floats = [item for item in (*tensors, *self.module.parameters()) if item.is_floating_point()]
        return any(item.itemsize < 4 for item in floats)


def _number(value: Any) -> float:
    """Return a loss; 1, a finite constant, without one."""
    usable = isinstance(value, torch.Tensor) and value.numel() == 1
    return float(to_host(value)) if usable else 1.0
