"""`FullyShardedDataParallelPlugin`: accelerate's FSDP settings, for users who have them already.

Mixed precision as accelerate's plugin takes it: names, dtypes and dicts to torch's policies.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from raysharding.config import Sharding, floating_dtype
from raysharding.distributed.accelerate_compat import environment as environment
from raysharding.distributed.accelerate_compat.sharding import sharding_of, to_empty
from raysharding.distributed.accelerate_compat.wrap_policy import class_names, classes_named, split_names

_ALLOWED = (torch.bfloat16, torch.float16, torch.float32)


def precision_dtype(given: Any) -> Any:
    """Return the dtype of a name, as `Loading.dtype` takes it or `"fp8"`, or of a dtype; `None` unchanged.

    Raises:
        ValueError: Another name or dtype.
    """
    if given is None:
        return None
    dtype = torch.bfloat16 if given == "fp8" else floating_dtype(given, "mixed precision")
    if dtype not in _ALLOWED:
        raise ValueError(f"mixed precision {given!r}: use one of {', '.join(map(str, _ALLOWED))}, or a name for one")
    return dtype


def policy_of_dtype(
    fsdp_version: int | None, dtype: torch.dtype | None, buffer_autocast: bool
) -> MixedPrecision | MixedPrecisionPolicy:
    """Return the version's policy with one dtype; in version 1 with buffers in fp32 under `buffer_autocast`."""
    if fsdp_version == 2:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    return MixedPrecision(
        param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32 if buffer_autocast else dtype
    )


def policy_of_dict(fsdp_version: int | None, dtypes: Mapping[str, Any]) -> MixedPrecision | MixedPrecisionPolicy:
    """Return the version's policy from a dict.

    Raises:
        ValueError: A key is missing or not the version's, or a value is no dtype that accelerate takes.
    """
    names = ("param_dtype", "reduce_dtype", "output_dtype" if fsdp_version == 2 else "buffer_dtype")
    dtypes = {name: precision_dtype(value) if isinstance(value, str) else value for name, value in dtypes.items()}
    wrong = [f"{name}={value!r}" for name, value in dtypes.items() if name not in names or value not in _ALLOWED]
    missing = [name for name in names if name not in dtypes]
    if wrong or missing:
        parts = [f"{title} {', '.join(found)}" for title, found in (("wrong", wrong), ("missing", missing)) if found]
        raise ValueError(
            f"mixed_precision_policy: {'; '.join(parts)}; fsdp_version={fsdp_version} takes a dict of "
            f"{', '.join(names)}, each one of {', '.join(map(str, _ALLOWED))}"
        )
    kind: Callable[..., Any] = MixedPrecisionPolicy if fsdp_version == 2 else MixedPrecision
    policy: MixedPrecision | MixedPrecisionPolicy = kind(**dtypes)
    return policy


_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_CONFIGS: dict[StateDictType, tuple[type[Any], type[Any], dict[str, bool]]] = {
    StateDictType.FULL_STATE_DICT: (
        FullStateDictConfig,
        FullOptimStateDictConfig,
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig, {"offload_to_cpu": True}),
}


