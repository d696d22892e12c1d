"""`state_dict_type`: the form of a sharded module's `state_dict()` and `load_state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

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
from torch.utils.hooks import RemovableHandle

from raysharding.distributed.comm import agree, agreeing, get_rank, get_world_size
from raysharding.distributed.fully_shard import (
    message_device,
    named_submodules,
    over_ranks_of,
    reshard,
    show_shards,
    unwrapped,
)
from raysharding.distributed.loading import extra_state_owners, load_full_tensors
from raysharding.distributed.transfer import full_memory, gather_into, named_tensors, tied_names
from raysharding.errors import PlanError
from raysharding.models import clean_name
from raysharding.torch_internals import ActivationWrapper, IncompatibleKeys

_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
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
    """Choose the form of `module.state_dict()` and `module.load_state_dict()` inside a `with`. Not collective.

    As FSDP1's `FullyShardedDataParallel.state_dict_type`, but after an exception too, the previous form is restored.
    Inside, every rank calls `state_dict()` and `load_state_dict()`.
    """
    before = {submodule: _forms.get(submodule) for _, submodule in named_submodules(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for submodule, form in before.items():
            _install(submodule, form)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the form of `module.state_dict()` and `module.load_state_dict()` from now on. Not collective.

    As FSDP1's `FullyShardedDataParallel.set_state_dict_type`; the modules inside it get the form, too. Names are those
    of the module before it was sharded, tied ones under each name; persistent buffers are in it, each rank's own.

    - `FULL_STATE_DICT`: full tensors, on every rank or (`rank0_only`) on rank 0 and nothing elsewhere, on the shards'
      device or (`offload_to_cpu`) in host memory. A load takes rank 0's: the others pass the same or nothing. Wire of a
      `state_dict()`: each shard to each rank that gets it; memory: the whole module there. Of a load: each shard once.
    - `SHARDED_STATE_DICT`: DTensors that share the module's memory, for `torch.distributed.checkpoint` (which loads
      them at another world size too). `_use_dtensor` is always on: only FSDP1 has `ShardedTensor`.
    - `LOCAL_STATE_DICT`: as `SHARDED_STATE_DICT`. FSDP1 returns a ShardedTensor for each flat parameter, which FSDP2
      lacks. `torch.distributed.checkpoint` takes plain local tensors for copies, and would write only rank 0's.

    Without a call, a module gives and takes what FSDP2 does: `SHARDED_STATE_DICT`. A load is collective in every form:
    PlanError on every rank, before data moves, where a key (under `strict`), a shape or a kind of tensor on any rank
    does not fit. Called through a module that contains this one, `strict` is torch's own to check, after the load.
    `DistModule.load_state_dict` takes rank 0's full tensors in any form.

    Args:
        module: The root, or a module inside it.
        state_dict_type: torch's enum.
        state_dict_config: torch's class that goes with it. Default: an empty one.
        optim_state_dict_config: The same for `optim_state_dict` and `optim_state_dict_to_load`. The older functions for
            optimizer state say their form themselves.

    Returns:
        The previous settings.

    Raises:
        ValueError: A config of another type.
        PlanError: From `load_state_dict`, as above.
        RuntimeError: From `state_dict` and `load_state_dict` in the full form, inside `summon_full_params`.
    """
    configs: list[Any] = []
    for given, wanted in zip((state_dict_config, optim_state_dict_config), _CONFIGS[state_dict_type], strict=True):
        if given is not None and type(given) is not wanted:
            raise ValueError(f"{given!r}: give a {wanted.__name__} with {state_dict_type}")
        configs.append(given or wanted())
    before = get_state_dict_type(module)
    form = _Form(unwrapped(module), StateDictSettings(state_dict_type, *configs))
    for _, submodule in named_submodules(module):
        _install(submodule, form)
    return before


def _install(module: nn.Module, form: _Form | None) -> None:
    """Replace the form of a module; `None` removes the form."""
    if (old := _forms.pop(module, None)) is not None:
        old.leave(module)
    if form is not None:
        _forms[module] = form
        form.enter(module)


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of `set_state_dict_type` for a module, or the default of FSDP2. Not collective.

    As FSDP1's `FullyShardedDataParallel.get_state_dict_type`.
    """
    form = _forms.get(unwrapped(module))
    if form is not None:
        return form.settings
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


_METHODS = ("state_dict", "load_state_dict")
"""Methods of a module that its form replaces by its own."""
_Hidden = Callable[..., Any] | None
"""Method that another library has set in place of the class's."""


