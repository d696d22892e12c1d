"""Memory for modules on meta, and the values before sharding: `param_init_fn` and `sync_module_states`, group by group.

Note: how `param_init_fn` is called.
    First while the module is on meta, as FSDP1 does: its functions ask `is_meta`, allocate and fill. What is left on
    meta then gets memory, and the function is called again: it is one that only fills values. While it runs, new memory
    is filled with a pattern, by which values that nobody has set are found.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from raysharding.config import Sharding
from raysharding.distributed.comm import agreeing, all_gather_json, current_group, get_rank, is_accelerator
from raysharding.distributed.fully_shard.internals import is_offloaded, tell_fsdp
from raysharding.distributed.fully_shard.layout import (
    inner_tensor,
    module_tensors,
    named_submodules,
    set_inner_tensor,
    tensor_layout,
    with_layout,
)
from raysharding.errors import PlanError

_TensorEntry = tuple[dict[str, Any], str, torch.Tensor]
"""A module's table, a name in it, and the tensor that was there."""


class InitialValues:
    """Gives memory and values to tensors on meta, and rank 0's values to every rank.

    Args:
        module: The root, before any `fully_shard`.
        device: Where it computes.
        sharding: Its `param_init_fn` and `sync_module_states` are read.

    Raises:
        PlanError: On every rank, when ranks hold different modules, or rank 0 has nothing to send.
    """

    def __init__(self, module: nn.Module, device: torch.device, sharding: Sharding) -> None:
        self._root = module
        self._device = device
        self._fn = sharding.param_init_fn
        self._syncs = sharding.sync_module_states
        self._is_receiver = self._syncs and get_rank() != 0
        # Tensors that no group takes may be shared between modules of several groups, and are few.
        self._done: dict[torch.Tensor, torch.Tensor] = {}
        if self._syncs:
            _check_alike(module, has_rule=self._fn is not None)

    def set_values(self, modules: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
        """Set the values of one FSDP group that is about to be sharded; collective under `sync_module_states`.

        Memory: the group's full tensors on this rank.

        Args:
            modules: Of the group; inner groups are sharded already, and stay as they are.
            kept: Parameters that no group shards.

        Raises:
            PlanError: `param_init_fn` left tensors without a value; under `sync_module_states` on every rank, and
                only for rank 0's.
            Exception: What `param_init_fn` raised; under `sync_module_states` on every rank.
        """
        submodules = list(_own_submodules(modules))
        # A rank whose function failed, or that has no memory, must not leave the others in the broadcasts.
        with agreeing() if self._syncs else nullcontext():
            self._initialise(submodules, kept)
        if self._syncs:
            self._broadcast(submodules)

    def _initialise(self, submodules: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
        real = dict(self._done)
        cause: Exception | None = None
        with torch.no_grad(), _MarkedMemory():
            # All are chosen before the first call, as by FSDP1: a function may reach into a module's children.
            for submodule, slots in [(item, _on_meta([item])) for item in submodules if _on_meta(item.modules())]:
                cause = self._materialize(submodule, slots, real) or cause
        self._done.update((old, new) for old, new in real.items() if old in kept or not isinstance(old, nn.Parameter))
        if self._fn is not None and not self._is_receiver:
            self._require_values(submodules, cause)

    def _materialize(
        self, module: nn.Module, slots: Sequence[_TensorEntry], real: dict[torch.Tensor, torch.Tensor]
    ) -> Exception | None:
        """Give a module's own tensors on meta memory, and the values of `param_init_fn`.

        Args:
            module: The module.
            slots: Its own tensors that were on meta before the first call; none for a module that only has children.
            real: Tensor on meta → what took its place; ties are kept by it.

        Returns:
            What the function raised while the module was on meta, if it was called again.
        """
        for table, name, tensor in slots:
            table[name] = real.get(tensor, table[name])
        stopped = self._call_on_meta(module, slots)
        left = [slot for slot in slots if _is_on_meta(slot)]
        for table, name, tensor in left:
            if tensor not in real:
                real[tensor] = _filled_like(tensor, self._device)
            table[name] = real[tensor]
        if left and self._fn is not None:
            self._fn(module)
        for table, name, tensor in slots:
            table[name] = real.setdefault(tensor, table[name])
        return stopped

    def _call_on_meta(self, module: nn.Module, slots: Sequence[_TensorEntry]) -> Exception | None:
        """Call the function as FSDP1 does; return its error if it is one that only fills values."""
        if self._fn is None:
            return None
        on_meta = [slot for slot in slots if _is_on_meta(slot)]
        attributes, generator = dict(vars(module)), torch.get_rng_state()
        stopped: Exception | None = None
        try:
            self._fn(module)
        except Exception as error:  # noqa: BLE001 - values read on meta, or set by `.data`; raised below, or the cause
            stopped = error
        if on_meta and all(map(_is_on_meta, on_meta)):
            # The next call is to be as the first one: transformers' functions mark a module as initialised.
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            torch.set_rng_state(generator)
            return stopped
        if stopped is not None:
            raise stopped
        return None

    def _require_values(self, submodules: Sequence[nn.Module], cause: Exception | None) -> None:
        """Refuse tensors that the function has left without a value."""
        unset = {id(tensor) for _, _, tensor in _tensors(submodules) if tensor.is_meta or _is_marked(tensor)}
        if not unset:
            return
        names = tuple(name for name, tensor in module_tensors(self._root).items() if id(tensor) in unset)
        raise PlanError(
            f"param_init_fn left {len(names)} tensors without a value: set every parameter and buffer that a module "
            "holds itself; leave param_init_fn out where a load brings the values, which allocates, too, or set "
            "sync_module_states=True where rank 0 has them",
            problems=names,
        ) from cause

    def _broadcast(self, submodules: Sequence[nn.Module]) -> None:
        tensors = [tensor for _, _, tensor in _tensors(submodules) if tensor.numel()]
        for tensor in dict.fromkeys(tensors):
            staged = tensor.detach().to(self._device).contiguous()
            # All ranks hold the same tensors in the same order (`_check_alike`), so each one meets its own.
            dist.broadcast(staged.reshape(-1).view(torch.uint8), group=current_group(), group_src=0)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(staged)


def _own_submodules(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    for module in modules:
        # Breadth first, as FSDP1: functions that draw random numbers draw the same ones.
        for _, submodule in sorted(named_submodules(module), key=lambda item: item[0].count(".")):
            if submodule not in seen:
                seen.add(submodule)
                yield submodule


def tensor_slots(submodules: Iterable[nn.Module]) -> Iterator[_TensorEntry]:
    """Yield the own parameters and buffers of these modules."""
    for submodule in submodules:
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor


def _tensors(submodules: Iterable[nn.Module]) -> list[_TensorEntry]:
    """Return the own parameters and buffers of these modules that FSDP has not sharded."""
    return [slot for slot in tensor_slots(submodules) if not isinstance(slot[2], DTensor)]


def _on_meta(submodules: Iterable[nn.Module]) -> list[_TensorEntry]:
    return [slot for slot in _tensors(submodules) if slot[2].is_meta]


def _is_on_meta(slot: _TensorEntry) -> bool:
    """Return True if what is in the place of a slot's tensor now is on meta."""
    table, name, _ = slot
    return bool(table[name].is_meta)


class _MarkedMemory(TorchFunctionMode):
    """Fills uninitialised memory with a pattern that no value has, by which `_is_marked` finds it.

    Raises:
        PlanError: New memory is asked for what an inner group has sharded, and filled, already.
    """

    _ALLOCATING = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATING and isinstance(result, DTensor):
            raise PlanError(
                "param_init_fn allocates parameters of a module that is sharded already, and would lose their values: "
                "call to_empty(..., recurse=False), and set what a module holds itself"
            )
        if func in self._ALLOCATING and type(result) is torch.Tensor and not result.is_meta:
            _bits(result).fill_(_pattern(result))
        return result


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return plain.view(_INTEGERS[plain.element_size()])


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _pattern(tensor: torch.Tensor) -> int:
    """All bits set, which is a NaN that no arithmetic gives; for integers and booleans an unlikely number."""
    return -1 if _is_number(tensor) else int.from_bytes(b"\xa5" * tensor.element_size(), "little", signed=True)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Return True if memory has not been written: any element of a float, all elements of an integer tensor."""
    if not tensor.numel():
        return False
    is_unset = _bits(tensor) == _pattern(tensor)
    return bool(is_unset.any() if _is_number(tensor) else is_unset.all())


def _check_alike(module: nn.Module, *, has_rule: bool) -> None:
    """Compare names, shapes and dtypes over the ranks; collective."""
    tensors = module_tensors(module)
    mine = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    on_meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    # Ranks with other tensors would wait in broadcasts that have no partner.
    every = all_gather_json({"tensors": mine, "on_meta": on_meta, "has_rule": has_rule})
    for rank, other in enumerate(every):
        for own, first in zip_longest(other["tensors"], every[0]["tensors"]):
            if own != first:
                what = f"rank {rank} has {own} where rank 0 has {first}"
                raise PlanError(f"sync_module_states: {what}; build the same module on every rank")
    if every[0]["on_meta"] is not None and not every[0]["has_rule"]:
        raise PlanError(
            f"sync_module_states: {every[0]['on_meta']} is on meta on rank 0, which has nothing to send: build the "
            "module with values there, give param_init_fn, or load a checkpoint instead"
        )


def materialize(
    module: nn.Module,
    device: torch.device,
    memory: Mapping[torch.Tensor, torch.Tensor] | None = None,
    only: Container[int] | None = None,
) -> Callable[[], None]:
    """Give every parameter and buffer on meta uninitialised memory on `device`; each rank alone, no collective.

    Unlike `Module.to_empty` this keeps ties (a parameter that two modules share stays one), leaves tensors alone that
    are real already, and allocates each tensor once. The values are garbage until a load writes them. Shards of a
    module under `Sharding(cpu_offload=True)` are allocated in host memory, pinned where `device` is an accelerator.

    Args:
        module: A module, sharded or not.
        device: Where the memory comes from.
        memory: Tensor on meta → this rank's part of it, where there is one already.
        only: `id` of the tensors that get memory; the others stay on meta. Default: all.

    Returns:
        A function that puts the tensors back on meta, for a load that fails: garbage must not be left to run on.
    """
    replaced: list[_TensorEntry] = []

    def undo() -> None:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor
        tell_fsdp(module)

    try:
        new: dict[torch.Tensor, torch.Tensor] = {}
        offloaded = is_offloaded(module)
        shard_device = torch.device("cpu") if offloaded else device
        # FSDP2 would pin copies of shards that are not pinned.
        pins = offloaded and is_accelerator(device)
        for tensors, name, tensor in tensor_slots(submodule for _, submodule in named_submodules(module)):
            if not tensor.is_meta or (only is not None and id(tensor) not in only):
                continue
            if tensor not in new:
                place = (shard_device, memory, pins) if isinstance(tensor, DTensor) else (device, memory, False)
                new[tensor] = _filled_like(tensor, *place)
            replaced.append((tensors, name, tensor))
            tensors[name] = new[tensor]
        tell_fsdp(module)
        _cut_padding(replaced)
    except (RuntimeError, MemoryError):
        undo()
        raise
    return undo


def _cut_padding(replaced: Iterable[_TensorEntry]) -> None:
    """Narrow each shard that is shorter than other ranks' to its own length, after FSDP2 has taken its padded memory.

    FSDP2 wants shards of one length. Of a short one it makes a longer copy, and the load would wait for the first touch
    of all memory twice; one that is padded already it keeps.
    """
    for tensors, name, before in replaced:
        if isinstance(before, DTensor):
            length = len(inner_tensor(before))
            local = inner_tensor(tensors[name])
            if len(local) > length:
                with torch.no_grad():
                    local[length:].zero_()  # it is sent in all-gathers, and should not be a NaN
                set_inner_tensor(tensors[name], local.narrow(0, 0, length))


def _filled_like(
    tensor: torch.Tensor,
    device: torch.device,
    memory: Mapping[torch.Tensor, torch.Tensor] | None = None,
    pins: bool = False,
) -> torch.Tensor:
    """A tensor as `tensor`, of the memory that there is for it, or of new memory on `device`."""
    shape = tuple(inner_tensor(tensor).shape)
    if num_shards := tensor_layout("", tensor).num_shards:
        # FSDP2 wants the length of the longest shard on any rank.
        shape = (-(-tensor.shape[0] // num_shards), *shape[1:])
    value = (memory or {}).get(tensor)
    if value is None:
        # empty_like of meta takes 50 times as long.
        value = torch.empty(shape, dtype=tensor.dtype, device=device, pin_memory=pins)
    if isinstance(tensor, DTensor):
        value = with_layout(value, tensor, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # Attributes that models give to tensors (transformers' `_is_hf_initialized`, weight-decay marks) stay, and those by
    # which torch knows a parameter or buffer of another class than `nn.Parameter` or `nn.Buffer`.
    value.__dict__.update(tensor.__dict__)
    return value
