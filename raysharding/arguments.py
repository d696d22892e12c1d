"""Errors for a caller's arguments: an unknown keyword, and `check_int`.

The keyword of another library, or a typing error, is answered by our own keyword.

`with_hints` and `fields_with_hints` compare the keywords of a call with the signature of the function at that call, so
the tables below need not follow the signatures: a keyword that a function takes is never looked up, and a hint that
names a keyword that no function takes is not given.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import product
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THEIRS = {
    "checkpoint": "pretrained_model_name_or_path model_id model_name model_path model_name_or_path",
    "peft_config": "peft lora_config",
    "prefetch": "num_workers dataloader_num_workers",
    "world_size": "tensor_parallel_size tp_size num_gpus num_processes nproc_per_node num_workers num_ranks ranks "
    "n_ranks",
    "cpus_per_rank": "num_cpus resources_per_worker",
    "placement": "scaling_config",
    "max_restarts": "max_failures failure_config",
    "wrap": "auto_wrap_policy transformer_cls_names_to_wrap transformer_layer_cls",
    "cpu_offload": "offload_params",
    "data": "train_dataset train_dataloader train_data train_dataloaders dataloader",
    "epochs": "num_train_epochs",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "max_grad_norm": "gradient_clip_val grad_clip",
    "loss": "criterion compute_loss_func compute_loss",
    "collate_fn": "data_collator",
    "eval_every": "eval_steps eval_strategy evaluation_strategy val_check_interval",
    "keep_best": "load_best_model_at_end metric_for_best_model",
    "stop": "early_stopping_patience early_stopping",
    "save_to": "output_dir default_root_dir checkpoint_dir",
    "output": "output_dir default_root_dir checkpoint_dir",
    "keys": "key_columns id_columns",
    "save_every": "save_steps",
    "keep_last": "save_total_limit",
    "resume": "resume_from_checkpoint ckpt_path",
    "callbacks": "report_to logger loggers",
    "progress": "disable_tqdm enable_progress_bar verbose",
    "path": "save_directory",
    "overwrite": "overwrite_output_dir exist_ok",
}
"""Our keyword → names in other libraries. A name that resembles ours is found without this table."""

_CURES = {
    "give it to the optimizer: set_optimizer(torch.optim.AdamW, lr=...)": "lr learning_rate weight_decay optim",
    "make a schedule: set_scheduler(...)": "lr_scheduler_type warmup_steps warmup_ratio num_warmup_steps",
    "give from_checkpoint sharding=Sharding(mixed_precision='bf16')": "bf16 fp16",
    "give batch_size=per_device_train_batch_size * world_size": "per_device_train_batch_size per_device_batch_size",
    "give model='AutoModelFor...', config_overrides={'num_labels': ...}": "num_labels id2label label2id problem_type",
    "give config_overrides={'attn_implementation': ...}": "attn_implementation",
    "give loading=Loading(key_mapping={'^classifier': 'old'}, strict=False)": "ignore_mismatched_sizes",
    "omit it: data holds ids, and saves copy the checkpoint's tokenizer": "tokenizer processor processing_class",
    "omit it: no rank ever holds a full state dict": "low_cpu_mem_usage",
    "code from a checkpoint is never run: give model=, a function that makes the module": "trust_remote_code",
    "set HF_TOKEN in the environment": "token use_auth_token",
    "set HF_HOME in the environment": "cache_dir",
    "quantized models are not supported": "quantization_config load_in_4bit load_in_8bit",
    "give sharding=Sharding.from_strategy(...)": "sharding_strategy",
    "omit it: FSDP2 always does so": "limit_all_gathers use_orig_params",
    "omit it: every save is in safetensors": "safe_serialization",
}
"""Advice → keywords of other libraries that have no counterpart here."""

_functions: list[Callable[..., Any]] = []


def check_names(name: str, value: object) -> None:
    """Raise for a text where names are expected, each of whose letters would be one.

    Args:
        name: Name of the argument.
        value: Its value.

    Raises:
        ValueError: It is a text.
    """
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r}: give a list of names, {name}=[{value!r}]")


def check_int(name: str, value: Any, *, least: int = 1) -> None:
    """Raise if a value is not an integer of at least `least`.

    Args:
        name: Name of the argument, for the error.
        value: The value; a bool is no integer.
        least: Smallest valid value.

    Raises:
        ValueError: The value is no integer, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} or more")


def check_function(name: str, value: Any) -> None:
    """Raise ValueError if a value is neither a function nor `None`."""
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r}: give a function")


def check_summon_full_params(value: Any) -> None:
    """Raise ValueError if a value is neither a bool nor `None`."""
    if value is not None and type(value) is not bool:
        raise ValueError(f"summon_full_params={value!r}: give True, False, or None for where they fit")


def given(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method, without `self`, from the `locals()` of its first line."""
    return {name: value for name, value in variables.items() if name not in ("self", "cls")}


def for_fields(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options whose names are fields of a dataclass."""
    return {one.name: options[one.name] for one in fields(cls) if one.name in options}


def with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function answer an unknown keyword with ours; signature and type stay.

    Raises:
        TypeError: As Python does for an unknown keyword, when the function is called.
    """
    _functions.append(function)
    return _checked(function, function.__name__)


def fields_with_hints(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass answer an unknown field as `with_hints` does."""
    cls.__init__ = _checked(cls.__init__, cls.__name__)  # type: ignore[method-assign]
    return cls


def _checked(function: Callable[P, T], name: str) -> Callable[P, T]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        parameters = inspect.signature(function).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        for keyword in kwargs:
            if keyword not in parameters and not takes_any:
                raise TypeError(f"{name}() takes no {keyword!r}: {_hint(function, keyword)}")
        return function(*args, **kwargs)

    return checked


def _hint(function: Callable[..., Any], keyword: str) -> str:
    """Return what to give instead of a keyword."""
    ours = [keyword, *_named(keyword, _THEIRS)]
    for name in ours:
        if found := _spelled(function, name):
            return f"give {found}"
    if cure := next(_named(keyword, _CURES), None):
        return cure
    for name, other in product(ours, _functions):
        if found := _spelled(other, name):
            return f"give it to {other.__name__}: {other.__name__}({found})"
    own = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    nested = [field.name for _, config in _configs(function) for field in fields(config)]
    close = difflib.get_close_matches(keyword, [*own, *nested], 1)
    return f"did you mean {_spelled(function, close[0])}?" if close else f"it takes {', '.join(own)}"


def _named(keyword: str, table: dict[str, str]) -> Iterator[str]:
    return (found for found, names in table.items() if keyword in names.split())


def _spelled(function: Callable[..., Any], name: str) -> str | None:
    """Return an argument as the user would write it for a function; `None` if the function takes no such argument."""
    configs = dict(_configs(function))
    if name in inspect.signature(function).parameters:
        return f"{name}={configs[name].__name__}(...)" if name in configs else f"{name}=..."
    for parameter, config in configs.items():
        if any(field.name == name for field in fields(config)):
            return f"{parameter}={config.__name__}({name}=...)"
    return None


def _configs(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (parameter, dataclass) of the parameters that take a dataclass of options, or `None`."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind, _, rest = str(parameter.annotation).partition(" | ")
        config = getattr(inspect.unwrap(function), "__globals__", {}).get(kind)
        if rest == "None" and isinstance(config, type) and is_dataclass(config):
            yield name, config
