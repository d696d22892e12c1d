"""`state_dict_type`: which form a sharded module's `state_dict()` gives and its `load_state_dict()` takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from raysharding.distributed.agreement import agree
from raysharding.distributed.gathering import gather_into, saved_tensors, tied_names
from raysharding.distributed.layout import local_tensor, message_device, unwrapped
from raysharding.distributed.sharded_module import reshard
from raysharding.distributed.state_dict_loading import load_full_state_dict
from raysharding.errors import PlanError
from raysharding.models import clean_name

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Choose the form of `module.state_dict()` and `module.load_state_dict()` inside a `with`; no communication.

    As FSDP1's `FullyShardedDataParallel.state_dict_type`, which leaves its form in place after an exception; here the
    one from before is back. Inside, every rank calls `state_dict()` and `load_state_dict()`. See `set_state_dict_type`.
    """
    target = unwrapped(module)
    before = _forms.get(target)
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        _install(target, before.settings if before is not None else None)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the form of `module.state_dict()` and `module.load_state_dict()` from now on; no communication.

    As FSDP1's `FullyShardedDataParallel.set_state_dict_type`. Names are those of the module before it was sharded, tied
    ones under each name; persistent buffers are in it, each rank's own.

    - `FULL_STATE_DICT`: full tensors, on every rank or (`rank0_only`) on rank 0 and nothing elsewhere, on the shards'
      device or (`offload_to_cpu`) in host memory. A load takes rank 0's: the others pass the same or nothing. Wire of a
      `state_dict()`: each shard to each rank that gets it; memory: the whole module there. Of a load: each shard once.
    - `SHARDED_STATE_DICT`: DTensors that share the module's memory, for `torch.distributed.checkpoint` (which loads
      them at another world size too). `_use_dtensor` is taken for granted: `ShardedTensor` is FSDP1's alone.
    - `LOCAL_STATE_DICT`: this rank's parts as plain tensors that share the module's memory, of the shape of its shard.
      FSDP1 gives a flat tensor here. They load at the world size and mesh at which they were saved, and no other.

    Without a call, a module gives and takes what FSDP2 does: `SHARDED_STATE_DICT`. A load is collective in every form:
    PlanError on every rank, before data moves, where a key (under `strict`), a shape or a kind of tensor on any rank
    does not fit. Called through a module that contains this one, `strict` is torch's own to check, after the load.
    `DistModule.load_state_dict` takes rank 0's full tensors in any form.

    Args:
        module: The root of what `state_dict` is called on.
        state_dict_type: torch's enum.
        state_dict_config: torch's class that goes with it. Default: an empty one.
        optim_state_dict_config: The same for optimizers. It is kept and given back, and has no other effect (a
            UserWarning says so): the functions for optimizer state say their form themselves.

    Returns:
        What held before.

    Raises:
        ValueError: A config of another type.
        PlanError: From `load_state_dict`, see above.
        RuntimeError: From `state_dict` and `load_state_dict` in the full form, inside `summon_full_params`.
    """
    config_type, optim_config_type = _CONFIGS[state_dict_type]
    config = config_type() if state_dict_config is None else state_dict_config
    optim_config = optim_config_type() if optim_state_dict_config is None else optim_state_dict_config
    for name, value, wanted in (
        ("state_dict_config", config, config_type),
        ("optim_state_dict_config", optim_config, optim_config_type),
    ):
        if type(value) is not wanted:
            raise ValueError(f"{name}={value!r}: give a {wanted.__name__} with {state_dict_type}")
    if optim_state_dict_config is not None:
        warnings.warn(
            "optim_state_dict_config has no effect: full_optim_state_dict and its like say their form themselves",
            stacklevel=2,
        )
    before = get_state_dict_type(module)
    _install(unwrapped(module), StateDictSettings(state_dict_type, config, optim_config))
    return before


def _install(module: nn.Module, settings: StateDictSettings | None) -> None:
    """Put a form in the place of the one that a module has; `None` leaves it none."""
    if (old := _forms.pop(module, None)) is not None:
        old.remove(module)
    if settings is not None:
        _forms[module] = _Form(module, settings)


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What `set_state_dict_type` chose for a module, or what FSDP2 does by itself; no communication.

    As FSDP1's `FullyShardedDataParallel.get_state_dict_type`.
    """
    form = _forms.get(unwrapped(module))
    if form is not None:
        return form.settings
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


