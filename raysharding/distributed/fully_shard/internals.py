"""What FSDP2 keeps private and others here need: groups, states, shards and gathered copies.

Also: what an FSDP module refuses while its full parameters are registered in place of its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import _IncompatibleKeys, register_module_forward_pre_hook

from raysharding.distributed.fully_shard.layout import named_submodules, unwrapped
from raysharding.errors import said


class ShardedParameter(NamedTuple):
    """One parameter of an FSDP group."""

    shard: nn.Parameter
    """The DTensor that an optimizer holds."""
    full: torch.Tensor | None
    """What the group's forward computes with; `None` before the first one. Its memory is freed in between."""
    is_registered: bool
    """Whether `full` is in the module's tables now, in the place of `shard`."""
    stored_dtype: torch.dtype | None
    """The shard's, as it was when the group ran first; `None` before."""
    compute_dtype: torch.dtype | None
    """That of forward and backward under mixed precision; `None` where it is the stored one, or nothing ran yet."""


def parameter_groups(module: nn.Module) -> list[list[ShardedParameter]]:
    """Parameters of the FSDP groups that one module belongs to, which others may share; no collective.

    Args:
        module: Any; not its submodules.
    """
    return [_parameters_of(group) for group in own_groups(module)]


def _parameters_of(group: Any) -> list[ShardedParameter]:
    is_registered = group.is_unsharded
    return [
        ShardedParameter(
            item.sharded_param,
            getattr(item, "_unsharded_param", None),
            is_registered,
            getattr(item, "orig_dtype", None),
            getattr(item, "param_dtype", None),
        )
        for item in group.fsdp_params
    ]


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """Parameters of all FSDP groups of a module and what is in it, each group once, outer ones first; no collective."""
    seen: set[nn.Parameter] = set()
    found: list[ShardedParameter] = []
    for _, submodule in named_submodules(module):
        for group in parameter_groups(submodule):
            if group and group[0].shard not in seen:
                seen.update(item.shard for item in group)
                found += group
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return True if a module, or anything in it, has an FSDP group; no collective."""
    return any(own_groups(submodule) for _, submodule in named_submodules(module))


def mesh_sizes(module: nn.Module) -> set[tuple[int, int]]:
    """Of each FSDP group: number of ranks that hold it, and over how many of them it is cut; no collective."""
    infos = [group.mesh_info for group in fsdp_groups(module)]
    return {(info.mesh.size(), getattr(info, "shard_mesh_size", 1)) for info in infos}


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's own group objects of a module and what is in it, each once, outer ones first; no collective."""
    found = (group for _, submodule in named_submodules(module) for group in own_groups(submodule))
    return list({id(group): group for group in found}.values())


def own_groups(module: object) -> list[Any]:
    """FSDP2's own group objects of one module. Since torch 2.13 there may be several, before that one or none."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def init_roots(module: nn.Module) -> None:
    """Have torch take the outermost FSDP modules for roots, the weights being there; no collective.

    FSDP2 takes what runs first for the root: a block that is called by itself, or an encoder. The forward of the whole
    module then raises, and nothing makes it right again.
    """
    for root in fsdp_modules(module, root_only=True):
        root._get_fsdp_state()._lazy_init()


@contextmanager
def roots_before_blocks(module: nn.Module) -> Iterator[None]:
    """`init_roots` as soon as any part of a root runs inside, before it does; each rank alone, no collective.

    Not earlier: until something runs users may change dtypes, and put other parameters in.

    Args:
        module: The root module.
    """
    roots: list[Any] = [module] if isinstance(module, FSDPModule) else list(fsdp_modules(module, root_only=True))
    if all(map(has_run, roots)):
        yield
        return
    root_of = {id(part): root for root in roots for part in fsdp_modules(root)}

    def init(part: nn.Module, args: Any) -> None:
        if id(part) in root_of:
            root_of[id(part)]._get_fsdp_state()._lazy_init()

    # Hooks of all modules run before a module's own, so before FSDP2's.
    handle = register_module_forward_pre_hook(init)
    try:
        yield
    finally:
        handle.remove()


def has_run(module: FSDPModule) -> bool:
    """Return True if a forward of the module, or `init_roots`, has told FSDP2 which module is the root."""
    return module._get_fsdp_state()._is_root is not None


def outer_root(module: FSDPModule) -> nn.Module | None:
    """The FSDP root that a module is a part of; `None` where it is one, or where FSDP2 knows of none yet."""
    state = module._get_fsdp_state()
    if state._is_root is not False:
        return None
    return next((other._modules[0] for other in state._state_ctx.all_states if other._is_root), None)


def syncs_gradients(module: nn.Module) -> bool:
    """Return True if the next backward reduces gradients: not inside `no_sync`; no collective."""
    return all(group.reduce_grads for group in fsdp_groups(module))


@contextmanager
def gradient_sync(module: nn.Module, sync: bool) -> Iterator[None]:
    """Reduce gradients in the backward passes inside, or do not, whatever was set before; no collective.

    Args:
        module: The sharded root module.
        sync: Whether to reduce them; if not, as in `no_sync`.
    """
    # torch has setters for these flags, and no way to read them.
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in fsdp_groups(module)]
    for group, _, _ in before:
        group.reduce_grads = group.all_reduce_grads = sync
    try:
        yield
    finally:
        for group, reduce, all_reduce in before:
            group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Forget what backward passes inside `no_sync` have added up on this rank; no collective.

    FSDP2 keeps these gradients beside the shards, where neither `zero_grad` nor `reset_iter_state` finds them: after
    an accumulation that was given up they would go into the next reduction.

    Args:
        module: The sharded root module.
    """
    for group in fsdp_groups(module):
        # HSDP: reduced over the replica's shards, not yet over the replicas.
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def renew_process_groups(module: nn.Module, mesh: DeviceMesh, renewed: DeviceMesh) -> None:
    """Let mesh, DTensors and FSDP2 use the process groups of a new mesh in the place of those that are gone.

    A mesh finds its groups by name. torch counts groups from the start in every new process group, so a mesh that is
    made as the first one was bears its names, and every DTensor's mesh means the new groups from here on. FSDP2 keeps
    the groups themselves, beside the mesh. Seen in torch 2.11 to 2.13.

    Args:
        module: The sharded root module.
        mesh: The one that it was sharded over.
        renewed: Made as `mesh` was, in the new default process group.

    Raises:
        RuntimeError: The new groups cannot take the old ones' place.
    """
    if _group_names(mesh) != _group_names(renewed) or mesh.mesh.tolist() != renewed.mesh.tolist():
        raise RuntimeError(f"the new mesh {renewed} has other groups than {mesh}")
    mesh._get_root_mesh()._pg_registry.update(renewed._get_root_mesh()._pg_registry)
    for group in fsdp_groups(module):
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise RuntimeError("reshard_after_forward is a number of ranks, which have a process group of their own")
        _renew(group.mesh_info)


