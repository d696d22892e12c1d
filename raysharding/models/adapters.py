"""LoRA adapters: peft's layers in a model that is built on meta, and the names of the layers' tensors in files.

Only this module and `adapter_merge` import peft, and only for a model with adapters.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Self

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.storage import HubPath, is_remote
from raysharding.errors import PlanError
from raysharding.models.config_files import written_files
from raysharding.models.stand_in import clean_name, original_class, stand_in

ADAPTER_PREFIX: Final = "base_model.model."
"""Prefix of every name in a file of adapters: the path at which a `PeftModel` holds the model."""
ADAPTER: Final = "default"
"""peft's name of the adapters."""
_SUPPORTED: Final = (
    "alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying exclude_modules fan_in_fan_out "
    "inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha lora_bias lora_dropout "
    "modules_to_save peft_type peft_version r rank_pattern revision target_modules target_parameters task_type "
    "trainable_token_indices use_dora use_rslora"
)
"""Fields of `peft.LoraConfig` that may differ from their defaults. The other fields read base weights when adapters are
created, and no rank holds these whole; or the fields change which parameters the base checkpoint fills. DoRA's first
magnitudes are computed when the base is loaded (`first_magnitude`)."""
_SCALE: Final[Mapping[str, Any]] = {
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
}
"""Fields that set the adapters' scale, or which rows are trained → value that a file without the field stands for.
Except for `r`, the names and shapes of tensors do not show these fields, and peft does not fill them in."""
_HEADS: Final[Mapping[str, tuple[str, ...]]] = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Task type → names of its head, as in peft's `PeftModelForSequenceClassification` and similar classes."""
_PEFT_ERRORS: Final = (AttributeError, LookupError, TypeError, ValueError, re.error)
"""Errors that peft raises for unsupported values of fields."""
_INITS: Final = (True, False, "gaussian")


@dataclass(frozen=True)
class Adapted:
    """A model to build, and the adapters to add to the model."""

    model: str | Callable[[], nn.Module] | None
    """The model, in any form that `from_checkpoint(model=...)` accepts."""
    fields: Mapping[str, Any]
    """Contents of adapter_config.json: `peft.LoraConfig` as JSON."""
    origin: str = "peft_config"
    """Source of `fields`, for errors."""
    base: str | None = None
    """Path or URI of the checkpoint that the base weights came from, set once the checkpoint is opened. A restart uses
    this path and not the path in the adapters' files, which may come from another machine."""

    @classmethod
    def of(cls, model: str | Callable[[], nn.Module] | None, peft_config: Any) -> Self:
        """Convert a user's configuration.

        Args:
            model: As `from_checkpoint(model=...)` takes it.
            peft_config: The configuration, a `peft.LoraConfig`.

        Raises:
            ValueError: `peft_config` is not a `peft.LoraConfig`, or requests an unsupported feature.
        """
        kind = type(peft_config)
        if f"{kind.__module__}.{kind.__qualname__}" != "peft.tuners.lora.config.LoraConfig":
            raise ValueError(f"peft_config is a {kind.__name__}: give a peft.LoraConfig, as LoraConfig(r=16)")
        fields = {key: sorted(item) if isinstance(item, set) else item for key, item in peft_config.to_dict().items()}
        try:
            plain: dict[str, Any] = json.loads(json.dumps(fields))
        except TypeError as error:
            raise ValueError(f"peft_config cannot be written as adapter_config.json: {error}") from error
        _check_supported(peft_config, "peft_config")
        return cls(model, plain)

    @classmethod
    def of_files(cls, model: Any, checkpoint: Checkpoint) -> Self:
        """Take the configuration from a checkpoint of adapters.

        Args:
            model: As `from_checkpoint(model=...)` takes it, or an `Adapted` with these adapters.
            checkpoint: The checkpoint of adapters.

        Raises:
            ValueError: `model` has other adapters.
        """
        fields = checkpoint.adapter
        assert fields is not None, "a checkpoint of adapters"
        if not isinstance(model, cls):
            return cls(model, fields, checkpoint.path)
        if differing := _differing(model.fields, fields):
            raise ValueError(
                f"peft_config differs from the adapters in {checkpoint.path}: {differing}; leave peft_config out to "
                "load these adapters, or give the base checkpoint's path to create new ones"
            )
        return model

    def build(self, build: Callable[[Any], nn.Module], where: str) -> nn.Module:
        """Build the model and add the adapters, on meta; all other parameters are frozen.

        Args:
            build: Builds the model without adapters.
            where: Path of the checkpoint that the base weights come from. Saves name this path; of a model of the hub,
                its id and commit.

        Raises:
            PlanError: peft is missing, or cannot add adapters to this model.
            ValueError: The configuration requests an unsupported feature.
        """
        try:
            import peft
        except ImportError as exc:
            raise PlanError("a model with LoRA adapters needs peft: pip install 'raysharding[lora]'") from exc
        if (kind := self.fields.get("peft_type")) != "LORA":
            raise PlanError(f"{self.origin}: adapters of peft_type={kind!r}: only LORA is supported")
        try:
            config = peft.LoraConfig.from_peft_type(**{**self.fields, "inference_mode": False})
        except _PEFT_ERRORS as error:
            raise PlanError(f"{self.origin}: not a LoraConfig: {type(error).__name__}: {error}") from error
        _check_supported(config, self.origin)
        # Train and save a task's new head, as peft's own model classes do; these classes are not used here.
        if heads := _HEADS.get(config.task_type):
            config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or ()), *heads]))
        set_base(config, where)
        module = build(self.model)
        try:
            with torch.device("meta"):
                peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        except (*_PEFT_ERRORS, NotImplementedError) as error:
            raise PlanError(f"{self.origin}: peft cannot add adapters to {type(module).__name__}: {error}") from error
        # peft may have changed the fields: experts that are one parameter become `target_parameters`.
        _check_supported(config, f"{self.origin}, as peft reads it for {type(module).__name__}")
        if getattr(config, "target_modules_to_tie", None):
            raise PlanError(
                f"{self.origin}: ensure_weight_tying with the embedding in target_modules makes adapters of embedding "
                "and head one memory in two layouts, which cannot be sharded: leave one of the two out"
            )
        _settle_rows(module, self.origin)
        _widen(module)
        return module