class _Form:
    """The hooks that give a module's state dict its form.

    Args:
        module: Gets the hooks.
        settings: The form.
    """

    def __init__(self, module: nn.Module, settings: StateDictSettings) -> None:
        self.settings = settings
        self._strict = self._assign = False
        self._handles = [
            # torch marks its hooks with an attribute, which a method does not take.
            module.register_state_dict_post_hook(partial(self._convert)),
            module.register_load_state_dict_pre_hook(partial(self._load)),
        ]
        # torch does not tell its hooks of `strict` and `assign`.
        module.__dict__["load_state_dict"] = _Loader(module, self)

    def remove(self, module: nn.Module) -> None:
        """Give `module` back what it did by itself."""
        for handle in self._handles:
            handle.remove()
        module.__dict__.pop("load_state_dict", None)

    @property
    def _on_cpu(self) -> bool:
        return bool(self.settings.state_dict_config.offload_to_cpu)

    # --- state_dict -------------------------------------------------------------------------------------------------

    def _convert(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """torch's hook after `module.state_dict()`: puts tensors of this form in the place of DTensors."""
        kind = self.settings.state_dict_type
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + clean_name(key.removeprefix(prefix))] = state_dict.pop(key)
        if kind is StateDictType.FULL_STATE_DICT:
            self._gather(module, state_dict, prefix)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            value = state_dict[key]
            if kind is StateDictType.LOCAL_STATE_DICT and isinstance(value, DTensor):
                value = local_tensor(value)
            state_dict[key] = value.cpu() if self._on_cpu and isinstance(value, torch.Tensor) else value

    def _gather(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Full tensors in the place of DTensors; collective."""
        reshard(module)
        rank0_only = getattr(self.settings.state_dict_config, "rank0_only", False)
        aliases = {prefix + name: prefix + first for name, first in tied_names(module).items()}
        found = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        sharded = {aliases.get(key, key): value for key, value in found.items() if isinstance(value, DTensor)}
        is_wanted = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
        if sharded:
            full = self._allocate(sharded if is_wanted else {})
            ranks = (0,) if rank0_only else range(dist.get_world_size())
            gather_into(full, sharded, ranks, message_device(module))
        for key, value in found.items():
            if not is_wanted:
                del state_dict[key]
            elif isinstance(value, DTensor):
                state_dict[key] = full[aliases.get(key, key)]
            elif isinstance(value, torch.Tensor):
                state_dict[key] = value.clone()  # as the others: what is kept must not follow the next steps

    def _allocate(self, tensors: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
        """Memory for full tensors; collective: a rank that has none says so before the others wait for it."""
        error: Exception | None = None
        memory = {}
        try:
            for key, tensor in tensors.items():
                device = torch.device("cpu") if self._on_cpu else local_tensor(tensor).device
                memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        except (RuntimeError, MemoryError) as failure:
            error = failure
        agree(error)
        return memory

    # --- load_state_dict --------------------------------------------------------------------------------------------

    def load(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> _IncompatibleKeys:
        """`module.load_state_dict` with its options known to the hook; collective."""
        self._strict, self._assign = strict, assign
        try:
            result: _IncompatibleKeys = type(module).load_state_dict(module, state_dict, strict, assign)
            return result
        finally:
            self._strict = self._assign = False

    def _load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *reports: Any
    ) -> None:
        """torch's hook before `module.load_state_dict()` looks at its values; collective.

        Values are put into place here. torch finds the module's own tensors, and copies each onto itself.
        """
        # Extra state is no tensor: it is left to the modules that have some.
        keys = [key for key in state_dict if key.startswith(prefix) and not key.endswith("_extra_state")]
        incoming = {clean_name(key.removeprefix(prefix)): state_dict.pop(key) for key in keys}
        kind = self.settings.state_dict_type
        found: dict[str, Any] = dict(incoming)
        if kind is StateDictType.FULL_STATE_DICT:
            result = load_full_state_dict(module, incoming, strict=self._strict, assign=self._assign)
            missing, aliases, own = {*result.missing_keys}, tied_names(module), _named_tensors(module)
            found = {name: tensor for name, tensor in own.items() if aliases.get(name, name) not in missing}
            found |= dict.fromkeys(result.unexpected_keys, torch.empty(0))
        else:
            error: RuntimeError | None = None
            try:
                reshard(module)  # a forward may have left the root's full parameters registered
            except RuntimeError as raised:
                error = raised
            agree(error)  # a rank inside summon_full_params must not leave the others in the next exchange
            own = _named_tensors(module)
            self._require_fit(incoming, own)
            for name, value in incoming.items() if kind is StateDictType.LOCAL_STATE_DICT else ():
                tensor = own.get(name)
                if isinstance(tensor, DTensor):
                    with torch.no_grad():
                        local_tensor(tensor).copy_(value)
                    found[name] = tensor
        torch_keys = _torch_keys(module)
        state_dict.update({prefix + torch_keys.get(name, name): value for name, value in found.items()})

    def _require_fit(self, incoming: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Raise on every rank where anything on any rank does not fit; collective."""
        problems = [self._misfit(name, value, own[name]) for name, value in incoming.items() if name in own]
        if self._strict:
            problems += [f"{name}: missing in the state dict" for name in own if name not in incoming]
            problems += [f"{name}: not in the module" for name in incoming if name not in own]
        problems = [problem for problem in problems if problem]
        kind = self.settings.state_dict_type.name
        agree(PlanError(f"the state dict does not fit the module as {kind}", problems=problems) if problems else None)

    def _misfit(self, name: str, value: Any, tensor: torch.Tensor) -> str:
        """What is wrong with a value for one of the module's tensors, or nothing."""
        if not isinstance(value, torch.Tensor):
            return f"{name}: {type(value).__name__}, not a tensor"
        if tensor.is_meta:
            return (
                f"{name}: on meta; call materialize(module, device), or load a full state dict, which gives it memory"
            )
        local = self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
        if isinstance(value, DTensor) and (local or not isinstance(tensor, DTensor)):
            return f"{name}: a DTensor, where a plain tensor goes; use SHARDED_STATE_DICT"
        if isinstance(tensor, DTensor) and local and value.shape != local_tensor(tensor).shape:
            return (
                f"{name}: shape {tuple(value.shape)}, but this rank's shard is {tuple(local_tensor(tensor).shape)} of "
                f"{tuple(tensor.shape)}; LOCAL_STATE_DICT loads only at the world size and on the rank that saved it: "
                "use FULL_STATE_DICT or SHARDED_STATE_DICT for another"
            )
        if isinstance(tensor, DTensor) and not local:
            if not isinstance(value, DTensor):
                return f"{name}: a plain tensor, where a DTensor goes; use FULL_STATE_DICT for full tensors"
            if value.device_mesh != tensor.device_mesh:
                return f"{name}: a DTensor on another mesh; load it by torch.distributed.checkpoint"
        if not (isinstance(tensor, DTensor) and local) and value.shape != tensor.shape:
            return f"{name}: shape {tuple(value.shape)}, but the module has {tuple(tensor.shape)}"
        return ""


class _Loader:
    """Stands for one module's `load_state_dict`.

    Args:
        module: The module.
        form: Its form.
    """

    def __init__(self, module: nn.Module, form: _Form) -> None:
        self._module = module
        self._form = form

    def __call__(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """As `nn.Module.load_state_dict`."""
        return self._form.load(self._module, state_dict, strict, assign)


def _torch_keys(module: nn.Module) -> dict[str, str]:
    """FQN → the key that torch looks for: `CheckpointWrapper` takes its part out of keys, torch.compile does not."""
    pairs = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    wrapper = "_checkpoint_wrapped_module"
    return {clean_name(name): ".".join(part for part in name.split(".") if part != wrapper) for name, _ in pairs}


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """FQN → parameter or persistent buffer, under every name: what torch's `load_state_dict` expects."""
    tensors = saved_tensors(module)
    return tensors | {name: tensors[canonical] for name, canonical in tied_names(module).items()}


_forms: WeakKeyDictionary[nn.Module, _Form] = WeakKeyDictionary()
"""Modules that were given a form."""
