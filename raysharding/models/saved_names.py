"""Names and shapes of the tensors in a save of a module, as files of the model's kind have them.

On loading, transformers packs tensors (a layer's experts into one parameter) and renames them. A save reverts both by
transformers' own tables, run on blocks instead of tensors: the results are ranges of the module's tensors, so no tensor
is gathered.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raysharding.models.adapter_merge import canonical_names
from raysharding.models.adapters import AdapterNames, all_names
from raysharding.models.block_tensor import MAX_RUNS, BlockTensor, Run
from raysharding.models.conversion import declared_ties, is_transformers_model
from raysharding.models.stand_in import class_name, stand_in

_MIN_RUN_BYTES: Final = 1024
"""Mean length of ranges in bytes below which a save keeps the module's own tensors: a row of a small vision tower."""
_FEW_RUNS: Final = 8192
"""Number of ranges up to which they may be shorter: a bias whose elements are permuted."""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a save."""

    dtype: torch.dtype
    """dtype in the save."""
    shape: tuple[int, ...]
    """Shape in the save."""
    runs: tuple[Run, ...]
    """Ranges that fill the tensor: `source` is the FQN of a tensor of the module; both tensors are flattened."""

    @classmethod
    def whole(cls, fqn: str, tensor: torch.Tensor) -> SavedTensor:
        """Return a saved tensor that is one whole, unchanged tensor of the module."""
        return cls(tensor.dtype, tuple(tensor.shape), (Run(fqn, 0, 0, math.prod(tensor.shape)),))


class RunIndex:
    """Finds where the elements of a module's tensors go in saved tensors."""

    def __init__(self) -> None:
        self._runs: dict[str, list[tuple[Run, str]]] = {}

    def add(self, key: str, saved: SavedTensor) -> None:
        """Add the runs of a saved tensor."""
        for run in saved.runs:
            insort(self._runs.setdefault(run.source, []), (run, key), key=lambda item: item[0].source_start)

    def parts(self, source: str, first: int, num_elements: int) -> Iterator[tuple[str, int, int, int]]:
        """Split a range of a module's tensor by the saved tensors that it goes to.

        Args:
            source: FQN of the tensor.
            first: First element of the range, in the flattened tensor.
            num_elements: Length of the range.

        Yields:
            Key, first element in the flattened saved tensor, and the elements of the range, `[start:stop]`, that go
            there. Elements of keys that were not added are left out.
        """
        runs, last = self._runs.get(source, []), first + num_elements
        index = max(bisect_right(runs, first, key=lambda item: item[0].source_start) - 1, 0)
        while index and runs[index - 1][0].source_start == runs[index][0].source_start:
            index -= 1  # a tensor that is saved twice
        while index < len(runs) and runs[index][0].source_start < last:
            run, key = runs[index]
            start, stop = max(first, run.source_start), min(last, run.source_start + run.num_elements)
            if start < stop:
                yield key, run.target_start + start - run.source_start, start - first, stop - first
            index += 1


_known: MutableMapping[nn.Module, dict[bool, tuple[tuple[Any, ...], Mapping[str, SavedTensor]]]] = WeakKeyDictionary()
"""Module → `merged` → layout, and the signature that it was computed for. For 48 layers of 128 experts the computation
takes a second, during which training would wait."""


def saved_layout(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *, merged: bool = False
) -> Mapping[str, SavedTensor]:
    """Return the tensors of a module's save, equal on every rank. No collective.

    Args:
        module: The model, sharded or not.
        tensors: FQN → tensor for each tensor to save, without duplicates.
        merged: True for the layout of the model without its adapters; `tensors` then has that model's FQNs.

    Returns:
        Key in the files → tensor. For a model with LoRA adapters, only the adapters, under peft's names, unless
        `merged`. For a transformers model, the tensors that `save_pretrained` would write; if these take arithmetic or
        very many ranges, the module's own tensors, which transformers can also load.
    """
    # transformers saves no table that its class computes anew, such as Marian's sinusoids.
    left_out: Collection[str] = getattr(module, "_keys_to_ignore_on_save", None) or ()
    tensors = {fqn: tensor for fqn, tensor in tensors.items() if fqn not in left_out}
    signature = tuple((fqn, tuple(tensor.shape), tensor.dtype) for fqn, tensor in tensors.items())
    layouts = _known.setdefault(module, {})
    if merged not in layouts or layouts[merged][0] != signature:
        layouts[merged] = (signature, _laid_out(module, tensors, merged))
    return layouts[merged][1]


def _laid_out(module: nn.Module, tensors: Mapping[str, torch.Tensor], merged: bool) -> Mapping[str, SavedTensor]:
    adapters = None if merged else AdapterNames.of(module)
    if adapters is not None:
        # peft saves a tied tensor under each of its names.
        first, held = canonical_names(module), dict(all_names(module))
        sources = {key: first[held[fqn]] for fqn, key in adapters.files.items()}
        return {key: SavedTensor.whole(fqn, tensors[fqn]) for key, fqn in sources.items()}
    ties = declared_ties(module)
    # Of tied names transformers keeps the one that the others are tied to: the base model is found under it.
    names = {fqn: fqn if ties.get(fqn, fqn) in tensors else ties[fqn] for fqn in tensors}
    if is_transformers_model(module):
        if (reverted := _reverted(module, tensors, names)) is not None:
            return reverted
        warnings.warn(
            f"{class_name(module)}: the save has the module's own names and shapes, because too many ranges, or "
            "arithmetic, are between these and the ones that save_pretrained writes. transformers opens it; for other "
            "engines, convert it: open it, set model._weight_conversions = None, and call model.save_pretrained",
            UserWarning,
            stacklevel=2,
        )
    return {names[fqn]: SavedTensor.whole(fqn, tensor) for fqn, tensor in tensors.items()}


def _reverted(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, SavedTensor] | None:
    """Return the tensors after transformers' reversed conversions; `None` if these do more than move ranges."""
    from transformers.core_model_loading import revert_weight_conversion

    # transformers looks the tables up by class name, which FSDP changes.
    model: Any = stand_in(module)
    blocks = {names[fqn]: BlockTensor.of_source(fqn, tensor.shape, tensor.dtype) for fqn, tensor in tensors.items()}
    try:
        reverted: Mapping[str, Any] = revert_weight_conversion(model, blocks)
    except Exception:  # noqa: BLE001 - transformers' operations raise any type
        return None  # the conversion does arithmetic, and blocks have no values
    saved: dict[str, SavedTensor] = {}
    for key, value in reverted.items():
        if not isinstance(value, BlockTensor):
            return None
        runs = value.runs(min(MAX_RUNS, max(_FEW_RUNS, value.numel() * value.dtype.itemsize // _MIN_RUN_BYTES)))
        if runs is None:
            return None
        saved[key] = SavedTensor(value.dtype, tuple(value.shape), runs)
    return saved if _holds_all(saved, tensors) else None


def _holds_all(saved: Mapping[str, SavedTensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if every element of every tensor is saved exactly once."""
    ranges: dict[str, list[tuple[int, int]]] = {fqn: [] for fqn in tensors}
    for one in saved.values():
        for run in one.runs:
            ranges[run.source].append((run.source_start, run.source_start + run.num_elements))
    for fqn, tensor in tensors.items():
        end = math.prod(tensor.shape)
        if any(stop != start for (_, stop), (start, _) in pairwise([(0, 0), *sorted(ranges[fqn]), (end, end)])):
            return False
    return True