class _Form:
    """Form of the state dicts of a module and of all its submodules.

    Args:
        root: The module for which the form was chosen.
        settings: The form.
    """

    def __init__(self, root: nn.Module, settings: StateDictSettings) -> None:
        self.settings = settings
        self._root = ref(root)  # a strong reference would keep the module alive in `_forms`
        self._hook: RemovableHandle | None = None
        self._is_gathering = self._is_loading = False
        self._is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        self._on_cpu = bool(settings.state_dict_config.offload_to_cpu)

    def enter(self, module: nn.Module) -> None:
        """Replace `state_dict` and `load_state_dict` of one of the modules."""
        for name in _METHODS:
            module.__dict__[name] = partial(getattr(self, name), module, module.__dict__.get(name))
        if module is self._root():
            self._hook = module.register_load_state_dict_pre_hook(partial(self._load_from_around))

    def leave(self, module: nn.Module) -> None:
        """Restore the methods of `module`."""
        for name in _METHODS:
            method = module.__dict__.get(name)
            if isinstance(method, partial) and method.func == getattr(self, name):
                _, hidden = method.args
                del module.__dict__[name]
                module.__dict__.update({name: hidden} if hidden is not None else {})
        if module is self._root() and self._hook is not None:
            self._hook.remove()

    # --- state_dict -------------------------------------------------------------------------------------------------

    def state_dict(self, module: nn.Module, hidden: _Hidden, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return `module.state_dict` in this form; collective in the full form."""
        call = hidden or partial(type(module).state_dict, module)
        if self._is_gathering:
            part: dict[str, Any] = call(*args, **kwargs)
            return part  # of a larger state dict, which is converted as a whole
        # A forward may have left full parameters registered in the root's group, also in inner modules.
        (reshard if self._is_full else show_shards)(self._root() or module)
        self._is_gathering = True
        try:
            state_dict: dict[str, Any] = call(*args, **kwargs)
        finally:
            self._is_gathering = False
        self._convert(module, state_dict, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return state_dict

    def _convert(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace DTensors by tensors of this form."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + clean_name(key.removeprefix(prefix))] = state_dict.pop(key)
        if self._is_full:
            self._gather(module, state_dict, prefix)
        if self._on_cpu:
            for key, value in state_dict.items():
                if key.startswith(prefix) and isinstance(value, torch.Tensor):
                    state_dict[key] = value.cpu()

    @over_ranks_of("module")
    def _gather(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace DTensors by full tensors; collective."""
        rank0_only = getattr(self.settings.state_dict_config, "rank0_only", False)
        aliases = {prefix + name: prefix + first for name, first in tied_names(module).items()}
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        sharded = {aliases.get(key, key): value for key, value in own.items() if isinstance(value, DTensor)}
        is_wanted = not rank0_only or not dist.is_initialized() or get_rank() == 0
        if sharded:
            # A rank without memory must not leave the others in the gather.
            with agreeing():
                full = full_memory(sharded if is_wanted else {}, on_cpu=self._on_cpu)
            ranks = (0,) if rank0_only else range(get_world_size())
            gather_into(full, sharded, ranks, message_device(module))
        for key, value in own.items():
            if not is_wanted:
                del state_dict[key]
            elif isinstance(value, DTensor):
                state_dict[key] = full[aliases.get(key, key)]
            elif isinstance(value, torch.Tensor):
                state_dict[key] = value.clone()  # like full tensors, independent of later steps

    # --- load_state_dict --------------------------------------------------------------------------------------------

    @over_ranks_of("module")
    def load_state_dict(
        self,
        module: nn.Module,
        hidden: _Hidden,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> IncompatibleKeys:
        """Call `module.load_state_dict` in this form; collective."""
        call = hidden or partial(type(module).load_state_dict, module)
        # A hook, because hooks of users run first, and may rename keys. torch does not pass `strict` and `assign`.
        hook = module.register_load_state_dict_pre_hook(partial(self._load, strict, assign))
        self._is_loading = True
        try:
            result: IncompatibleKeys = call(state_dict, strict=strict, assign=assign)
            return result
        finally:
            self._is_loading = False
            hook.remove()

    def _load_from_around(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *reports: Any) -> None:
        """Hook for a load of a module that contains the root; collective."""
        if not self._is_loading:
            self._load(False, False, module, state_dict, prefix)

    @over_ranks_of("module")
    def _load(
        self, strict: bool, assign: bool, module: nn.Module, state_dict: dict[str, Any], prefix: str, *reports: Any
    ) -> None:
        """Hook that runs before `module.load_state_dict()` reads its values; collective.

        The hook loads the tensors. torch then finds the module's own tensors, and copies each onto itself.
        """
        keys = [key for key in state_dict if key.startswith(prefix)]
        incoming = {clean_name(key.removeprefix(prefix)): state_dict.pop(key) for key in keys}
        # As in `state_dict`; a rank inside summon_full_params must not leave the others in the next exchange.
        with agreeing():
            reshard(self._root() or module)
        values: dict[str, Any] = incoming
        if self._is_full:
            result, extra = load_full_tensors(module, incoming, strict=strict, assign=assign)
            missing, aliases, own = {*result.missing_keys}, tied_names(module), dict(named_tensors(module))
            values = {name: tensor for name, tensor in own.items() if aliases.get(name, name) not in missing}
            values |= {**dict.fromkeys(result.unexpected_keys, torch.empty(0)), **extra.values}
        else:
            self._require_fit(incoming, module, strict)
        torch_keys = _torch_keys(module)
        # The hook by which a wrapper puts its part into keys ran already.
        own_part = f"{_CHECKPOINT_WRAPPED}." if isinstance(module, ActivationWrapper) else ""
        state_dict.update({prefix + own_part + torch_keys.get(name, name): value for name, value in values.items()})

    def _require_fit(self, incoming: Mapping[str, Any], module: nn.Module, strict: bool) -> None:
        """Raise on every rank if a value on any rank does not fit; collective."""
        own = dict(named_tensors(module))
        problems = [_misfit(name, value, own[name]) for name, value in incoming.items() if name in own]
        if strict:
            # Extra state is each rank's own, and left to torch.
            names = own.keys() | extra_state_owners(module).keys()
            problems += [f"{name}: missing in the state dict" for name in names if name not in incoming]
            problems += [f"{name}: not in the module" for name in incoming if name not in names]
        problems = [problem for problem in problems if problem]
        kind = self.settings.state_dict_type.name
        agree(PlanError(f"the state dict does not fit the module as {kind}", problems=problems) if problems else None)


def _misfit(name: str, value: Any, tensor: torch.Tensor) -> str:
    """Return the mismatch between a value and a tensor of the module; an empty text if the value fits."""
    if not isinstance(value, torch.Tensor):
        return f"{name}: {type(value).__name__}, not a tensor"
    if tensor.is_meta:
        return f"{name}: on meta; call materialize(module, device), or load a full state dict, which gives it memory"
    if not isinstance(tensor, DTensor) and isinstance(value, DTensor):
        return f"{name}: a DTensor, where a plain tensor goes"
    if isinstance(tensor, DTensor):
        if not isinstance(value, DTensor):
            return f"{name}: a plain tensor, where a DTensor goes; use FULL_STATE_DICT for full tensors"
        if value.device_mesh != tensor.device_mesh:
            return f"{name}: a DTensor on another mesh; load it by torch.distributed.checkpoint"
    if value.shape != tensor.shape:
        return f"{name}: shape {tuple(value.shape)}, but the module has {tuple(tensor.shape)}"
    return ""


_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"


def _torch_keys(module: nn.Module) -> dict[str, str]:
    """Return FQN → key that torch expects: `CheckpointWrapper` removes its prefix, torch.compile does not."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = [name for name, _ in named] + list(extra_state_owners(module, clean=False))
    return {clean_name(name): ".".join(p for p in name.split(".") if p != _CHECKPOINT_WRAPPED) for name in names}


_forms: WeakKeyDictionary[nn.Module, _Form] = WeakKeyDictionary()
"""Modules with a form."""
