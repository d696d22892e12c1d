"""`build_module`: builds a module with parameters on meta from config.json, an auto class or a callable."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from raysharding.arguments import check_int
from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.format import SINGLE_NAME
from raysharding.config import floating_dtype
from raysharding.errors import PlanError
from raysharding.imports import paused_gc
from raysharding.models.adapters import ADAPTER, Adapted, set_base
from raysharding.models.conversion import kept_in_float32

ModelSource = str | Callable[[], nn.Module] | Adapted | None
"""Accepted types of `from_checkpoint(model=...)`: `None`, the name of a transformers auto class, or a callable; with
`peft_config=`, an `Adapted`."""

_PASS_MODEL = "pass as model= a callable that returns an nn.Module"
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes that torch accepts as its default dtype, and so can build a model in."""


def build_module(model: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype | str | None) -> nn.Module:
    """Build a checkpoint's module without allocating its parameters.

    Every rank calls this function, which is not a collective and reads no file: `checkpoint` already holds the headers
    and config.

    Args:
        model: `None` for the class that config.json names, the name of a transformers auto class, or a callable that
            returns the module; or an `Adapted` with one of these, whose adapters are added on meta.
        checkpoint: Headers and config of the checkpoint.
        dtype: Floating dtype of the parameters, or its name. `None`: config.json's, else the files'; for a callable's
            model, the dtypes of its parameters. With a dtype, a callable's model is converted as by `Module.to(dtype)`,
            floating buffers included; a transformers model is built in this dtype, except for the parameters and
            buffers that its class keeps in float32.

    Returns:
        The module, with parameters on meta in their final dtypes and tied parameters tied. Buffers of a transformers
        model are on meta too; those of a callable's model are real. All are contiguous. A transformers model is in eval
        mode, as after `from_pretrained`.

    Raises:
        PlanError: The class is unknown, there is no config.json, the checkpoint is quantized, or the callable failed.
    """
    dtype = None if dtype is None else floating_dtype(dtype)
    if isinstance(model, Adapted):
        module = model.build(lambda base: build_module(base, checkpoint, dtype), path_of(checkpoint))
    elif model is None or isinstance(model, str):
        module = _build_from_config(model, checkpoint, dtype)
    elif callable(model):
        module = _build_from_callable(model, dtype)
    else:
        what = f"model={model!r} is a {type(model).__name__}"
        raise PlanError(f"{what}: give None, an auto class name, or a callable that returns an nn.Module")
    return make_contiguous(module)


def path_of(checkpoint: Checkpoint) -> str:
    """Return the absolute path that opens a checkpoint again: its directory, or its file if it is one of several."""
    is_file = checkpoint.path.endswith(".safetensors") and checkpoint.files[0].name != SINGLE_NAME
    return checkpoint.files[0].path if is_file else checkpoint.directory


def name_base(module: Any, path: str) -> None:
    """Make later saves of a module's adapters name the checkpoint at `path` as their base."""
    set_base(module.peft_config[ADAPTER], path)


def make_contiguous(module: nn.Module) -> nn.Module:
    """Make every parameter and buffer row-major, in place; values, names and ties do not change. No collective.

    FSDP2 rejects other layouts, which models create by `.t()`, `expand` or `torch.channels_last`; and shards are ranges
    of a row-major tensor.

    Args:
        module: On meta or real, before `fully_shard`.

    Returns:
        The same module.
    """
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None and tensor.layout == torch.strided and not tensor.is_contiguous():
                # The tensor object stays, so other references to this tensor also see the new layout.
                tensor.data = tensor.data.contiguous()
    return module


# --- from config.json -----------------------------------------------------------------------------------------------


