"""`summon_full_params` and `apply`: full parameters in place of the shards, and back.

Note: why this module gathers the shards.
    `FSDPModule.unshard()` follows the mixed-precision policy: it returns copies in the low dtype, and a write to a
    copy is lost at the next reshard. Here the shards are gathered in their own dtype, and at the end of the context the
    full parameters are sharded and copied into the memory of the shards, to which FSDP2 and the optimizer refer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import agree, broadcast_json, current_group, get_rank, get_world_size, using_group
from raysharding.distributed.fully_shard import (
    by_mesh,
    fsdp_modules,
    group_of,
    kept_whole,
    loadable,
    local_tensor,
    message_device,
    named_submodules,
    num_writes,
    over_ranks_of,
    reduce_replicated_gradients,
    refusing_use,
    require_idle,
    reshard,
    shard_index_of,
    tensor_layout,
    unwrapped,
)
from raysharding.distributed.loading import distribute_state_dict
from raysharding.distributed.transfer import full_memory, gather_into
from raysharding.errors import PlanError
from raysharding.models import is_shardable


@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Register full parameters in place of the shards, inside a `with`; collective.

    As FSDP1's `FullyShardedDataParallel.summon_full_params`. The full parameters are plain `nn.Parameter`s under the
    module's own FQNs, in the shards' dtype also under mixed precision; ties stay ties, `requires_grad` stays. The
    full parameters are copies, also of those that are not sharded (0-dim, or of another dtype than their group's).
    Buffers do not change.
    Inside, `state_dict()` and `load_state_dict()` are those of an unsharded module; a forward or backward is a
    RuntimeError.

    As with FSDP1, nested modules may be sharded by different strategies.
    Beyond FSDP1: `rank0_only` with `writeback`, `with_grads` with `offload_to_cpu`, a parameter that the body replaces
    (by one of equal shape) is written back, `writeback=False` undoes changes at any world size, replicas stay equal.

    Args:
        module: The root, an FSDP module inside it (outside of a forward), or a module that contains several.
        recurse: True to include nested FSDP modules; False for only the parameters of `module`'s own group, or none if
            `module` is not an FSDP module.
        writeback: On leaving, by an exception too, put what changed into the shards: each rank cuts its own part out of
            its own full parameter, so all ranks have to make the same changes. With replicas (HSDP), and for 0-dim
            parameters, the first holder's values go to the others; under `rank0_only` rank 0's go to all.
        rank0_only: Only rank 0 gets full parameters; the others keep their shards registered.
        offload_to_cpu: True for full parameters in host memory; False for the device of the shards.
        with_grads: Each full parameter has its full `.grad` too, where any rank has one. Gradients of parameters that
            are not sharded are averaged over the ranks first. With `writeback` the gradients are written back as well,
            and those that the body sets to `None` go.

    Wire: each shard to each rank that gets the parameters. With `writeback`, under `rank0_only` each shard from rank 0
    to the ranks that hold it; with replicas each shard once to each further one; else nothing.
    Memory: all selected full parameters at once on each rank that gets them (and gradients), 32 MiB of messages.

    Raises:
        RuntimeError: In a forward, backward or another `summon_full_params` of the same parameters; on leaving, where
            the body removed a parameter or changed its shape, which is then not written.
        ValueError: Parameters are on meta.
        PlanError: On every rank, when ranks gave different modules or options.
        RayshardingError: On every rank, when another one could not enter (no memory, say).
    """
    module = unwrapped(module)
    if not recurse and not isinstance(module, FSDPModule):
        yield
        return
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    group = group_of(module)  # the body runs with the caller's current group
    with using_group(group):
        full_params = _enter(module, recurse, options)
    with refusing_use(fsdp_modules(module) if recurse else [module]):
        full_params.register()
        try:
            with loadable({owner for item in full_params.params if item.full is not None for owner, _ in item.places}):
                yield
        finally:
            # Also after an exception, as in FSDP1, and on every rank: the others would wait in the exchange for a rank
            # that left without this call.
            with using_group(group):
                full_params.leave()