def _group_names(mesh: DeviceMesh) -> list[str]:
    return [group.group_name for group in mesh.get_all_groups()]


def _renew(mesh_info: Any) -> None:
    if getattr(mesh_info, "reduce_scatter_process_group", None) is not None:
        raise RuntimeError("a process group of the user's own reduces the gradients")
    for axis in ("shard", "replicate"):
        if hasattr(mesh_info, f"{axis}_process_group"):
            group = mesh_info.mesh.get_group(getattr(mesh_info, f"{axis}_mesh_dim"))
            assert dist.get_rank(group) == getattr(mesh_info, f"{axis}_mesh_rank"), "the ranks have kept their places"
            setattr(mesh_info, f"{axis}_process_group", group)


def tell_fsdp(module: nn.Module) -> None:
    """Let FSDP2 take the parameters that are in the module's tables now; each rank alone, no collective.

    It keeps references, and renews them in hooks after a `load_state_dict`. Called with an empty state dict
    that takes ten times as long, warns of what is on meta, and runs the users' hooks before there are values.
    """
    nothing = _IncompatibleKeys([], [])
    for _, submodule in named_submodules(module):
        for hook in submodule._load_state_dict_post_hooks.values():
            if is_fsdp_hook(hook):
                hook(submodule, nothing)


def is_fsdp_hook(hook: object) -> bool:
    """Whether FSDP2 registered a hook."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


offloaded: WeakSet[nn.Module] = WeakSet()
"""Root modules whose shards live in host memory."""


def is_offloaded(root: nn.Module) -> bool:
    """Whether a root module's shards live in host memory (`Sharding(cpu_offload=True)`)."""
    return unwrapped(root) in offloaded


def mark_offloaded(root: nn.Module) -> None:
    """Say that a root module's shards live in host memory, where others than `shard_module` have cut it so."""
    offloaded.add(unwrapped(root))


summoned: WeakSet[nn.Module] = WeakSet()
"""FSDP modules inside `summon_full_params`: full parameters are registered, on rank 0 alone under `rank0_only`."""


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDPModule]:
    """The FSDP modules of a tree, in the order of `module.modules()`; each rank alone, no communication.

    As FSDP1's `FullyShardedDataParallel.fsdp_modules`. A parameter group of several modules is found as each of them.

    Args:
        module: Any module, sharded or not; it is in the result if it is an FSDP module.
        root_only: Only those that no other FSDP module of the tree contains.

    Returns:
        The modules; empty where nothing is sharded.
    """
    found: list[FSDPModule] = []
    below: set[nn.Module] = set()
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule) and submodule not in below:
            found.append(submodule)
            below.update(submodule.modules() if root_only else ())
    return found


