"""History of a module's losses: since when the loss is not finite, and possible causes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import all_gather_json
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.tree import leaves


@dataclass
class _Updates:
    """Updates of a module since its last load."""

    number: int = 0
    last_finite: int = 0


_updates: WeakKeyDictionary[nn.Module, _Updates] = WeakKeyDictionary()


def note_load(module: nn.Module) -> None:
    """Restart the count of updates, after a load. Not collective."""
    _updates.pop(module, None)


def note_update(module: nn.Module, loss: float) -> None:
    """Record an update with the gradients of this loss. Not collective."""
    updates = _updates.setdefault(module, _Updates())
    updates.number += 1
    if math.isfinite(loss):
        updates.last_finite = updates.number


def not_finite(module: nn.Module, batch: RankBatch, value: float) -> ValueError:
    """Return an error that states since when, and possibly why, the loss is not finite; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call.
        value: This rank's loss.
    """
    own = None if math.isfinite(value) else f"{value} on rank "
    found = all_gather_json([own, _origin(module, batch)])
    losses = ", ".join(f"{text}{rank}" for rank, (text, _) in enumerate(found) if text is not None)
    origin = next((text for _, text in found if text is not None), None)
    where = origin or (
        "parameters and arguments are finite. Where nothing counts by a rule of the loss's own, pass the labels as "
        "labels=, masked by -100, or pass loss= a function that returns (sum, count)"
    )
    return ValueError(f"the loss of this batch is {losses} {_since(module)}; {where}")


def _since(module: nn.Module) -> str:
    updates = _updates.get(module)
    if updates is None:
        return "before the first update since the weights were loaded"
    return (
        f"after {updates.number} updates since the weights were loaded, of which number {updates.last_finite} was the "
        "last with a finite loss"
        if updates.last_finite
        else f"after {updates.number} updates since the weights were loaded, none of which had a finite loss"
    )


def _origin(module: nn.Module, batch: RankBatch) -> str | None:
    """Return a text about a parameter or argument that is not finite, or `None`. Not collective."""
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(local_tensor(parameter)).all()):
            return (
                f"the parameter {name} holds values that are not finite; Loading(verify='finite') finds them in files"
            )
    for path, leaf in leaves({**dict(enumerate(batch.args)), **batch.kwargs}, "batch"):
        # An infinity may be a mask.
        if isinstance(leaf, torch.Tensor) and bool(torch.isnan(leaf).any()):
            return f"{path} holds NaN"
    return None