@dataclass(frozen=True)
class AdapterNames:
    """Names of a model's tensors with adapters, in adapter files, and in the base model."""

    config: Any
    """The adapters' `peft.LoraConfig`."""
    files: Mapping[str, str]
    """FQN of a tensor that saves hold → its key in adapter_model.safetensors."""
    base: Mapping[str, str]
    """FQN of a tensor that has another name in the base model → that name."""
    added: frozenset[str]
    """FQNs of tensors that the base model lacks."""
    copies: Mapping[str, str]
    """FQN of a trained copy (`modules_to_save`) → FQN of the original tensor."""
    rows: Mapping[str, tuple[str, tuple[int, ...]]]
    """FQN of trained rows (`trainable_token_indices`) → FQN of the table that they replace rows of, and these rows."""

    @classmethod
    def of(cls, module: Any) -> Self | None:
        """Return the names for a module, sharded or not; `None` if the module has no adapters."""
        peft: Any = sys.modules.get("peft")  # if peft is not imported, there are no adapters
        if peft is None or ADAPTER not in (getattr(module, "peft_config", None) or {}):
            return None
        base: dict[str, str] = {}
        added: set[str] = set()
        copies: dict[str, str] = {}
        rows: dict[str, tuple[str, tuple[int, ...]]] = {}
        names = list(dict.fromkeys(name for name, _ in all_names(module)))
        # From the inside out: wrappers of parameters are nested.
        for prefix, inner, beside, layer in sorted(_wrappers(module), key=lambda one: -len(one[0])):
            for name in (name for name in names if name.startswith(prefix) and name not in added):
                part, _, rest = name.removeprefix(prefix).partition(".")
                if part == inner:
                    base[name] = prefix + base.get(name, name).removeprefix(f"{prefix}{inner}.")
                elif part in beside:
                    added.add(name)
                    if part == "modules_to_save":
                        copies[name] = f"{prefix}{inner}.{rest.partition('.')[2]}"
                    elif part == "trainable_tokens_delta":
                        rows[name] = f"{prefix}{inner}.weight", tuple(layer.token_indices[ADAPTER])
        marks = dict(zip(names, names, strict=True))
        # peft's own function assigns the keys, given names in place of tensors.
        held = peft.get_peft_model_state_dict(
            module, state_dict=marks, adapter_name=ADAPTER, save_embedding_layers=False
        )
        files = {name: ADAPTER_PREFIX + key for key, name in held.items()}
        return cls(module.peft_config[ADAPTER], files, base, frozenset(added), copies, rows)

    def plain_name(self, fqn: str) -> str | None:
        """Return the FQN of a tensor in the model without adapters, where a trained copy replaces its original.

        `None` if that model lacks the tensor: it is part of an adapter, or an original that has a trained copy.
        """
        if fqn in self.copies:
            fqn = self.copies[fqn]
        elif fqn in self.added or fqn in self.copies.values():
            return None
        return self.base.get(fqn, fqn)

    def check(self, checkpoint: Checkpoint) -> None:
        """Check that a checkpoint's adapters have the scale of the model's; else their values would differ in effect.

        Args:
            checkpoint: The checkpoint of adapters.

        Raises:
            PlanError: The scales differ; the error names the fields.
        """
        assert checkpoint.adapter is not None, "a checkpoint of adapters"
        if differing := _differing(self.config.to_dict(), checkpoint.adapter):
            raise PlanError(f"{checkpoint.path}: these adapters do not match the model's: {differing}")

    def other_base(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return a warning if a checkpoint's adapters name another base than the model's; none if this is unknown."""
        theirs, mine = _base_of(checkpoint.adapter or {}), _base_of(self.config.to_dict())
        if theirs is None or mine is None or theirs == mine:
            return ()
        if theirs[0] == mine[0]:
            is_other = None not in (theirs[1], mine[1])
        else:  # a base may have moved, or be a copy of a model of the hub; what is still there is another one
            is_path = os.path.isabs(theirs[0]) or os.path.isabs(mine[0])
            is_namesake = os.path.basename(theirs[0]) == os.path.basename(mine[0])
            is_other = not (is_path and is_namesake) or os.path.exists(theirs[0])
        names = ("@".join(filter(None, one)) for one in (theirs, mine))
        text = "{}: the adapters were made for the base {}, and are loaded onto {}: if these differ, so do the outputs"
        return (text.format(checkpoint.path, *names),) if is_other else ()

    @staticmethod
    def are_keys(keys: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint holds only adapters."""
        return bool(keys) and all(key.startswith(ADAPTER_PREFIX) for key in keys)


def set_base(config: Any, where: str) -> None:
    """Set the base model that a `LoraConfig` names: a path or URI, or the hub id and commit of a pinned one."""
    hub = HubPath.of_pinned(where)
    config.base_model_name_or_path = where if hub is None else hub.repo
    config.revision = config.revision if hub is None else hub.revision


def all_names(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every name of every parameter and buffer, the canonical one of each first."""
    pairs = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return ((clean_name(name), tensor) for name, tensor in pairs)


def adapter_files(module: nn.Module) -> dict[str, bytes] | None:
    """Return adapter_config.json by name, as peft's `save_pretrained` writes it; `None` if there are no adapters."""
    names = AdapterNames.of(module)
    if names is None:
        return None
    config = copy.copy(names.config)
    config.inference_mode = True
    mapping = None
    if config.task_type is None:  # AutoPeftModel then finds the class of the base model by this mapping
        cls = original_class(module)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    return written_files(lambda directory: config.save_pretrained(directory, auto_mapping_dict=mapping))


def adapter_scale(module: nn.Module) -> dict[str, Any] | None:
    """Return the fields of a module's `LoraConfig` that set the scale of its adapters; `None` without adapters."""
    names = AdapterNames.of(module)
    if names is None:
        return None
    fields = names.config.to_dict()
    return {key: fields.get(key, default) for key, default in _SCALE.items()}


def holder_of_adapter(root: nn.Module, fqn: str) -> Any:
    """Return the peft layer that `fqn` is an adapter of; `None` if `fqn` is not an adapter."""
    if "peft" not in sys.modules:
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    path = fqn.split(".")
    for depth in range(len(path) - 1, 0, -1):
        module = root.get_submodule(".".join(path[: depth - 1]))
        if isinstance(module, BaseTunerLayer):
            return module if path[depth - 1] in module.adapter_layer_names else None
    return None


def apply_adapter_reset(root: Any, fqn: str) -> None:
    """Set peft's own initial values: A as in a Linear, B zeros, unless `init_lora_weights` says otherwise."""
    layer: Any = holder_of_adapter(root, fqn)
    layer.reset_lora_parameters(ADAPTER, root.peft_config[ADAPTER].init_lora_weights)


def magnitude_layer(root: nn.Module, fqn: str) -> Any:
    """Return the peft layer that `fqn` is the DoRA magnitude of; `None` if `fqn` is another tensor."""
    return holder_of_adapter(root, fqn) if f"lora_magnitude_vector.{ADAPTER}.weight" in fqn else None


@torch.no_grad()
def first_magnitude(layer: Any, full: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the first DoRA magnitude of a peft layer by peft's own rule. No collective; the layer is not changed.

    Args:
        layer: As `magnitude_layer` returns it.
        full: Name in the layer → full tensor, of its parameters; all on one device.

    Returns:
        The norms of base weight and adapters together, on that device and in the base weight's dtype, in which peft
        computes them. Memory: twice the base weight, beside `full`.
    """
    dtype = full["base_layer.weight"].dtype
    held = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in full.items()}
    copy: Any = stand_in(layer, lambda name, tensor: held.get(name, tensor))
    copy.lora_variant[ADAPTER].init(copy, adapter_name=ADAPTER)
    magnitude: torch.Tensor = copy.lora_magnitude_vector[ADAPTER].weight
    return magnitude


def _base_of(fields: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return the base's hub id, or its path without symlinks; and its commit, if known. `None` if there is no name."""
    name, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    hub = HubPath.of_pinned(name) or (None if os.path.lexists(name) else HubPath.of(name))
    if hub is None:
        return name if is_remote(name) else os.path.realpath(name.removeprefix("file://")), None
    commit = hub.revision or revision
    return hub.repo, commit if isinstance(commit, str) and len(commit) == 40 else None


def _differing(own: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return the fields that give adapters different scales, as text; empty if there are none."""
    pairs = ((key, own.get(key, default), others.get(key, default)) for key, default in _SCALE.items())
    return ", ".join(f"{key}={mine!r} for {theirs!r}" for key, mine, theirs in pairs if mine != theirs)


def _check_supported(config: Any, where: str) -> None:
    """Check that a sharded model on meta supports a `LoraConfig`.

    Args:
        config: The `LoraConfig`.
        where: Source of `config`, for the error.

    Raises:
        ValueError: A field is not supported; the error names it.
    """
    default = type(config)().to_dict()
    for key, value in config.to_dict().items():
        if key not in _SUPPORTED.split() and (value or None) != (
            default.get(key) or None
        ):  # peft may leave an empty set
            raise ValueError(
                f"{where}: LoraConfig({key}={value!r}) is not supported: it needs base weights, which no rank holds "
                "whole: leave it out, or train such adapters with peft in one process"
            )
    if config.init_lora_weights not in _INITS:
        raise ValueError(
            f"{where}: LoraConfig(init_lora_weights={config.init_lora_weights!r}) computes adapters from base weights, "
            f"which no rank holds whole: use one of {', '.join(map(repr, _INITS))}"
        )


def _widen(module: nn.Module) -> None:
    """Keep adapters in float32 where the base model is in half precision: peft's `autocast_adapter_dtype`."""
    names = AdapterNames.of(module)
    assert names is not None, "the adapters were just added"
    for name, parameter in module.named_parameters():
        if name in names.added and name not in names.copies and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _wrappers(module: nn.Module) -> Iterator[tuple[str, str, frozenset[str], Any]]:
    """Yield of each peft layer, under every name, its prefix, its base child's name, its others' names, and itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

    for name, layer in module.named_modules(remove_duplicate=False):
        prefix = f"{found}." if (found := clean_name(name)) else ""
        if isinstance(layer, BaseTunerLayer):
            yield prefix, "base_layer", frozenset(layer.adapter_layer_names), layer
        elif isinstance(layer, TrainableTokensWrapper):  # around a layer of its own, which holds table and rows
            yield prefix, "token_adapter", frozenset(), layer
        elif isinstance(layer, AuxiliaryTrainingWrapper):
            yield prefix, "original_module", frozenset(layer.adapter_layer_names), layer


def _settle_rows(module: nn.Module, origin: str) -> None:
    """Check the indices of trained rows, and drop peft's copies of the original rows, which only its `unmerge` reads.

    Raises:
        PlanError: The table has no such row.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for name, layer in module.named_modules():
        if isinstance(layer, TrainableTokensLayer):
            layer.trainable_tokens_original.clear()
            num_rows = len(layer.get_base_layer().weight)
            if outside := [index for index in layer.token_indices[ADAPTER] if not 0 <= index < num_rows]:
                what = f"trainable_token_indices names {outside[:8]}, but {name} has {num_rows} rows"
                raise PlanError(f"{origin}: {what}: resize the base model's embedding before")