@dataclass
class FullyShardedDataParallelPlugin:
    """accelerate's plugin of this name (1.15): the same fields in the same order, defaults and environment variables.

    After construction every attribute has the type that accelerate gives it: FSDP1's for `fsdp_version=1`, FSDP2's
    for 2. The model is sharded with FSDP2 either way; `to_sharding` says how. A field that is left out is read from
    `FSDP_<FIELD>` (see each field), as accelerate's launcher sets it. Not collective.

    Settings without a meaning in FSDP2 become `None` under `fsdp_version=2`, with one UserWarning that lists them.

    Differences from accelerate: an enum may be given as a number, not only as digits in a string; an unknown enum name
    is a ValueError, not a KeyError; `sync_module_states` keeps the user's `param_init_fn`, and works without a GPU;
    `set_state_dict_type` replaces a config that belongs to another type; class names may be surrounded by blanks.

    Raises:
        ValueError: A value that the version does not take, naming the field, the value, and the cure.
    """

    fsdp_version: int | None = None
    """1 or 2. Default: `FSDP_VERSION`, else 1."""
    sharding_strategy: str | int | ShardingStrategy | None = None
    """FSDP1's enum, by name, number or member. Version 1 only. Default: `FSDP_SHARDING_STRATEGY`, else FULL_SHARD."""
    reshard_after_forward: str | int | ShardingStrategy | bool | None = None
    """Version 2: True to free full parameters after forward; a bool, or a string for one. Version 1: a
    `sharding_strategy`, which replaces that field. Default in version 2: `FSDP_RESHARD_AFTER_FORWARD`, else True."""
    backward_prefetch: str | int | BackwardPrefetch | None = None
    """FSDP1's enum; unused in version 2, since FSDP2 always prefetches in backward. Default:
    `FSDP_BACKWARD_PREFETCH`, else None."""
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None
    """`"bf16"`, `"fp16"`, `"fp32"`, `"fp8"` (parameters in bf16), a dict of dtypes (`param_dtype`, `reduce_dtype`, and
    `buffer_dtype` in version 1 or `output_dtype` in version 2), or torch's policy of the version. Default: None."""
    auto_wrap_policy: Callable[..., Any] | _Policy | str | None = None
    """`"transformer_based_wrap"`, `"size_based_wrap"`, `"no_wrap"`, or a policy; see `fsdp2_prepare_auto_wrap_policy`
    for which. Default: `FSDP_AUTO_WRAP_POLICY`, else `"no_wrap"`."""
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = None
    """True to keep shards in host memory. Default: `FSDP_OFFLOAD_PARAMS`, else False."""
    ignored_modules: Iterable[nn.Module] | str | None = None
    """Modules that are not sharded, or a regular expression that matches the whole of their FQNs. Default:
    `FSDP_IGNORED_MODULES`, else None."""
    state_dict_type: str | int | StateDictType | None = None
    """Default: `FSDP_STATE_DICT_TYPE`, else FULL_STATE_DICT in version 1 and SHARDED_STATE_DICT in version 2."""
    state_dict_config: FullStateDictConfig | ShardedStateDictConfig | None = None
    """Default: the config of `state_dict_type` with `offload_to_cpu`, and `rank0_only` if it is a full one."""
    optim_state_dict_config: FullOptimStateDictConfig | ShardedOptimStateDictConfig | None = None
    """Default: as for `state_dict_config`."""
    limit_all_gathers: bool = True
    """FSDP1's; unused in version 2, since FSDP2 always limits them."""
    use_orig_params: bool | None = None
    """FSDP1's; unused in version 2, since FSDP2 always keeps the parameters. Default in version 1:
    `FSDP_USE_ORIG_PARAMS`, else False."""
    param_init_fn: Callable[[nn.Module], Any] | None = None
    """Called with a module whose parameters are on meta, to allocate or initialise them. Default with
    `sync_module_states`: `to_empty`."""
    sync_module_states: bool | None = None
    """True to broadcast rank 0's values. Default in version 1: `FSDP_SYNC_MODULE_STATES`, else False."""
    forward_prefetch: bool | None = None
    """Version 1 only. Default: `FSDP_FORWARD_PREFETCH`, else False."""
    activation_checkpointing: bool | None = None
    """Default: `FSDP_ACTIVATION_CHECKPOINTING`, else False."""
    activation_checkpointing_offload: bool | None = None
    """True to keep the inputs of checkpointed modules in host memory. Version 2 only. Default:
    `FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD`, else False."""
    cpu_ram_efficient_loading: bool | None = None
    """True if only rank 0 holds the values before sharding. A given value is also put into the environment, from
    which transformers reads it. Default: `FSDP_CPU_RAM_EFFICIENT_LOADING`, else False."""
    transformer_cls_names_to_wrap: list[str] | str | None = None
    """Class names for `"transformer_based_wrap"`: a list, or a string with commas. Default:
    `FSDP_TRANSFORMER_CLS_TO_WRAP`, else the model's `_no_split_modules`."""
    min_num_params: int | None = None
    """For `"size_based_wrap"`: wrap modules with more parameters than this. Default: `FSDP_MIN_NUM_PARAMS`, else 0,
    which wraps nothing."""

    def __post_init__(self) -> None:
        obsolete: list[str] = []
        self._read_version()
        self._read_strategies(obsolete)
        if self.cpu_offload is None:
            self.cpu_offload = environment.flag("OFFLOAD_PARAMS")
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._read_backward_prefetch(obsolete)
        self._read_state_dict_type()
        self._read_wrap_policy()
        self._read_execution(obsolete)
        self._read_activation_checkpointing()
        if self.ignored_modules is None:
            self.ignored_modules = environment.variable("IGNORED_MODULES")
        self._read_ram_efficient_loading()
        self._read_mixed_precision()
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = functools.partial(to_empty, device=_current_device())
        if obsolete:
            lines = "\n  ".join(obsolete)
            warnings.warn(f"settings of no meaning in FSDP2:\n  {lines}", UserWarning, stacklevel=3)

    def to_sharding(
        self, model: nn.Module | None = None, *, world_size: int | None = None, ranks_per_node: int | None = None
    ) -> Sharding:
        """Return the same settings for `shard_module`. Not collective.

        FSDP1's strategies, prefetches and `MixedPrecision` become what FSDP2 has for them. What it has not is a
        UserWarning, once a process: `limit_all_gathers=False`, `buffer_dtype` (buffers keep their dtype).
        `state_dict_type`, its configurations and `use_orig_params` say nothing about sharding.

        Args:
            model: The root that will be sharded. Needed for policies that are functions; without it
                `transformer_based_wrap` without class names is `wrap="auto"`.
            world_size: Ranks, for NO_SHARD and the hybrid strategies. Default: the process group's, else `WORLD_SIZE`.
            ranks_per_node: Ranks of a replica of the hybrid strategies. Default: `LOCAL_WORLD_SIZE`.

        Raises:
            ValueError: A policy needs the model, a class name is not in it, or a hybrid strategy needs
                `ranks_per_node`.
        """
        return sharding_of(self, model, world_size=world_size, ranks_per_node=ranks_per_node)

    # --- reading, field by field --------------------------------------------------------------------------------------

    def _read_version(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = environment.whole_number("VERSION", 1)
        if self.fsdp_version not in (1, 2):
            raise ValueError(f"fsdp_version={self.fsdp_version!r}: use 1 or 2")

    def _read_strategies(self, obsolete: list[str]) -> None:
        given, resharded = self.sharding_strategy, self.reshard_after_forward
        if self.fsdp_version == 2:
            if given is None and resharded is None:
                resharded = environment.variable("RESHARD_AFTER_FORWARD", "true")
            if isinstance(resharded, str):
                resharded = environment.parse_flag("reshard_after_forward", resharded)
            if not isinstance(resharded, bool):
                raise ValueError(
                    f"reshard_after_forward={resharded!r}: fsdp_version=2 takes True (FULL_SHARD) or False "
                    "(SHARD_GRAD_OP), also where sharding_strategy is given"
                )
            self.reshard_after_forward = resharded
            if given is not None:
                obsolete.append(f"sharding_strategy={given!r}: reshard_after_forward={resharded} decides")
            return
        if isinstance(resharded, bool):
            raise ValueError(
                f"reshard_after_forward={resharded}: fsdp_version=1 takes a strategy, such as 'FULL_SHARD' or "
                "'SHARD_GRAD_OP'; a bool needs fsdp_version=2"
            )
        strategy = environment.variable("SHARDING_STRATEGY", "FULL_SHARD") if given is None else given
        self.sharding_strategy = environment.parse_member("sharding_strategy", strategy, ShardingStrategy)
        if resharded is not None:
            self.reshard_after_forward = environment.parse_member("reshard_after_forward", resharded, ShardingStrategy)
            if given is not None and self.sharding_strategy != self.reshard_after_forward:
                obsolete.append(f"sharding_strategy={given!r}: reshard_after_forward={resharded!r} decides")

    def _read_backward_prefetch(self, obsolete: list[str]) -> None:
        value = self.backward_prefetch
        if value is None:
            value = environment.variable("BACKWARD_PREFETCH")
        if isinstance(value, str) and value.upper() == "NO_PREFETCH":
            value = None
        if value is not None:
            value = environment.parse_member("backward_prefetch", value, BackwardPrefetch)
        if self.fsdp_version == 2 and value is not None:
            obsolete.append(f"backward_prefetch={value.name}: FSDP2 prefetches in backward by itself")
            value = None
        self.backward_prefetch = value

    def _read_state_dict_type(self) -> None:
        given = self.state_dict_config, self.optim_state_dict_config
        self.set_state_dict_type()
        for before, after in zip(given, (self.state_dict_config, self.optim_state_dict_config), strict=True):
            if before is not None and after is not before:
                raise ValueError(
                    f"{type(before).__name__} does not belong to state_dict_type={self.state_dict_type}: "
                    f"give a {type(after).__name__}, or leave it out"
                )

    def _read_wrap_policy(self) -> None:
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = split_names(self.transformer_cls_names_to_wrap)
        policy = self.auto_wrap_policy
        if policy is None:
            policy = environment.variable("AUTO_WRAP_POLICY", "NO_WRAP")
        if callable(policy) or isinstance(policy, _Policy):
            return
        name = policy.upper() if isinstance(policy, str) else policy
        if name not in _POLICIES:
            raise ValueError(f"auto_wrap_policy={policy!r}: use a policy, or one of {', '.join(_POLICIES)}")
        self.auto_wrap_policy = None
        if name == "TRANSFORMER_BASED_WRAP":
            self.auto_wrap_policy = transformer_auto_wrap_policy
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = split_names(environment.variable("TRANSFORMER_CLS_TO_WRAP") or "")
        elif name == "SIZE_BASED_WRAP":
            self.auto_wrap_policy = size_based_auto_wrap_policy
            if self.min_num_params is None:
                self.min_num_params = environment.whole_number("MIN_NUM_PARAMS", 0)
            elif not isinstance(self.min_num_params, int):
                raise ValueError(f"min_num_params={self.min_num_params!r}: give a whole number")

    def _read_execution(self, obsolete: list[str]) -> None:
        if self.fsdp_version == 1:
            for name in ("use_orig_params", "sync_module_states", "forward_prefetch"):
                if getattr(self, name) is None:
                    setattr(self, name, environment.flag(name.upper()))
            return
        if self.forward_prefetch is not None:
            raise ValueError(
                f"forward_prefetch={self.forward_prefetch}: accelerate's plugin has it for fsdp_version=1 only; "
                "leave it out, or use shard_module with Sharding(forward_prefetch=...)"
            )
        if self.use_orig_params is not None:
            obsolete.append(f"use_orig_params={self.use_orig_params}: FSDP2 always keeps the parameters")
            self.use_orig_params = None
        if self.sync_module_states is not None:
            obsolete.append(
                f"sync_module_states={self.sync_module_states}: cpu_ram_efficient_loading=True brings rank 0's values"
            )
            self.sync_module_states = None
        if not self.limit_all_gathers:
            obsolete.append(f"limit_all_gathers={self.limit_all_gathers}: FSDP2 always limits them")

    def _read_activation_checkpointing(self) -> None:
        for name in ("activation_checkpointing", "activation_checkpointing_offload"):
            if getattr(self, name) is None:
                setattr(self, name, environment.flag(name.upper()))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True: needs activation_checkpointing=True too")
        if self.activation_checkpointing_offload and self.fsdp_version != 2:
            raise ValueError("activation_checkpointing_offload=True: needs fsdp_version=2")

    def _read_ram_efficient_loading(self) -> None:
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = environment.flag("CPU_RAM_EFFICIENT_LOADING")
        else:
            environment.announce_ram_efficient_loading(self.cpu_ram_efficient_loading)
        if self.fsdp_version == 1 and self.cpu_ram_efficient_loading and not self.sync_module_states:
            warnings.warn(
                "cpu_ram_efficient_loading=True: the ranks without values need sync_module_states=True, so it is set",
                UserWarning,
                stacklevel=4,
            )
            self.sync_module_states = True

    def _read_mixed_precision(self) -> None:
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        elif isinstance(self.mixed_precision_policy, dict):
            self.set_mixed_precision(self.mixed_precision_policy)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()

    # --- accelerate's methods -----------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: str | int | StateDictType | None = None) -> None:
        """Choose the kind of state dict, and its configurations where there are none of that kind.

        As accelerate's, which keeps a configuration of the type before: here it is replaced by the default one.

        Args:
            state_dict_type: Name in any case, number, or member. Default: the current value, else the environment.

        Raises:
            ValueError: No such type, or LOCAL_STATE_DICT in version 2, which FSDP2 does not have.
        """
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        if chosen is None:
            default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
            chosen = environment.variable("STATE_DICT_TYPE", default)
        kind = environment.parse_member("state_dict_type", chosen, StateDictType)
        if self.fsdp_version == 2 and kind is StateDictType.LOCAL_STATE_DICT:
            raise ValueError("state_dict_type=LOCAL_STATE_DICT: FSDP2 has FULL_STATE_DICT and SHARDED_STATE_DICT only")
        self.state_dict_type = kind
        if kind not in _CONFIGS:
            return
        config, optim_config, options = _CONFIGS[kind]
        if not isinstance(self.state_dict_config, config):
            self.state_dict_config = config(**options)
        if not isinstance(self.optim_state_dict_config, optim_config):
            self.optim_state_dict_config = optim_config(**options)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Complete the wrap policy for a model: `auto_wrap_policy` becomes FSDP1's, with its arguments, or `None`.

        As accelerate's. Each rank alone; the model is looked at, not changed. Other policies stay as they are.

        Args:
            model: The root. Its `_no_split_modules` count where no class names were given.

        Raises:
            PlanError: (a ValueError) A class name that was given is no module's of the model.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            classes = set(classes_named(model, class_names(names, model), strict=names is not None))
            found = {kind.__name__ for kind in classes}
            self.transformer_cls_names_to_wrap = [name for name in class_names(names, model) if name in found]
            self.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy and self.min_num_params is not None:
            if self.min_num_params > 0:
                arguments = {"min_num_params": self.min_num_params}
                self.auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, **arguments)
                return
            warnings.warn("size_based_wrap with min_num_params=0 wraps nothing: give a size", UserWarning, stacklevel=2)
            self.auto_wrap_policy = None

    def set_mixed_precision(
        self,
        mixed_precision: str | torch.dtype | dict[str, Any] | None,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Make the mixed-precision policy of the version from a name, a dtype, or the dict in the field.

        As accelerate's.

        Args:
            mixed_precision: `"fp8"`, `"fp16"`, `"bf16"`, `"fp32"`, one of their dtypes, or `None` for no cast; for all
                of the policy's dtypes. Not used where the field holds a dict.
            buffer_autocast: Version 1: keep buffers in fp32. FSDP2 never casts buffers.
            override: True to replace an existing policy.

        Raises:
            ValueError: Another name or dtype, or a dict with missing keys or other values.
        """
        if not isinstance(mixed_precision, dict):
            precision_dtype(mixed_precision)
        chosen = mixed_precision if override or self.mixed_precision_policy is None else self.mixed_precision_policy
        if isinstance(chosen, dict):
            self.mixed_precision_policy = policy_of_dict(self.fsdp_version, chosen)
        elif chosen is mixed_precision:
            dtype = precision_dtype(chosen)
            self.mixed_precision_policy = policy_of_dtype(self.fsdp_version, dtype, buffer_autocast)

    def validate_mixed_precision_policy(self) -> None:
        """Raise a ValueError unless the mixed-precision policy is torch's object of the version. As accelerate's."""
        kind = MixedPrecisionPolicy if self.fsdp_version == 2 else MixedPrecision
        if not isinstance(self.mixed_precision_policy, kind):
            raise ValueError(
                f"mixed_precision_policy={self.mixed_precision_policy!r}: fsdp_version={self.fsdp_version} takes a "
                f"torch.distributed.fsdp.{kind.__name__}"
            )

    def set_cpu_offload(self) -> None:
        """Turn a bool in `cpu_offload` into torch's object of the version. As accelerate's."""
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 2:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
            else:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Raise a ValueError unless `cpu_offload` is torch's object of the version. As accelerate's."""
        kind = OffloadPolicy if self.fsdp_version == 2 else CPUOffload
        if not isinstance(self.cpu_offload, kind):
            raise ValueError(
                f"cpu_offload={self.cpu_offload!r}: fsdp_version={self.fsdp_version} takes a bool or a "
                f"torch.distributed.fsdp.{kind.__name__}"
            )


def _current_device() -> torch.device:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())
