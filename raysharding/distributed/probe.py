"""Finding out, by running it, what a loss does with masked labels and with `num_items_in_batch`; once for each model.

A signature does not tell: BERT, T5, BART and ResNet accept `num_items_in_batch` and ignore it.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.loss_call import LossFunction, call_loss, call_model, find_loss
from raysharding.distributed.metadata import metadata_device
from raysharding.distributed.recovery import recover, without_trace

_MASKED = -100
_PIXEL = 255
_LARGE_COUNT = 1024
"""A power of two: dividing by it is exact, so a loss that honours it is exactly that much smaller."""


class LabelKind(enum.Enum):
    """What a call's `labels` are. The values travel between ranks."""

    ABSENT = 0
    """No tensor of that name: rows count."""
    FLOAT = 1
    """Regression or multi-label targets: every element counts."""
    CLASSES = 2
    """Integers, one for each row."""
    TOKENS = 3
    """Integers in two dims: positions, which a causal model shifts by one."""
    PIXELS = 4
    """Integers in three dims or more: maps, in which 255 may be masked too."""


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


_found: WeakKeyDictionary[nn.Module, dict[tuple[LabelKind, object], LossTraits]] = WeakKeyDictionary()


def label_kind(batch: RankBatch) -> LabelKind:
    """Return what this rank's `labels` keyword holds; no collective."""
    labels = batch.kwargs.get("labels")
    if not isinstance(labels, torch.Tensor):
        return LabelKind.ABSENT
    if labels.is_floating_point():
        return LabelKind.FLOAT
    return {0: LabelKind.CLASSES, 1: LabelKind.CLASSES, 2: LabelKind.TOKENS}.get(labels.ndim, LabelKind.PIXELS)


def find_traits(module: nn.Module, batch: RankBatch, loss: LossFunction | None, kind: LabelKind) -> LossTraits:
    """Return what the loss does, probing it the first time; collective then, and then only.

    All ranks call it with the same loss and kind, so all of them find the answer remembered or none does.

    Args:
        module: The sharded root module.
        batch: This rank's part of a call.
        loss: The caller's loss function, or `None` for the model's own.
        kind: `label_kind(batch)`, equal on every rank.
    """
    if kind is LabelKind.ABSENT:
        return LossTraits()
    known = _found.setdefault(module, {})
    key = (kind, _identity(loss))
    if key not in known:
        with without_trace(module):
            known[key] = _vote(_Probe(module, batch, loss).run(kind))
    return known[key]


def _identity(loss: Any) -> object:
    """What stays equal when a function is pickled anew for each call: its code, or its class."""
    if isinstance(loss, functools.partial):
        return _identity(loss.func)
    code = getattr(loss, "__code__", None)
    return code if isinstance(code, CodeType) else type(loss)


def _vote(traits: LossTraits) -> LossTraits:
    """Take for true what every rank found; collective."""
    flags = [traits.honours_count, traits.shifts_labels, traits.ignores_255, traits.returns_pair]
    votes = torch.tensor(flags, dtype=torch.int32, device=metadata_device())
    # Ranks that went on with different denominators would train on a wrong loss, silently: one answer for all.
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return LossTraits(*(bool(vote) for vote in votes.tolist()))


@dataclass(frozen=True)
class _Probe:
    """A handful of forwards on labels that are chosen so that their losses tell the traits apart.

    Every rank runs the same forwards in the same order (an FSDP forward is collective), whatever they return.
    """

    module: nn.Module
    batch: RankBatch
    loss: LossFunction | None

    def run(self, kind: LabelKind) -> LossTraits:
        labels: torch.Tensor = self.batch.kwargs["labels"]
        if kind is LabelKind.FLOAT:
            return LossTraits(honours_count=self._honours_count(labels))
        masked = labels == _MASKED
        # A label that counts is valid wherever it stands; a rank that has none takes class 0.
        valid = int(labels[~masked][0]) if bool((~masked).any()) else 0
        counting = torch.where(masked, valid, labels)
        if self._returns_pair(counting):
            return LossTraits(returns_pair=True)
        honours = self._honours_count(counting)
        if labels.ndim < 2:
            return LossTraits(honours_count=honours)
        first_only = torch.full_like(labels, _MASKED)
        first_only[..., 0] = valid
        shifts = kind is LabelKind.TOKENS and self._is_empty(first_only)
        pixels = kind is LabelKind.PIXELS and self._anywhere(labels == _PIXEL)
        return LossTraits(honours, shifts, pixels and self._is_empty(torch.full_like(labels, _PIXEL)))

    def _returns_pair(self, labels: torch.Tensor) -> bool:
        """Whether the caller's loss function returns (sum, count)."""
        return self.loss is not None and isinstance(self._run(labels), tuple)

    def _honours_count(self, labels: torch.Tensor) -> bool:
        """Whether the model's loss is a sum over the count that it is given, and nothing else besides."""
        if self.loss is not None:
            return False
        try:
            one = self._evaluate(labels, num_items_in_batch=1)
            many = self._evaluate(labels, num_items_in_batch=_LARGE_COUNT)
        except TypeError:
            # The forward refuses the argument, so it does not honour it. Any other cause shows in the real forward.
            recover(self.module, in_backward=False)
            return False
        return math.isfinite(one) and one != 0 and math.isclose(one, many * _LARGE_COUNT, rel_tol=1e-3)

    def _is_empty(self, labels: torch.Tensor) -> bool:
        """Whether none of these labels counts: the mean over none is NaN, or 0 where the model guards against that."""
        try:
            value = self._evaluate(labels)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, ValueError, RuntimeError):
            # The loss takes the mask for a class and refuses it, so it does not leave it out.
            recover(self.module, in_backward=False)
            return False
        return math.isnan(value) or value == 0

    def _anywhere(self, found: torch.Tensor) -> bool:
        votes = found.any().to(dtype=torch.int32, device=metadata_device())
        # The next forward is collective: all ranks run it or none does.
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def _evaluate(self, labels: torch.Tensor, **extra: int) -> float:
        """The loss for these labels; 1 (a finite mean that follows nothing) where there is none to look at."""
        value = self._run(labels, **extra)
        usable = isinstance(value, torch.Tensor) and value.numel() == 1
        return float(value.float()) if usable else 1.0

    def _run(self, labels: torch.Tensor, **extra: int) -> Any:
        kwargs = {**self.batch.kwargs, "labels": labels}
        if self.loss is None:
            return find_loss(self.module(*self.batch.args, **kwargs, **extra))
        output = call_model(self.module, self.batch.args, kwargs, self.loss)
        return call_loss(self.loss, output, self.batch.args, kwargs)