@over_ranks_of("module")
def apply(module: nn.Module, fn: Callable[[nn.Module], object]) -> nn.Module:
    """Call `fn` on every submodule, children first, with its group's full parameters registered; collective.

    As FSDP1's `FullyShardedDataParallel.apply` and `nn.Module.apply`: typically to initialise. Each submodule is
    visited once, also if the tree holds it twice. What `fn` changes is kept, as by `summon_full_params`: let every rank
    make the same changes, with random numbers from the same seed. Parameters have their full precision, also under
    mixed precision.

    Args:
        module: The root, an FSDP module inside it, or a module that contains several.
        fn: Called with a submodule. Parameters of FSDP modules below the submodule are shards.

    Returns:
        `module`.

    Wire: each shard to each rank. Memory: the full parameters of one FSDP group, and of those around it.

    Raises:
        Exception: What `fn` raised; on the other ranks a RayshardingError that names the first such rank. `fn` is
            called on nothing further, and the changes until then are kept.
        RuntimeError: In a forward, a backward or a `summon_full_params`; or `fn` changed the shape of a parameter.
    """
    errors: list[Exception] = []
    is_collective = bool(fsdp_modules(module))
    _walk(unwrapped(module), fn, errors, set())
    error = errors[0] if errors else None
    if is_collective:
        agree(error)  # collective: no rank continues after another's error
    elif error is not None:
        raise error
    return module


def _walk(module: nn.Module, fn: Callable[[nn.Module], object], errors: list[Exception], seen: set[nn.Module]) -> None:
    if module in seen:
        return
    seen.add(module)
    is_leaving = False
    try:
        with summon_full_params(module, recurse=False):
            for child in module.children():
                _walk(child, fn, errors, seen)
            # A rank on which `fn` failed continues with the gathers of the other groups: the others would wait.
            if not errors:
                try:
                    fn(module)
                except Exception as error:  # noqa: BLE001 - raised at the end of the walk
                    errors.append(error)
            is_leaving = True
    except RuntimeError as error:
        # This rank's `fn` may have changed a shape; the other ranks continue.
        if not is_leaving:
            raise
        errors.append(error)


# --- what is registered ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclass
class _Param:
    """One parameter of a context."""

    name: str
    """First FQN, from the summoned module."""
    places: list[tuple[nn.Module, str]]
    """Every (owner, name in the owner) under which it is registered: several where it is tied."""
    sharded: nn.Parameter
    """Parameter that is registered outside of the context: a DTensor, or one that FSDP2 does not shard."""
    full: nn.Parameter | None = None
    """Full shape; `None` on a rank that gets none."""
    num_writes: int = 0
    """torch's count of the writes to `full` when it was gathered."""

    def register(self, parameter: nn.Parameter) -> None:
        for owner, leaf in self.places:
            # Not into the table: some modules (nn.LSTM) keep a list of their parameters, which `setattr` renews.
            setattr(owner, leaf, parameter)

    def value(self) -> torch.Tensor:
        """Return the full parameter, or the parameter by which the body replaced it.

        Raises:
            RuntimeError: The value cannot be written back.
        """
        now = [owner._parameters.get(leaf) for owner, leaf in self.places]
        new = next((item for item in now if item is not self.full), self.full)
        shape = tuple(self.sharded.shape)
        if new is None or isinstance(new, DTensor) or new.shape != shape:
            found = None if new is None else tuple(new.shape)
            raise RuntimeError(
                f"{self.name}: {found} now; inside summon_full_params a parameter keeps its shape {shape}"
            )
        return new


