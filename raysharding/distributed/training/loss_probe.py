"""Finding out, by running it, what a loss does with masked labels and with `num_items_in_batch`; once for each model.

A signature does not tell: BERT, T5, BART and ResNet accept `num_items_in_batch` and ignore it.

What stays equal when a loss function is pickled anew for each call, and differs where its result may.

Finding out, by running it on parts of a batch, what a loss adds up by: counted labels, rows, or itself.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch, Split
from raysharding.distributed.comm import metadata_device
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
"""Closures may hold themselves."""


def identity(value: Any, depth: int = _MAX_DEPTH) -> object:
    """Return a hashable stand-in for a function or a value that it holds: its code, its settings, its type.

    Settings are what selects a reduction or a mask: numbers but floats, strings, flags. Of floats and tensors (weights,
    a smoothing that is annealed) only the type counts, so a loss that holds a new one in each call is still the same.
    """
    kind = type(value)
    if value is None or isinstance(value, bool | int | str | bytes | enum.Enum | type):
        return kind, value
    if depth == 0:
        return kind
    inner = functools.partial(identity, depth=depth - 1)
    if isinstance(value, functools.partial):
        return kind, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, FunctionType):
        return value.__code__, inner(value.__defaults__), inner(value.__kwdefaults__), _closure(value, inner)
    if isinstance(value, MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, Mapping):
        return kind, tuple((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(inner(item) for item in value)
    return kind, getattr(value, "__qualname__", None), _state(value, inner)


def _closure(function: FunctionType, inner: Any) -> object:
    cells: list[object] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(inner(cell.cell_contents))
        except ValueError:
            # A name that is not bound yet.
            cells.append(None)
    return tuple(cells)


def _state(value: Any, inner: Any) -> object:
    """The attributes of a callable object; those of anything else (a tensor, an array) are not looked at."""
    if not callable(value) or isinstance(value, CodeType):
        return None
    return inner(getattr(value, "__dict__", None))


class LossReduction(enum.Enum):
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
    """The loss of some rows, and what it could be weighted by."""

    value: float | None
    """`None`: the loss cannot be told."""
    items: int
    """Counted labels, or rows."""
    rows: int
    """Rows, counted or not."""
    tolerance: float
    """Relative."""

    def weighted(self, reduction: LossReduction) -> float:
        """This part's contribution; that of a part in which nothing counts is 0."""
        assert self.value is not None
        if reduction is LossReduction.ITEMS:
            return self.value * self.items if self.items else 0.0
        return self.value * self.rows if reduction is LossReduction.ROWS else self.value


def fits(whole: Part, parts: list[Part], reduction: LossReduction) -> bool:
    """Whether the parts add up to the whole; true where that cannot be told."""
    if any(part.value is None for part in (whole, *parts)) or whole.items == 0:
        return True
    want, have = whole.weighted(reduction), [part.weighted(reduction) for part in parts]
    size = max(abs(want), sum(abs(value) for value in have), 1e-6)
    # A NaN or an infinity makes this comparison false: finite where all labels count, the loss has a mask of its own.
    return abs(want - sum(have)) <= max(part.tolerance for part in (whole, *parts)) * size


@dataclass(frozen=True)
class ReductionProbe:
    """Evaluates a loss on all rows of this rank and on its two halves. Every rank runs the same forwards."""

    module: nn.Module
    loss: LossFunction | None
    item: str
    """The field of `Counts` that the loss is a mean over."""

    def find(self, batch: RankBatch, labels: Labels, valid: int) -> LossReduction:
        """Return how the loss adds up; collective. `valid` is a label that counts.

        Raises:
            ValueError: On every rank, when it adds up in no known way on some rank, or is not finite there.
        """
        if not all_ranks([_can_cut(batch, labels)])[0]:
            return LossReduction.ITEMS
        votes, value = [True] * len(LossReduction), 0.0
        for synthetic in (False, True) if labels.kind in INTEGER_KINDS else (False,):
            whole, parts = self._evaluate(batch, labels, valid if synthetic else None)
            votes = [
                vote and fits(whole, parts, reduction) for vote, reduction in zip(votes, LossReduction, strict=True)
            ]
            if not synthetic and whole.items and whole.value is not None:
                value = whole.value
        is_finite, *votes = all_ranks([math.isfinite(value), *votes])
        if not is_finite:
            raise not_finite(self.module, batch, value)
        found = [reduction for reduction, vote in zip(LossReduction, votes, strict=True) if vote]
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