def reshard(module: nn.Module) -> None:
    """Make every FSDP group's shards its registered parameters again; each rank alone, no collective.

    After a forward without a backward the root's group keeps its full parameters registered, and so does one that is
    not freed after forward. Whoever reads `module.parameters()` (an optimizer, a gather) must see DTensors, and the
    memory is wanted back.

    Raises:
        RuntimeError: Inside `summon_full_params`, which alone can put the shards back.
    """
    for name, submodule in named_submodules(module):
        if isinstance(submodule, FSDPModule):
            if submodule in summoned:
                raise RuntimeError(
                    f"{name.rstrip('.') or 'the module'} is inside summon_full_params: leave that context before you "
                    "gather, load, save or train"
                )
            _leave_forward(submodule)
            submodule.reshard()


def _leave_forward(module: FSDPModule) -> None:
    """Forget a forward that ran some modules of a group only, such as `model.model(...)` without the head.

    FSDP2 takes such a group to be inside forward until the next backward, and leaves full what it does not free there:
    an optimizer would hold the full parameters, and never change the shards.
    """
    state = module._get_fsdp_state()
    state._modules_to_run_forward.clear()
    for part in (state, *own_groups(module)):
        if part._training_state.name == "FORWARD":
            part._training_state = type(part._training_state).IDLE


def require_idle(modules: Iterable[FSDPModule]) -> None:
    """Make sure that none of the modules is in the middle of a forward or backward; each rank alone.

    Raises:
        RuntimeError: One is; or an exception ended its last forward, or that ran some modules of its group only
            (`model.model(...)` without the head): then FSDP2 keeps its full parameters registered.
    """
    for module in modules:
        state = module._get_fsdp_state()._training_state.name
        if state != "IDLE":
            raise RuntimeError(
                f"{type(module).__name__} is in a forward or backward (state {state}): its full parameters can be had "
                "before or after it; if an exception ended it, or it ran a part of an FSDP group only, call "
                "reset_iter_state() on the root module first"
            )


@contextmanager
def refusing_use(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Refuse what would let FSDP2 gather, move or cast its own copies of the parameters; each rank alone.

    Forward, backward (of a forward that ran before), `unshard` and `to` raise a RuntimeError. All would go on with the
    shards, and put other parameters in the place of the full ones.

    Args:
        modules: Those whose full parameters are registered, on this rank or on another.
    """
    with ExitStack() as stack:
        for module in modules:
            assert isinstance(module, nn.Module), "FSDP modules are modules"
            summoned.add(module)
            stack.callback(summoned.discard, module)
            # First of all hooks: FSDP2 has not yet noted that a forward began, so nothing has to be put right.
            stack.callback(module.register_forward_pre_hook(_refuse_forward, prepend=True).remove)
            _replace(stack, module, "unshard", _refuser("unshard()"))
            _replace(stack, module, "_apply", _refuser("to(), a cast or a move"))
            state = module._get_fsdp_state()
            _replace(stack, state, "_register_root_post_backward_final_callback", _backward_refuser(state))
        yield


def _replace(stack: ExitStack, holder: object, name: str, function: Callable[..., Any]) -> None:
    """Hide a method of one object until the stack closes; what an outer context hid comes back."""
    before = holder.__dict__.get(name)
    holder.__dict__[name] = function
    if before is None:
        stack.callback(holder.__dict__.pop, name, None)
    else:
        stack.callback(holder.__dict__.__setitem__, name, before)


def _message(what: str) -> str:
    return f"{what} inside summon_full_params would use the shards, not the full parameters: leave the context first"


def _refuse_forward(module: nn.Module, args: Any) -> NoReturn:
    raise RuntimeError(_message(f"a forward of {type(module).__name__}"))


def _refuser(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(_message(what))

    return refuse


def _backward_refuser(state: Any) -> Callable[[], NoReturn]:
    idle = state._training_state

    def refuse() -> NoReturn:
        # FSDP2 calls this right after it noted that a backward began, which would be wrong from now on.
        state._training_state = idle
        raise RuntimeError(_message("a backward"))

    return refuse


@contextmanager
def loadable(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Let `load_state_dict` fill full parameters: FSDP2's hooks after it would look for shards; each rank alone.

    Args:
        owners: The modules in whose tables full parameters are.
    """
    paused: list[tuple[Any, dict[int, Any]]] = []
    for owner in owners:
        hooks = owner._load_state_dict_post_hooks
        own = {key: hook for key, hook in hooks.items() if is_fsdp_hook(hook)}
        for key in own:
            del hooks[key]
        paused.append((hooks, own))
    try:
        yield
    finally:
        for hooks, own in paused:
            hooks.update(own)


def is_not_gathered(error: BaseException) -> bool:
    """Return True if a module computed with its shard, because nothing had gathered its parameters.

    DTensor's dispatch raises a RuntimeError for it, which its message alone tells from others (torch 2.9 to 2.13).
    """
    return "mixed torch.Tensor and DTensor" in said(error)