def _select(module: nn.Module, recurse: bool) -> list[_Param]:
    """Return the parameters of a module, sharded or not cut by FSDP2, each once under its first name."""
    params: dict[torch.Tensor, _Param] = {}
    for prefix, submodule in _submodules(module, recurse):
        for leaf, parameter in submodule._parameters.items():
            # The other plain parameters are those of ignored modules, which the user keeps out of FSDP.
            is_whole = parameter is not None and (not is_shardable(parameter) or leaf in kept_whole.get(submodule, ()))
            if parameter is not None and (is_whole or isinstance(parameter, DTensor)):
                params.setdefault(parameter, _Param(prefix + leaf, [], parameter)).places.append((submodule, leaf))
    return list(params.values())


def _submodules(module: nn.Module, recurse: bool) -> list[tuple[str, nn.Module]]:
    """Return (prefix, submodule) inside FSDP modules, parents first; without `recurse`, above the next FSDP module."""
    held = {part for root in fsdp_modules(module, root_only=True) for part in cast(nn.Module, root).modules()}
    if not recurse:
        inner = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
        held -= {part for other in inner for part in other.modules()}
    return [(prefix, submodule) for prefix, submodule in named_submodules(module) if submodule in held]


# --- entering -------------------------------------------------------------------------------------------------------


def _enter(module: nn.Module, recurse: bool, options: _Options) -> _FullParams:
    """Gather full parameters, without registering them; collective."""
    error: Exception | None = None
    params: list[_Param] = []
    memory: dict[str, torch.Tensor] = {}
    grads: list[str] = []
    try:
        require_idle(fsdp_modules(module))  # before `reshard`, which forgets a forward that is not over
        reshard(module)
        params = _select(module, recurse)
        on_meta = [item.name for item in params if item.sharded.is_meta]
        if on_meta:
            raise ValueError(f"{on_meta[:3]} are on meta: load a checkpoint, or call materialize, first")
        grads = [item.name for item in params if options.with_grads and item.sharded.grad is not None]
        memory = _allocate(params, options)
    except (RuntimeError, ValueError, MemoryError) as failure:
        error = failure
    if not params and error is None:
        return _FullParams([], options, torch.device("cpu"))
    # Every rank learns here whether all can go on with the same: one that raised alone would leave the others in the
    # gather, and one that gathers something else would take other parameters' bytes for its own.
    layouts = repr([tensor_layout(item.name, item.sharded) for item in params])
    values = agree(error, [list(astuple(options)), sha256(layouts.encode()).hexdigest(), grads])
    if any(value[:2] != values[0][:2] for value in values):
        raise PlanError("the ranks gave summon_full_params different modules or options: all have to call it alike")
    full_params = _FullParams(params, options, message_device(module))
    full_params.gather(memory)
    if options.with_grads:
        reduce_replicated_gradients(module)
        full_params.gather_grads({name for value in values for name in value[2]})
    return full_params


def _allocate(params: Sequence[_Param], options: _Options) -> dict[str, torch.Tensor]:
    """Return name → memory for the full tensor, if this rank gets the tensor."""
    if options.rank0_only and get_rank() != 0:
        return {}
    return full_memory({item.name: item.sharded for item in params}, on_cpu=options.offload_to_cpu)


