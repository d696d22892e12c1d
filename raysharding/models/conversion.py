"""Mapping of checkpoint keys to FQNs, by regular expressions and exact names or by transformers' own tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models.adapters import AdapterNames
from raysharding.models.stand_in import stand_in


@dataclass
class Conversion:
    """A transformers `WeightConverter` and the checkpoint keys that it consumes."""

    converter: Any
    """The converter; copied for every run, because a run consumes the collected tensors."""
    layer_name: str
    """FQN of the converter's first target."""
    model: nn.Module
    """Stand-in of the model, from which operations read shapes and config."""
    collected: dict[str, list[str]] = field(default_factory=dict)
    """Source pattern → checkpoint keys, in the order in which transformers stacks their tensors."""
    fqns: Mapping[str, str] = field(default_factory=dict)
    """Name in the model without adapters → FQN, where these differ."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Checkpoint keys, in file-name order within each pattern."""
        return tuple(key for keys in self.collected.values() for key in keys)

    @property
    def operations(self) -> str:
        """The operations' names, such as `MergeModulelist+Concatenate`."""
        return "+".join(type(operation).__name__ for operation in self.converter.operations)

    def run(self, tensor_of: Callable[[str], Any]) -> dict[str, Any]:
        """Run the operations.

        Args:
            tensor_of: Checkpoint key → tensor, or a tensor-like object such as a `BlockTensor`.

        Returns:
            FQN → result.
        """
        converter = deepcopy(self.converter)
        for pattern, keys in self.collected.items():
            converter.collected_tensors[pattern] = [tensor_of(key) for key in keys]
        results = converter.convert(self.layer_name, model=self.model, config=self.model.config)
        return {
            self.fqns.get(name, name): value[0] if isinstance(value, list) else value for name, value in results.items()
        }


@dataclass
class Routing:
    """Destination of every checkpoint key."""

    renamed: dict[str, list[str]] = field(default_factory=dict)
    """FQN → checkpoint keys whose tensor is its value without conversion; more than one key is a problem."""
    conversions: dict[str, Conversion] = field(default_factory=dict)
    """FQN of the first target → conversion."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Checkpoint key → its name after renaming, which the module lacks."""
    ignore_missing: re.Pattern[str] | None = None
    """FQNs that the model class allows to be missing."""
    ignore_unexpected: re.Pattern[str] | None = None
    """Renamed keys that the model class allows to be unexpected."""
    optional: frozenset[str] = frozenset()
    """FQNs that may be missing because this kind of checkpoint omits them: adapters, or everything but adapters."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """FQN → FQN of the tensor whose value it copies if it has no other source."""
    rows: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """FQN → FQN of the table whose rows it copies if it has no other source, and these rows."""
    base: Mapping[str, str] = field(default_factory=dict)
    """FQN → its name in the model without adapters, where these differ."""


def is_transformers_model(module: nn.Module) -> bool:
    """Return True if `module` is a `PreTrainedModel`; does not import transformers."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
    return "transformers.modeling_utils.PreTrainedModel" in names


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the parameters and persistent buffers that transformers keeps in float32 when it loads a model in `dtype`.

    Args:
        model: A `PreTrainedModel`.
        dtype: A floating dtype; the class names what it keeps under float16, and what under bfloat16.
    """
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return []
    kept = re.compile("|".join(f"(?:{glob.replace('*', '.*')})" for glob in plan))
    named = model.state_dict(keep_vars=True).items()
    floating = ((fqn, one) for fqn, one in named if isinstance(one, torch.Tensor) and one.is_floating_point())
    return [tensor for fqn, tensor in floating if kept.search(fqn)]


def route(
    module: nn.Module, held: Mapping[str, torch.Tensor], keys: Mapping[str, Any], key_mapping: Mapping[str, str] | None
) -> Routing:
    """Find the FQN of every checkpoint key. A model with adapters loads its base's checkpoint, or adapters.

    Args:
        module: The module, sharded or not.
        held: FQN → tensor for all parameters and persistent buffers, tied names included.
        keys: Checkpoint keys.
        key_mapping: Regular expression → replacement. For a transformers model as in `from_pretrained`; for any other
            model each pattern in turn, as in `re.sub`.

    Raises:
        PlanError: A pattern or replacement of `key_mapping` is malformed.
    """
    adapters = AdapterNames.of(module)
    if adapters is None:
        return _route_base(module, held, keys, key_mapping)
    if adapters.are_keys(keys):
        return _route_adapters(adapters, held, keys)
    known = {adapters.base.get(fqn, fqn): tensor for fqn, tensor in held.items() if fqn not in adapters.added}
    routing = _route_base(module, known, keys, key_mapping)
    fqns = {name: fqn for fqn, name in adapters.base.items()}
    for conversion in routing.conversions.values():
        conversion.fqns = fqns
    return replace(
        routing,
        renamed={fqns.get(name, name): sources for name, sources in routing.renamed.items()},
        optional=adapters.added,
        copies=adapters.copies,
        rows=adapters.rows,
        base=adapters.base,
    )


def _route_adapters(adapters: AdapterNames, held: Mapping[str, torch.Tensor], keys: Mapping[str, Any]) -> Routing:
    fqns = {key: fqn for fqn, key in adapters.files.items()}
    # Base weights that are still on meta count as missing: adapters alone are not a model.
    return Routing(
        renamed={fqns[key]: [key] for key in keys if key in fqns},
        unmatched={key: key for key in keys if key not in fqns},
        optional=frozenset(fqn for fqn, tensor in held.items() if fqn not in adapters.files and not tensor.is_meta),
    )


def _route_base(
    module: nn.Module, held: Mapping[str, torch.Tensor], keys: Mapping[str, Any], key_mapping: Mapping[str, str] | None
) -> Routing:
    if is_transformers_model(module):
        return _route_transformers(module, held, keys, key_mapping)
    return _route_plain(held, keys, key_mapping)


def _route_plain(
    held: Mapping[str, torch.Tensor], keys: Mapping[str, Any], key_mapping: Mapping[str, str] | None
) -> Routing:
    routing = Routing()
    for key in keys:
        renamed = key
        for pattern, replacement in (key_mapping or {}).items():
            try:
                renamed = re.sub(pattern, replacement, renamed)
            except (re.error, IndexError) as exc:
                raise PlanError(f"key_mapping: {replacement!r} does not fit {pattern!r}: {exc}") from exc
        if renamed in held:
            routing.renamed.setdefault(renamed, []).append(key)
        else:
            routing.unmatched[key] = renamed
    return routing


def _route_transformers(
    module: nn.Module, held: Mapping[str, torch.Tensor], keys: Mapping[str, Any], key_mapping: Mapping[str, str] | None
) -> Routing:
    """Route keys as `convert_and_load_state_dict_in_model` does: same functions, same order, same fallbacks."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    # transformers looks the tables up by class name, which FSDP changes.
    model: Any = stand_in(module)
    try:
        mapping = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    except (ValueError, re.error) as exc:
        raise PlanError(f"key_mapping={dict(key_mapping or {})!r} is not usable: {exc}") from exc
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    routing = Routing(
        ignore_missing=_any_of(model._keys_to_ignore_on_load_missing),
        ignore_unexpected=_any_of(_unexpected_patterns(model)),
    )
    # Sorted, because transformers stacks a layer's experts in this order, and some renamings depend on the order.
    for key in sorted(keys, key=dot_natural_key):
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, held)
        if renamed not in held and key in held:
            renamed, pattern = rename_source_key(key, [], [], prefix, held)
        if renamed not in held:
            routing.unmatched[key] = renamed
        elif pattern is None:
            routing.renamed.setdefault(renamed, []).append(key)
        else:
            if renamed not in routing.conversions:
                routing.conversions[renamed] = Conversion(converter_of[pattern], renamed, model)
            routing.conversions[renamed].collected.setdefault(pattern, []).append(key)
    return routing


