"""Which tensors a save of a module holds: under the names, and in the shapes, that the files of its kind have.

transformers packs tensors on loading (a layer's experts into one parameter) and renames them. A save undoes that, by
transformers' own tables, run on boxes instead of tensors: what comes out are ranges of the module's tensors, so nothing
is gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raysharding.models.adapters import AdapterNames
from raysharding.models.blocks import BlockTensor, Run
from raysharding.models.conversion import CONVERSION_ERRORS, is_transformers_model
from raysharding.models.key_mapping import FEW_RUNS, MIN_RUN_BYTES
from raysharding.models.stand_in import stand_in


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a save."""

    dtype: torch.dtype
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape."""
    runs: tuple[Run, ...]
    """What fills it: `source` is the FQN of a tensor of the module, both flattened."""

    @classmethod
    def whole(cls, fqn: str, tensor: torch.Tensor) -> SavedTensor:
        """A tensor of the module as it is."""
        num_elements = math.prod(tensor.shape)
        runs = (Run(fqn, 0, 0, num_elements),)
        return cls(tensor.dtype, tuple(tensor.shape), runs)


_known: MutableMapping[nn.Module, tuple[tuple[Any, ...], Mapping[str, SavedTensor]]] = WeakKeyDictionary()
"""By module, with what it was worked out from: 48 layers of 128 experts take a second, in which training stands."""


def saved_layout(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, SavedTensor]:
    """Say what a save of a module holds; the same on every rank, no collective.

    Args:
        module: The model, sharded or not.
        tensors: FQN → each of its tensors that are saved, once.

    Returns:
        Key in the files → tensor. Of a model with LoRA adapters they alone, under peft's names. Of a transformers model
        what `save_pretrained` would write; where that takes arithmetic, or very many ranges, the module's own tensors,
        which transformers opens, too.
    """
    signature = tuple((fqn, tuple(tensor.shape), tensor.dtype) for fqn, tensor in tensors.items())
    known = _known.get(module)
    if known is None or known[0] != signature:
        known = _known[module] = (signature, _laid_out(module, tensors))
    return known[1]


def _laid_out(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, SavedTensor]:
    adapters = AdapterNames.of(module)
    if adapters is not None:
        return {key: SavedTensor.whole(fqn, tensors[fqn]) for fqn, key in adapters.files.items()}
    reverted = _reverted(module, tensors) if is_transformers_model(module) else None
    return reverted or {fqn: SavedTensor.whole(fqn, tensor) for fqn, tensor in tensors.items()}


def _reverted(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, SavedTensor] | None:
    """What transformers' reversed tables make of the tensors; `None` where that is more than moving ranges."""
    from transformers.core_model_loading import revert_weight_conversion

    # The tables are looked up by class name, and FSDP changes that.
    model: Any = stand_in(module)
    boxes = {fqn: BlockTensor.of_source(fqn, tensor.shape, tensor.dtype) for fqn, tensor in tensors.items()}
    try:
        found: Mapping[str, Any] = revert_weight_conversion(model, boxes)
    except CONVERSION_ERRORS:
        return None  # arithmetic, on what has no values here
    saved: dict[str, SavedTensor] = {}
    for key, value in found.items():
        if not isinstance(value, BlockTensor):
            return None
        runs = value.runs(max(FEW_RUNS, value.numel() * value.dtype.itemsize // MIN_RUN_BYTES))
        if runs is None:
            return None
        saved[key] = SavedTensor(value.dtype, tuple(value.shape), runs)
    return saved if _holds_all(saved, tensors) else None


def _holds_all(saved: Mapping[str, SavedTensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every element of every tensor is saved once."""
    ranges: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn in tensors}
    for one in saved.values():
        for run in one.runs:
            ranges[run.source].append((run.source_start, run.source_start + run.num_elements))
    for fqn, tensor in tensors.items():
        position = 0
        for start, stop in sorted(ranges[fqn]):
            if start != position:
                return False
            position = stop
        if position != math.prod(tensor.shape):
            return False
    return True
