"""Finding out, by running it, what a loss does with masked labels and with `num_items_in_batch`; once for each model.

A signature does not tell: BERT, T5, BART and ResNet accept `num_items_in_batch` and ignore it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.index_checks import IndexChecks
from raysharding.distributed.labels import IGNORED_LABEL, IGNORED_PIXEL, INTEGER_KINDS, LabelKind, Labels
from raysharding.distributed.loss_call import LossFunction, run_loss
from raysharding.distributed.loss_history import not_finite
from raysharding.distributed.loss_identity import identity
from raysharding.distributed.metadata import metadata_device
from raysharding.distributed.recovery import recover, without_trace
from raysharding.distributed.weighing import Weigher, Weighing, agree

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
    weighing: Weighing = Weighing.ITEMS
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
        ValueError: On every rank, when the ranks' losses do not make up one process's (see `weighing.Weigher`), or are
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
        is_pair, is_finite, all_lack = agree([is_pair, math.isfinite(value) or lacks_labels, lacks_labels])
        if is_pair:
            return LossTraits(returns_pair=True), True
        if not is_finite:
            raise not_finite(self.module, self.batch, value)
        masks = self._masks(valid or 0) if is_integer else (False, False)
        honours, shifts, pixels = agree([honours, *masks])
        traits = LossTraits(honours, shifts, pixels)
        if traits.honours_count or all_lack:
            return traits, not all_lack
        weigher = Weigher(self.module, self.loss, counted_field(self.labels.kind, traits))
        return replace(traits, weighing=weigher.find(self.batch, self.labels, valid or 0)), True

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