def part_outside_base(module: nn.Module, config: Mapping[str, Any] | None) -> Callable[[str], str | None]:
    """Return a function of a name: its part of the model (the first module) outside of what model classes share.

    The files of a checkpoint hold a model of the class that config.json's `architectures` names. A model of another
    class has the base in common with that one (`base_model_prefix`), and a head of its own: whatever is outside of the
    base, and a pooler in it, which some classes leave out. Within the base, all must fit: a missing layer is a mistake.

    Args:
        module: The model, sharded or not.
        config: config.json of the files.

    Returns:
        Name (an FQN, or a checkpoint key) → part; `None` for a name in the base, and for all names if the files hold a
        model of this class, or may do so.
    """
    architectures = (config or {}).get("architectures")
    classes = {cls.__name__ for cls in type(module).__mro__}  # a subclass has the heads of its class
    if not architectures or not is_transformers_model(module) or not classes.isdisjoint(architectures):
        return lambda _: None
    prefix: Any = module.base_model_prefix
    base: nn.Module = getattr(module, prefix, module)
    shared = {*(name for name, _ in base.named_children()), *base._parameters, *base._buffers}
    if base is not module:
        shared.discard("pooler")

    def part(name: str) -> str | None:
        first, _, rest = name.partition(".")
        if first == prefix:
            return f"{prefix}.pooler" if base is not module and rest.startswith("pooler.") else None
        return None if first in shared else first

    return part


def _unexpected_patterns(model: Any) -> set[str]:
    """Return the class's patterns and two for many models, as `_adjust_missing_and_unexpected_keys` collects them."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _any_of(patterns: set[str] | list[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def declared_ties(module: nn.Module) -> dict[str, str]:
    """Return FQN → FQN of the tensor that a transformers model declares it tied to; empty for other modules."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {}) if is_transformers_model(module) else {}
