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
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_OURS = {
    # transformers, huggingface_hub
    "pretrained_model_name_or_path model_name_or_path model_name model_id model_path": "checkpoint",
    "torch_dtype": "dtype",
    "device_map": "device",
    "lora_config peft": "peft_config",
    # Ray, vLLM, torchrun
    "tensor_parallel_size tp_size num_gpus num_processes nproc_per_node num_ranks n_ranks ranks": "world_size",
    "num_workers dataloader_num_workers": "prefetch world_size",
    "num_cpus resources_per_worker": "cpus_per_rank",
    "scaling_config": "placement",
    "failure_config max_failures max_retries": "max_restarts",
    "timeout timeout_s": "timeouts",
    # FSDP1, accelerate
    "auto_wrap_policy transformer_layer_cls transformer_cls_names_to_wrap": "wrap",
    "gradient_checkpointing": "activation_checkpointing=True",
    "torch_compile": "compile=True",
    "offload_params": "cpu_offload=True",
    "bf16 fp16": "mixed_precision='bf16'",
    # transformers' Trainer, Lightning, Keras
    "train_dataset train_data train_dataloader train_dataloaders dataset datasets dataloader": "data",
    "num_train_epochs num_epochs max_epochs n_epochs": "epochs",
    "num_steps max_train_steps total_steps": "max_steps",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size per_device_batch_size micro_batch_size": "batch_size=per_device_batch_size*world_size",
    "accumulate_grad_batches grad_accum_steps": "gradient_accumulation_steps",
    "gradient_clip_val grad_clip clip_grad_norm": "max_grad_norm",
    "loss_fn criterion compute_loss compute_loss_func": "loss",
    "data_collator collate": "collate_fn",
    "eval_dataset val_dataset validation_data val_dataloaders": "eval_data",
    "eval_steps eval_strategy evaluation_strategy val_check_interval check_val_every_n_epoch": "eval_every",
    "compute_metrics": "metrics",
    "load_best_model_at_end metric_for_best_model": "keep_best",
    "early_stopping early_stopping_patience": "stop",
    "output_dir default_root_dir checkpoint_dir": "save_to output",
    "key_columns id_columns": "keys",
    "save_steps save_strategy save_interval": "save_every",
    "save_total_limit": "keep_last",
    "resume_from_checkpoint ckpt_path": "resume",
    "report_to logger loggers": "callbacks",
    "disable_tqdm enable_progress_bar verbose": "progress",
    "save_directory": "path",
    "overwrite_output_dir exist_ok": "overwrite",
}
"""Names in other libraries → ours, the first that a function takes; with a value, as the user would write it."""

_SAYINGS = {
    "learning_rate lr weight_decay optim": "give it to the optimizer: set_optimizer(torch.optim.AdamW, lr=...)",
    "lr_scheduler_type warmup_steps warmup_ratio num_warmup_steps": "make a schedule: set_scheduler(...)",
    "num_labels id2label label2id problem_type": "give model='AutoModelFor...', config_overrides={'num_labels': ...}",
    "attn_implementation": "give config_overrides={'attn_implementation': ...}",
    "ignore_mismatched_sizes": "give loading=Loading(key_mapping={'^classifier': 'old'}, strict=False)",
    "tokenizer processor processing_class": "omit it: data holds ids, and saves copy the checkpoint's tokenizer",
    "low_cpu_mem_usage": "omit it: no rank ever holds a full state dict",
    "trust_remote_code": "code from a checkpoint is never run: give model=, a function that makes the module",
    "token use_auth_token": "set HF_TOKEN in the environment",
    "cache_dir": "set HF_HOME in the environment",
    "load_in_4bit load_in_8bit quantization_config": "quantized models are not supported",
    "sharding_strategy": "give sharding=Sharding.from_strategy(...)",
    "limit_all_gathers use_orig_params": "omit it: FSDP2 always does so",
    "safe_serialization": "omit it: every save is in safetensors",
}
"""Names in other libraries that no keyword of ours stands for → what to do."""

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


def given(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method, without `self`, from the `locals()` of its first line."""
    return {name: value for name, value in variables.items() if name not in ("self", "cls")}


def for_fields(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options whose names are fields of a dataclass."""
    return {name: options[name] for name in _fields(cls) if name in options}


def with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function answer an unknown keyword with ours; signature and type stay.

    Raises:
        TypeError: As Python does for an unknown keyword, when the function is called.
    """
    _functions.append(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        _check(function, function.__name__, kwargs)
        return function(*args, **kwargs)

    return checked


def fields_with_hints(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass answer an unknown field as `with_hints` does."""
    construct = vars(cls)["__init__"]

    @wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        _check(construct, cls.__name__, kwargs)
        construct(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


def _check(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for keyword in given:
        if keyword not in parameters:
            raise TypeError(f"{name}() takes no {keyword!r}: {_hint(function, keyword)}")


def _hint(function: Callable[..., Any], keyword: str) -> str:
    """Return what to give instead of a keyword."""
    ours = [keyword, *next((text.split() for names, text in _OURS.items() if keyword in names.split()), [])]
    for one in ours:
        if found := _spelled(function, one):
            return f"give {found}"
    saying = next((text for names, text in _SAYINGS.items() if keyword in names.split()), None)
    if saying is not None:
        return saying
    for one in ours:
        for other in _functions:
            if found := _spelled(other, one):
                return f"give it to {other.__name__}: {other.__name__}({found})"
    own = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    nested = {field: parameter for parameter, config in _configs(function) for field in _fields(config)}
    close = difflib.get_close_matches(keyword, [*own, *nested], 1)
    return f"did you mean {_spelled(function, close[0])}?" if close else f"it takes {', '.join(own)}"


def _spelled(function: Callable[..., Any], ours: str) -> str | None:
    """Return the argument as the user would write it for a function; `None` if the function takes no such argument."""
    name, has_value, _ = ours.partition("=")
    configs = dict(_configs(function))
    if name in inspect.signature(function).parameters:
        value = f"{configs[name].__name__}(...)" if name in configs else "..."
        return ours if has_value else f"{name}={value}"
    for parameter, config in configs.items():
        if name in _fields(config):
            return f"{parameter}={config.__name__}({ours if has_value else f'{name}=...'})"
    return None


def _configs(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (parameter, dataclass) of the parameters that take a dataclass of options, or `None`."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind, _, rest = str(parameter.annotation).partition(" | ")
        config = getattr(inspect.unwrap(function), "__globals__", {}).get(kind)
        if rest == "None" and isinstance(config, type) and is_dataclass(config):
            yield name, config


def _fields(config: Any) -> list[str]:
    return [one.name for one in fields(config)]