@dataclass
class _FullParams:
    """Parameters of one context."""

    params: list[_Param]
    options: _Options
    device: torch.device
    """Device of the messages."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that get full parameters."""
        return (0,) if self.options.rank0_only else range(get_world_size())

    def register(self) -> None:
        for item in self.params:
            if item.full is not None:
                item.register(item.full)

    def gather(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Gather the parameters; collective."""
        gather_into(memory, {item.name: item.sharded for item in self.params}, self.ranks, self.device)
        for item in self.params:
            if item.name in memory:
                item.full = nn.Parameter(memory[item.name], requires_grad=item.sharded.requires_grad)
                item.full.__dict__.update(item.sharded.__dict__)  # attributes that libraries set on parameters
                item.num_writes = num_writes(item.full)

    def gather_grads(self, present: Container[str]) -> None:
        """Gather the gradients that some rank has; collective. A missing gradient counts as zeros."""
        params = [item for item in self.params if item.name in present]
        memory = _allocate(params, self.options)
        gather_into(memory, _grads(params), self.ranks, self.device)
        for item in params:
            if item.full is not None:
                item.full.grad = memory[item.name]

    # --- leaving ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Register the shards again and write back; collective if ranks exchange data."""
        error: RuntimeError | None = None
        values: dict[str, torch.Tensor] = {}
        is_written = False
        for item in self.params:
            if item.full is not None:
                try:
                    if self.options.writeback:
                        value = item.value()
                        values[item.name] = value.detach()
                        # Not by a write to `.data`, which torch does not count.
                        is_written |= value is not item.full or num_writes(value) != item.num_writes
                except RuntimeError as failure:
                    error = error or failure
                item.register(item.sharded)
        if self.options.writeback and self.params:
            self._write_back(values, error, is_written=is_written)
        if error is not None:
            raise error

    @torch.no_grad()
    def _write_back(self, values: Mapping[str, torch.Tensor], error: RuntimeError | None, *, is_written: bool) -> None:
        # A write would fail the backward of a forward that ran before the context, which holds 0-dim parameters
        # themselves: they are written only where they changed. Of the others it holds FSDP2's full copies.
        plain = {item.name: item.sharded.clone() for item in self.params if not isinstance(item.sharded, DTensor)}
        tensors = {item.name: plain.get(item.name, item.sharded.detach()) for item in self.params}
        if self.options.rank0_only:
            # The other ranks wait for rank 0's values, or for its error.
            is_written = agree(error, is_written)[0]
        self._spread(values, tensors)
        shards = [local_tensor(item.sharded) for item in self.params if item.name not in plain]
        if is_written and shards:
            # One count for all parameters: also for a rank of whose rows none has changed.
            torch.autograd.graph.increment_version(shards[0])
        for item in self.params:
            if item.name in plain and not torch.equal(plain[item.name], item.sharded):
                item.sharded.copy_(plain[item.name])
        if self.options.with_grads:
            grads = {item.name: item.full.grad for item in self.params if item.full is not None}
            own = {name: grad for name, grad in grads.items() if grad is not None}
            # Rank 0 says which gradients there are, or ranks would send what others do not expect.
            present = set(broadcast_json(list(own)))
            for item in self.params:
                if item.name not in present:
                    item.sharded.grad = None
            self._spread(own, _grads([item for item in self.params if item.name in present]))

    def _spread(self, values: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy full values into local parts; collective under `rank0_only` and with replicas."""
        if self.options.rank0_only:
            for part in by_mesh(tensors):
                distribute_state_dict({name: values[name] for name in part if name in values}, part)
            return
        for name, tensor in tensors.items():
            if name in values:
                index = shard_index_of(tensor) if isinstance(tensor, DTensor) else 0
                first, stop = tensor_layout(name, tensor).local_range(index)
                local_tensor(tensor).view(-1).copy_(values[name].reshape(-1)[first:stop])
            _settle_replicas(tensor, self.device)


def _grads(params: Sequence[_Param]) -> dict[str, torch.Tensor]:
    """Return name → gradient of the shard; a missing gradient is made of zeros."""
    tensors = {}
    for item in params:
        if item.sharded.grad is None:
            item.sharded.grad = torch.zeros_like(item.sharded, requires_grad=False)
        tensors[item.name] = item.sharded.grad
    return tensors


def _settle_replicas(tensor: torch.Tensor, device: torch.device) -> None:
    """Copy the first holder's values of a local part to the others; collective over the holders.

    Otherwise replicas would differ if ranks changed their full parameters differently.
    """
    groups = [current_group()]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        groups = [mesh.get_group(axis) for axis, placement in enumerate(placements) if placement.is_replicate()]
    local = local_tensor(tensor)
    for group in groups:
        if local.numel() and dist.get_world_size(group) > 1:
            message = local.to(device)
            dist.broadcast(message, group=group, group_src=0)
            if message is not local:
                local.copy_(message)
