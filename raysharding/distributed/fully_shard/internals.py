"""What FSDP2 keeps private and others here need: groups, states, shards and gathered copies.

Also: what an FSDP module refuses while its full parameters are registered in place of its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import _IncompatibleKeys

from raysharding.distributed.fully_shard.layout import named_submodules, unwrapped


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's own group objects of a module and what is in it, each once, outer ones first; no collective."""
    found = (fsdp_group(submodule) for _, submodule in named_submodules(module))
    return list({id(group): group for group in found if group is not None}.values())


def fsdp_group(module: nn.Module) -> Any:
    """FSDP2's own group object of one module, which others may share; `None` where it has none."""
    # torch has no public way to read the flags that its setters set.
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def syncs_gradients(module: nn.Module) -> bool:
    """Whether the next backward reduces gradients: not inside `no_sync`; no collective."""
    return all(group.reduce_grads for group in fsdp_groups(module))


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
    for part in (state, state._fsdp_param_group):
        if part is not None and part._training_state.name == "FORWARD":
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
