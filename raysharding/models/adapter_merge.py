"""Merge of LoRA adapters into copies of the base weights, as peft's `merge_and_unload` does it to the live model.

`merge_and_unload` needs the full weights in the module. Here a caller has one full weight at a time, and the module
stays sharded and keeps its adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models.adapters import ADAPTER, AdapterNames, all_names
from raysharding.models.stand_in import class_name, clean_name, original_class, stand_in


@dataclass(frozen=True)
class AdapterMerge:
    """What the adapters add to one tensor of the base model: `merged = base; merged += delta(full_factors)`.

    The addition must be in place, in the base tensor's dtype, as peft's is: a float32 delta is then added to a bfloat16
    weight with one rounding.
    """

    name: str
    """FQN of the base tensor in the model without adapters."""
    factors: tuple[str, ...]
    """Canonical FQNs of the adapter tensors that the delta is made of."""
    _layer: Any = field(repr=False)
    _prefix: str = field(repr=False)
    _is_bias: bool = field(repr=False)

    @torch.no_grad()
    def delta(self, full_factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the full delta by peft's own `get_delta_weight`; the module's tensors are not touched. No collective.

        Args:
            full_factors: FQN → full tensor, in the module's dtype, of at least `factors`; all on one device.

        Returns:
            Tensor of the base tensor's shape, on the factors' device. dtype: the factors', except for an embedding,
            whose delta peft converts to the base weight's dtype. Values depend on the device and on the number of
            threads, as those of every matrix product; on equal ones they are peft's, bit for bit. Memory: the result,
            and for a scale other than 1 or half-precision factors once more, in float32.
        """
        prefix = self._prefix
        layer: Any = stand_in(self._layer, lambda fqn, tensor: full_factors.get(prefix + fqn, tensor))
        if self._is_bias:
            bias: torch.Tensor = layer.lora_B[ADAPTER].bias * layer.scaling[ADAPTER]
            return bias
        delta: torch.Tensor = layer.get_delta_weight(ADAPTER)
        is_embedding = ADAPTER in layer.lora_embedding_A
        return delta.to(layer.get_base_layer().weight.dtype) if is_embedding else delta


def adapter_merges(module: nn.Module) -> dict[str, AdapterMerge]:
    """Return canonical FQN → merge of each base weight, and bias (`lora_bias`), that LoRA adapters change.

    Args:
        module: A model, sharded or not, on any device. Not collective.

    Returns:
        One entry for each changed tensor; empty if the module has no adapters.

    Raises:
        PlanError: An adapter cannot be merged into one weight: it is no plain LoRA (DoRA, LoHa, trained rows of an
            embedding), it is switched off, or the weight is tied to another that the adapter does not change. The error
            lists all such layers.
    """
    names = AdapterNames.of(module)
    if names is None:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    canonical = canonical_names(module)
    owners = _num_owners(module)
    merges: dict[str, AdapterMerge] = {}
    problems: list[str] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        path = clean_name(name)
        if problem := _problem(layer, owners):
            problems.append(f"{path}: {problem}")
            continue
        prefix = f"{path}." if path else ""
        for tensor, factors, is_bias in _factors_of(layer):
            fqn, paths = canonical[tensor], tuple(prefix + factor for factor in factors)
            merges[fqn] = AdapterMerge(names.base.get(fqn, fqn), paths, layer, prefix, is_bias)
    if problems:
        raise PlanError(
            f"the adapters of {len(problems)} layers cannot be merged into the base weights; take the adapters alone, "
            "without a merge:",
            problems=problems,
        )
    return merges


def plain_names(module: nn.Module) -> dict[str, str]:
    """Return canonical FQN → FQN in the model without adapters, of each tensor that the merged model has.

    Adapters are left out, and so are originals that have a trained copy (`modules_to_save`): the copy has their name.
    Without adapters each name stands for itself. Not collective.
    """
    names = AdapterNames.of(module)
    plain: dict[torch.Tensor, str] = {}
    # An original with a trained copy may be tied to a tensor without one, which keeps the value under its own name.
    for name, tensor in all_names(module):
        found = name if names is None else names.plain_name(name)
        if found is not None:
            plain.setdefault(tensor, found)
    return {name: plain[tensor] for tensor, name in canonical_names(module).items() if tensor in plain}


def canonical_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return parameter or buffer → its first name."""
    names: dict[torch.Tensor, str] = {}
    for name, tensor in all_names(module):
        names.setdefault(tensor, name)
    return names


def _num_owners(module: nn.Module) -> Counter[torch.Tensor]:
    """Return parameter → number of modules that hold it; a module that is used twice counts once."""
    parameters = chain.from_iterable(one._parameters.values() for one in module.modules())
    return Counter(parameter for parameter in parameters if parameter is not None)


def _problem(layer: Any, owners: Mapping[torch.Tensor, int]) -> str | None:
    """Return why peft's `get_delta_weight` is not the whole merge of `layer`; `None` if it is."""
    from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear, ParamWrapper

    if original_class(layer) not in (Linear, Embedding, Conv1d, Conv2d, Conv3d, ParamWrapper):
        return f"{type(layer).__module__}.{class_name(layer)} is not a plain LoRA layer"
    base = layer.get_base_layer()
    if variant := layer.lora_variant.get(ADAPTER):
        return f"{type(variant).__name__} is not plain LoRA"
    if layer.disable_adapters or layer.merged or list(layer.active_adapters) != [ADAPTER]:
        return f"its active adapter is not {ADAPTER!r} alone, or its adapters are disabled or merged already"
    if getattr(base, "groups", 1) > 1:
        return f"its convolution has groups={base.groups}"
    if layer.lora_bias.get(ADAPTER) and base.bias is None:
        return "lora_bias=True, but the base layer has no bias"
    if owners[_weight(layer)] > 1:
        return "its base weight is tied to another layer's, which a merge would change too"
    return None


def _weight(layer: Any) -> torch.Tensor:
    """Return the parameter that a LoRA layer adapts: a layer's weight, or one that `target_parameters` names."""
    base = layer.get_base_layer()
    weight: torch.Tensor = getattr(base, getattr(layer, "parameter_name", "weight"))
    return weight


def _factors_of(layer: Any) -> Iterator[tuple[torch.Tensor, list[str], bool]]:
    """Yield each base tensor of a LoRA layer, the names of its adapters in the layer, and True for a bias."""
    if ADAPTER in layer.lora_embedding_A:
        yield _weight(layer), [f"lora_embedding_{side}.{ADAPTER}" for side in "AB"], False
    elif ADAPTER in layer.lora_A:
        yield _weight(layer), [f"lora_{side}.{ADAPTER}.weight" for side in "AB"], False
        if layer.lora_bias.get(ADAPTER):
            yield layer.get_base_layer().bias, [f"lora_B.{ADAPTER}.bias"], True