@paused_gc()
def _build_from_config(auto: str | None, checkpoint: Checkpoint, dtype: torch.dtype | None) -> nn.Module:
    cls, config = import_model(auto, checkpoint)
    config.name_or_path = checkpoint.path
    dtype = dtype or _config_dtype(config) or _file_dtype(checkpoint) or torch.float32
    if dtype not in _FLOATING:
        raise PlanError(f"{checkpoint.path}: a model cannot be built in {dtype}: pass dtype=torch.bfloat16 or float32")
    from transformers.initialization import meta_device_safe_creation_ops

    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            module = cls._from_config(config, dtype=dtype)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, ImportError) as exc:
        raise PlanError(
            f"{checkpoint.path}: {cls.__name__} cannot be built from config.json: {type(exc).__name__}: {exc}"
        ) from exc
    for tensor in kept_in_float32(module, dtype):
        tensor.data = tensor.data.to(torch.float32)
    _set_generation_config(_transformers(), module, checkpoint)
    return module.eval()  # type: ignore[no-any-return]


def import_model(auto: str | None, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Import the code of a transformers model; return its class and configuration.

    Args:
        auto: Name of an auto class; `None` for the class that config.json names.
        checkpoint: With a config.json.

    Raises:
        PlanError: As `build_module`.
    """
    transformers, fields = _transformers(), _config_fields(checkpoint)
    if auto is not None:
        return _auto_model(transformers, auto, fields, checkpoint.path)
    cls = _architecture(transformers, fields, checkpoint.path)
    return cls, _class_config(cls, fields, checkpoint.path)


def _set_generation_config(transformers: Any, module: Any, checkpoint: Checkpoint) -> None:
    """Give a model that generates its defaults, as `from_pretrained` does: of the file, else those in config.json."""
    if not module.can_generate():
        return
    try:
        if checkpoint.generation_config is None:
            # The model's own config lacks them: they are removed when it is made.
            module.generation_config = transformers.GenerationConfig.from_model_config(_plain(checkpoint.config))
            return
        config = transformers.GenerationConfig.from_dict(_plain(checkpoint.generation_config))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise PlanError(f"{checkpoint.path}: generation_config.json: {type(error).__name__}: {error}") from error
    config._original_object_hash = hash(config)  # `save_pretrained` refuses flaws only of a config that was changed
    module.generation_config = config


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as exc:
        need = "building a model from config.json needs transformers: pip install 'raysharding[hf]'"
        raise PlanError(f"{need}, or {_PASS_MODEL}") from exc
    return transformers


def _config_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a copy of config.json's fields; raise PlanError if a model cannot be built from them."""
    if checkpoint.config is None:
        what = "there is no config.json beside the weights, so the model's class is unknown"
        raise PlanError(f"{checkpoint.path}: {what}: {_PASS_MODEL}")
    fields: dict[str, Any] = _plain(checkpoint.config)
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise PlanError(
            f"{checkpoint.path}: config.json says the weights are quantized (quant_method={method!r}), which is not "
            "supported: use a checkpoint in float32, bfloat16 or float16"
        )
    return fields


def _plain(value: Any) -> Any:
    """Return a deep copy of JSON data with plain dicts, which the configuration classes may change.

    transformers writes floats that JSON cannot represent as `{"__float__": "Infinity"}`; the copy holds them as floats.
    """
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _architecture(transformers: Any, fields: dict[str, Any], path: str) -> Any:
    """Return the class that `architectures` names."""
    name = next(iter(fields.get("architectures") or ()), None)
    cls = getattr(transformers, str(name), None)
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        return cls
    if name is None:
        what, cure = (
            "config.json names no architectures",
            "give model='AutoModelForCausalLM' or another auto class, or ",
        )
    elif "auto_map" in fields:
        what = f"{name!r} is code that the checkpoint contains (auto_map), and such code is never run"
        cure = "import the class yourself and "
    else:
        what = f"transformers {transformers.__version__} has no model class {name!r}"
        cure = "upgrade transformers, give model='AutoModel' or another auto class, or "
    raise PlanError(f"{path}: {what}: {cure}{_PASS_MODEL}")


def _class_config(cls: Any, fields: dict[str, Any], path: str) -> Any:
    """Return the configuration of `cls`, possibly one part of a composite config.json, as `from_pretrained` does."""
    config_class = cls.config_class
    part = fields.get(config_class.base_config_key) if config_class.base_config_key else None
    if isinstance(part, dict):
        fields = part
    elif fields.get("model_type", config_class.model_type) != config_class.model_type:
        parts = (value for value in fields.values() if isinstance(value, dict))
        fields = next((part for part in parts if part.get("model_type") == config_class.model_type), fields)
    return _make_config(config_class, fields, path)


def _make_config(config_class: Any, fields: dict[str, Any], path: str) -> Any:
    try:
        return config_class.from_dict(fields)
    except Exception as exc:  # the configuration classes validate with error types of their own
        raise PlanError(f"{path}: config.json is not a valid {config_class.__name__}: {exc}") from exc


def _auto_model(transformers: Any, auto: str, fields: dict[str, Any], path: str) -> tuple[Any, Any]:
    """Return the class and configuration that the auto class named `auto` selects."""
    from transformers.models.auto.auto_factory import _get_model_class

    cls = getattr(transformers, auto, None) if auto.startswith("Auto") else None
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        known = [name for name in dir(transformers) if re.match(r"AutoModel|AutoBackbone", name)]
        raise PlanError(f"model={auto!r} is not a transformers auto class; use one of: {', '.join(sorted(known))}")
    config = _typed_config(transformers, fields, path)
    if type(config) not in mapping:
        raise PlanError(
            f"{path}: {auto} has no model for model_type {fields['model_type']!r}: pass another auto class, or None "
            f"for the class that config.json names ({', '.join(fields.get('architectures') or ['none'])})"
        )
    chosen = _get_model_class(config, mapping)
    text_config = config.sub_configs.get("text_config")
    if text_config is not None and getattr(chosen, "config_class", None) == text_config:
        config = config.get_text_config()
    return chosen, config


def _typed_config(transformers: Any, fields: dict[str, Any], path: str) -> Any:
    """Return the configuration of the class that `model_type` names."""
    model_type = fields.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        what = f"transformers {transformers.__version__} knows no model_type {model_type!r}: upgrade transformers"
        raise PlanError(f"{path}: {what}, or {_PASS_MODEL}")
    return _make_config(transformers.CONFIG_MAPPING[model_type], fields, path)


def override_config(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint whose config.json has other values.

    Args:
        checkpoint: With a config.json; of one with weights, the weights may not fit any more.
        overrides: Field → value. A mapping changes fields of a part, as of `text_config`. A number of layers also cuts
            `layer_types`, which lists them. `dtype` takes what `Loading.dtype` takes. `num_labels` names the labels as
            transformers does, unless config.json has as many; `id2label` sets `label2id`, too.

    Raises:
        ValueError: The model's configuration has no such field (the error names similar ones), or config.json cannot
            hold the value.
        PlanError: There is no config.json, or transformers does not know the model.
    """
    fields = _config_fields(checkpoint)
    config = _typed_config(_transformers(), fields, checkpoint.path)
    return replace(checkpoint, config=_overridden(config, fields, overrides, "config_overrides"))


def _overridden(config: Any, fields: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a configuration with other values."""
    names = dict(config.attribute_map)  # such as num_hidden_layers → n_layer
    # What `from_pretrained` takes beside a configuration's fields.
    known = {**config.to_dict(), **fields, "num_labels": config.num_labels, "attn_implementation": None}
    result = dict(fields)
    for given, value in _with_labels(config, overrides).items():
        key = "dtype" if given == "torch_dtype" else given  # its older name
        if key not in known and key not in names:
            near = difflib.get_close_matches(key, [*known, *names], 3)
            parts = [f"{part}={{{key!r}: ...}}" for part in config.sub_configs if hasattr(known.get(part), "keys")]
            hints = ", ".join([*map(repr, near), *parts]) or ", ".join(sorted(known))
            raise ValueError(f"{where}: {type(config).__name__} has no field {key!r}; did you mean {hints}?")
        name = names.get(key, key)
        # config.json may spell the field otherwise, which would count in place of the override.
        for other in (other for other, own in names.items() if own == name):
            result.pop(other, None)
        if name == "dtype":
            result.pop("torch_dtype", None)
        if name in config.sub_configs and isinstance(value, Mapping):
            part, inner = getattr(config, name), result.get(name) or {}
            result[name] = _overridden(part, inner, value, f"{where}[{name!r}]")
            continue
        result[name] = _json_value(name, value, where)
        if key == "num_hidden_layers" and isinstance(value, int) and isinstance(result.get("layer_types"), list):
            result["layer_types"] = result["layer_types"][:value]
    return result


def _with_labels(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides with names of the labels in place of their number, and the names' ids with the names."""
    result = dict(overrides)
    number, names = result.pop("num_labels", None), result.get("id2label")
    if number is not None:
        check_int("config_overrides['num_labels']", number)
        if names is None and number != config.num_labels:
            names = result["id2label"] = {str(index): f"LABEL_{index}" for index in range(number)}
    if isinstance(names, Mapping):
        if number not in (None, len(names)):
            raise ValueError(f"config_overrides: num_labels={number}, and id2label names {len(names)}: leave one out")
        result.setdefault("label2id", {name: int(index) for index, name in names.items()})
    return result


def _json_value(name: str, value: Any, where: str) -> Any:
    """Return the value of a field as config.json holds it."""
    if name in ("dtype", "torch_dtype") and not isinstance(value, Mapping | None):
        value = str(floating_dtype(value, f"{where}[{name!r}]")).removeprefix("torch.")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        what = f"{where}[{name!r}]={value!r}: config.json cannot hold this ({error})"
        raise ValueError(f"{what}: give numbers, strings, booleans, lists or mappings") from error
    return value


def _config_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, Mapping):
        dtype = dtype.get("")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _file_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype of the first floating tensor in transformers' search order: by file, then by name."""
    floating = [info for info in checkpoint.tensors.values() if info.dtype.is_floating_point]
    return min(floating, key=lambda info: (info.file, info.name)).dtype if floating else None


# --- from a callable ------------------------------------------------------------------------------------------------


def _build_from_callable(model: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    name = getattr(model, "__qualname__", None) or repr(model)
    try:
        with parameters_on_meta():
            module = model()
    except Exception as exc:  # user code may raise anything; the error's cause keeps the traceback
        raise PlanError(f"model={name} raised {type(exc).__name__}: {exc}") from exc
    if not isinstance(module, nn.Module):
        raise PlanError(f"model={name} returned a {type(module).__name__}: return an nn.Module")
    if any(f"{cls.__module__}.{cls.__qualname__}" == "peft.peft_model.PeftModel" for cls in type(module).__mro__):
        raise PlanError(f"model={name} returned a PeftModel: return the model inside it, and pass peft_config=")
    _move_parameters_to_meta(module)
    return module if dtype is None else module.to(dtype)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Register the parameters of this thread's modules on meta; buffers stay real and ties are kept.

    A tensor is allocated in full and freed when it is registered, so the peak is one parameter. Other threads may build
    modules at the same time and are not affected.
    """
    owner = threading.get_ident()
    # real parameter → its copy on meta: one registered twice has one copy. Weak, so that memory is freed.
    on_meta: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()

    def to_meta(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != owner or param.is_meta:
            return None
        if param not in on_meta:
            on_meta[param] = _meta_copy(param)
        return on_meta[param]

    with register_module_parameter_registration_hook(to_meta):  # type: ignore[arg-type]
        yield


def _meta_copy(param: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    copy.__class__ = type(param)
    copy.__dict__.update(param.__dict__)
    return copy


def _move_parameters_to_meta(module: nn.Module) -> None:
    """Replace parameters that are still real, in modules that existed before the callable ran."""
    on_meta: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and not param.is_meta:
                on_meta.setdefault(param, _meta_copy(param))
                owner._parameters[name] = on_meta[param]