def all_ranks(flags: list[bool]) -> list[bool]:
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


_LARGE_COUNT = 1024
"""A power of two: dividing by it is exact, so a loss that honours it is exactly that much smaller."""


@dataclass(frozen=True)
class LossTraits:
    """What the probe found. The defaults hold for a loss without labels."""

    honours_count: bool = False
    """The loss is a sum divided by `num_items_in_batch`."""
    shifts_labels: bool = False
    """The label at position 0 never counts."""
    ignores_255: bool = False
    """The label 255 never counts."""
    returns_pair: bool = False
    """The caller's loss function returns (sum, count), so it counts for itself."""
    reduction: LossReduction = LossReduction.ITEMS
    """How the losses of the ranks' parts make up the whole batch's."""


def counted_field(kind: LabelKind, traits: LossTraits) -> str:
    """Return which field of `Counts` the loss is a mean over."""
    if kind in INTEGER_KINDS and traits.shifts_labels:
        return "shifted"
    return "pixels" if kind in INTEGER_KINDS and traits.ignores_255 else "labels"


_found: WeakKeyDictionary[nn.Module, dict[object, LossTraits]] = WeakKeyDictionary()

_MAX_REMEMBERED = 64
"""Of one model; a loss function that differs in each call must not fill the memory."""


def _key(batch: RankBatch, loss: LossFunction | None, kind: LabelKind) -> object:
    # Without rows to cut the probe cannot see how the loss adds up, and must not answer for calls where it can.
    return kind, bool(batch.rows), identity(loss)


def recall(module: nn.Module, batch: RankBatch, loss: LossFunction | None, kind: LabelKind) -> LossTraits | None:
    """Return what `find_traits` found out for such a call, `None` if it has not run; no collective."""
    return _found.get(module, {}).get(_key(batch, loss, kind))


def forget(module: nn.Module) -> None:
    """Forget what was found out about a model's losses; no collective."""
    _found.pop(module, None)


