"""Counts of labels for a model that divides by transformers' `num_items_in_batch`: for losses that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.training.losses.calls import position_of, takes

_NAME = "num_items_in_batch"
_IGNORED_LABEL = -100
_IGNORED_PIXEL = 255
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
"""Values of transformers' `loss_type` by which labels are shifted by one position."""


def takes_count(module: nn.Module) -> bool:
    """Return True if a model's forward takes `num_items_in_batch`."""
    return takes(module, _NAME)


def has_count(module: nn.Module, batch: RankBatch) -> bool:
    """Return True if the caller passed `num_items_in_batch`."""
    return _argument(module, _NAME, batch.wrapped_args, batch.wrapped_kwargs) is not None


def _argument(module: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call of the module, given by position or by name; `None` if it is not given."""
    index = position_of(module, name)
    return kwargs.get(name) if index is None or index >= len(args) else args[index]


@dataclass(frozen=True)
class LabelCounts:
    """Labels of one rank that may count."""

    counted: int
    """By the rule of the model's loss; 0 for a dummy."""
    other: int
    """By the other rule: shifted, if `counted` is not, and vice versa. Equal counts show nothing of the rule."""


def count_labels(module: nn.Module, batch: RankBatch) -> LabelCounts | None:
    """Count the labels of a call as the model's loss does; `None` if it has no integer labels. Not collective."""
    labels = _argument(module, "labels", batch.args, batch.kwargs)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.ndim:
        return None
    if batch.is_dummy:
        return LabelCounts(0, 0)
    kind = str(getattr(module, "loss_type", "") or "")
    ignored = _IGNORED_PIXEL if kind == "ForSemanticSegmentation" else _IGNORED_LABEL
    counted = labels != ignored
    position_dim = 0 if batch.dim == 1 and labels.ndim == 2 else -1
    shifted = counted.movedim(position_dim, 0)[1:] if labels.ndim > 1 else counted
    both = torch.stack([counted.sum(), shifted.sum()]).tolist()  # one transfer from the device
    return LabelCounts(*reversed(both)) if kind in _SHIFTED else LabelCounts(*both)