def find_traits(module: nn.Module, batch: RankBatch, loss: LossFunction | None, labels: Labels) -> LossTraits:
    """Probe what the loss does and remember it, unless no label of the batch counts; collective.

    Model and loss run on labels that the caller never had; see `loss.weigh`.

    Args:
        module: The sharded root module.
        batch: This rank's part of a call.
        loss: The caller's loss function, or `None` for the model's own.
        labels: The call's labels, of equal kind on every rank.

    Raises:
        ValueError: On every rank, when the ranks' losses do not make up one process's (see `ReductionProbe`), or are
            not finite, so that nothing can be told from them.
    """
    # Labels are made up here that a loss may take for classes: -100 where it leaves out 255.
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
    """A handful of forwards on labels that are chosen so that their losses tell the traits apart.

    Every rank runs the same forwards in the same order (an FSDP forward is collective), whatever they return.
    """

    module: nn.Module
    batch: RankBatch
    loss: LossFunction | None
    labels: Labels

    def run(self) -> tuple[LossTraits, bool]:
        """Return what the loss does, and whether this batch has labels that show it."""
        is_integer = self.labels.kind in INTEGER_KINDS
        valid = self._valid_label() if is_integer else None
        counting = self._all_counting(valid or 0) if is_integer else self.labels.tensor
        is_pair, honours, value = self._first_look(counting)
        lacks_labels = is_integer and valid is None
        # Ranks that went on with different denominators would train on a wrong loss, silently: one answer for all.
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
        probe = ReductionProbe(self.module, self.loss, counted_field(self.labels.kind, traits))
        return replace(traits, reduction=probe.find(self.batch, self.labels, valid or 0)), True

    def _counted(self) -> torch.Tensor:
        """Which of the labels are no masks, as far as that is known yet."""
        labels = self.labels.tensor
        assert labels is not None
        counted = labels != IGNORED_LABEL
        return counted & (labels != IGNORED_PIXEL) if self.labels.kind is LabelKind.PIXELS else counted

    def _valid_label(self) -> int | None:
        """A label that counts, which is valid wherever it stands; `None` where this rank has none."""
        assert self.labels.tensor is not None
        found = self.labels.tensor[self._counted()]
        return int(found[0]) if found.numel() else None

    def _all_counting(self, valid: int) -> torch.Tensor:
        assert self.labels.tensor is not None
        return torch.where(self._counted(), self.labels.tensor, valid)

    def _first_look(self, labels: torch.Tensor | None) -> tuple[bool, bool, float]:
        """Whether the caller's loss function returns (sum, count); whether the model honours the count; the loss."""
        if self.loss is not None:
            found = self._run(labels)
            return isinstance(found, tuple), False, _number(found)
        return (False, False, 1.0) if labels is None else (False, *self._honours_count(labels))

    def _honours_count(self, labels: torch.Tensor) -> tuple[bool, float]:
        """Whether the model's loss is a sum over the count that it is given, and nothing else besides; and the loss."""
        try:
            one = self._evaluate(labels, num_items_in_batch=1)
            many = self._evaluate(labels, num_items_in_batch=_LARGE_COUNT)
        except TypeError:
            # The forward refuses the argument, so it does not honour it. Any other cause shows in the real forward.
            recover(self.module, in_backward=False)
            return False, self._evaluate(labels)
        return one != 0 and math.isclose(one, many * _LARGE_COUNT, rel_tol=1e-3), one

    def _masks(self, valid: int) -> tuple[bool, bool]:
        """Whether labels at position 0 never count; whether 255 never does. Collective."""
        labels, kind = self.labels.tensor, self.labels.kind
        assert labels is not None
        if kind is LabelKind.TOKENS:
            first_only = torch.full_like(labels, IGNORED_LABEL)
            first_only.narrow(self.labels.position_dim, 0, 1).fill_(valid)
            return self._is_empty(first_only), False
        pixels = kind is LabelKind.PIXELS and self._anywhere(labels == IGNORED_PIXEL)
        return False, pixels and self._is_empty(torch.full_like(labels, IGNORED_PIXEL))

    def _is_empty(self, labels: torch.Tensor) -> bool:
        """Whether none of these labels counts: the mean over none is NaN, or 0 where the model guards against that."""
        try:
            value = self._evaluate(labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a rank that raised here alone would leave the others in a forward
            # The loss takes the mask for a class and refuses it, so it does not leave it out; or divides by a count.
            recover(self.module, in_backward=False)
            return isinstance(error, ZeroDivisionError)
        return math.isnan(value) or value == 0

    def _anywhere(self, found: torch.Tensor) -> bool:
        votes = found.any().to(dtype=torch.int32, device=metadata_device())
        # The next forward is collective: all ranks run it or none does.
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def _evaluate(self, labels: torch.Tensor, **extra: int) -> float:
        return _number(self._run(labels, **extra))

    def _run(self, labels: torch.Tensor | None, **extra: int) -> Any:
        args, kwargs = self.batch.args, self.batch.kwargs
        if labels is not None:
            args, kwargs = self.labels.put(args, kwargs, labels)
        return run_loss(self.module, args, {**kwargs, **extra}, self.loss, compiled=False)[1]


def _number(value: Any) -> float:
    """A loss; 1 (a finite mean that follows nothing) where there is none to look at."""
    usable = isinstance(value, torch.Tensor) and value.numel() == 1
    return float(value.float()) if usable else 1.0
