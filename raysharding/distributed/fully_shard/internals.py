"""Private state of FSDP2 that this package uses: groups, states, shards and gathered copies.

Also: what an FSDP module refuses while full parameters are registered in place of its shards.

Note: what FSDP2 keeps, as of torch 2.11 to 2.13.
    Each module that `fully_shard` was called with has a state (`FSDPState`), which has groups (`FSDPParamGroup`). A
    parameter of a group is two objects. `sharded_param` is the DTensor that an optimizer holds. `_unsharded_param` is
    made by the first all-gather and stays: `reshard` frees its storage, and `unshard` allocates it again. One of the
    two is registered in the module: code that reads `module.parameters()` after a forward may get objects whose values
    the next `reshard` drops.

    `_training_state`, of states and of groups, says which hook ran last: IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD.
    After an exception it stays as it is. A group in FORWARD that is to stay gathered behind the forward
    (`post_forward_mesh_info` is `None`, as of the root) ignores `reshard`.

    The first module that runs becomes the root (`_lazy_init`): the states below it then share its `_state_ctx`, and a
    callback at the end of each backward of autograd, queued once, reduces what is left and makes all states IDLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from raysharding.distributed.fully_shard.layout import named_submodules, unwrapped
from raysharding.errors import PlanError, said
from raysharding.torch_internals import IncompatibleKeys
from raysharding.tree import leaves, map_leaves


class ShardedParameter(NamedTuple):
    """One parameter of an FSDP group."""

    shard: nn.Parameter
    """The DTensor that an optimizer holds."""
    full: torch.Tensor | None
    """Full parameter of the group's forward; `None` before the first forward. Freed between uses."""
    is_registered: bool
    """True if `full` is registered in the module in place of `shard`."""
    stored_dtype: torch.dtype | None
    """dtype of the shard in the group's first forward; `None` before."""
    compute_dtype: torch.dtype | None
    """dtype of forward and backward under mixed precision; `None` if it is the stored dtype, or before a forward."""


def parameter_groups(module: nn.Module) -> list[list[ShardedParameter]]:
    """Return the parameters of the FSDP groups of one module, which other modules may share. Not collective.

    Args:
        module: Any module; its submodules are not included.
    """
    return [_parameters_of(group) for group in own_groups(module)]


def _parameters_of(group: Any) -> list[ShardedParameter]:
    return [
        ShardedParameter(
            item.sharded_param,
            getattr(item, "_unsharded_param", None),
            group.is_unsharded,
            getattr(item, "orig_dtype", None),
            getattr(item, "param_dtype", None),
        )
        for item in group.fsdp_params
    ]


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """Return the parameters of all FSDP groups in a module tree, each group once, outer first. Not collective."""
    return [item for group in fsdp_groups(module) for item in _parameters_of(group)]


def training_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that FSDP groups with trained parameters, and other trained parameters, compute in."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    for group in fsdp_groups(module):
        if any(item.sharded_param.requires_grad for item in group.fsdp_params):
            dtypes |= {group.mp_policy.param_dtype or item.sharded_param.dtype for item in group.fsdp_params}
    return dtypes


def is_sharded(module: nn.Module) -> bool:
    """Return True if a module or a submodule has an FSDP group. Not collective."""
    return bool(fsdp_groups(module))


def mesh_sizes(module: nn.Module) -> set[tuple[int, int]]:
    """Return, for each FSDP group, its number of ranks and its number of shards. Not collective."""
    infos = [group.mesh_info for group in fsdp_groups(module)]
    return {(info.mesh.size(), getattr(info, "shard_mesh_size", 1)) for info in infos}


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's group objects in a module tree, each once, outer first. Not collective."""
    groups = (group for _, submodule in named_submodules(module) for group in own_groups(submodule))
    return list({id(group): group for group in groups}.values())


def own_groups(module: object) -> list[Any]:
    """Return FSDP2's group objects of one module: several since torch 2.13, at most one before."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def init_roots(module: nn.Module) -> None:
    """Make the outermost FSDP modules FSDP2's roots, after the weights are loaded. Not collective.

    FSDP2 takes the module that runs first as root: a block that is called on its own, or an encoder. The forward of the
    whole module then raises, and this cannot be undone.
    """
    for root in fsdp_modules(module, root_only=True):
        root._get_fsdp_state()._lazy_init()


@contextmanager
def roots_before_blocks(module: nn.Module) -> Iterator[None]:
    """Call `init_roots` before the first forward of any part of a root inside this context. Not collective.

    Not earlier: until then users may change dtypes and replace parameters.

    Args:
        module: The root module.
    """
    roots: list[Any] = [module] if isinstance(module, FSDPModule) else list(fsdp_modules(module, root_only=True))
    root_of = {part: root for root in roots if not has_run(root) for part in fsdp_modules(root)}

    def init(part: Any, args: Any) -> None:
        if part in root_of:
            root_of[part]._get_fsdp_state()._lazy_init()

    # Global hooks run before hooks of a module, and so before FSDP2's.
    with register_module_forward_pre_hook(init) if root_of else nullcontext():
        yield


def has_run(module: FSDPModule) -> bool:
    """Return True if FSDP2 knows the root, by a forward or by `init_roots`."""
    return module._get_fsdp_state()._is_root is not None


def reset_iteration(root: FSDPModule) -> None:
    """Reset FSDP2's state of an aborted forward or backward. Not collective: without gradients nothing is reduced.

    Args:
        root: An FSDP root; its gradients must have been dropped, also the unreduced ones.

    Raises:
        RuntimeError: Another FSDP module is the root.
    """
    if not has_run(root):
        return  # no iteration state yet, and a reset raises
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    if outer_root(root) is not None:
        raise RuntimeError("reset_iter_state must be called on the root FSDP module")
    assert isinstance(root, nn.Module), "FSDP modules are modules"
    state = root._get_fsdp_state()
    with gradient_sync(root, True):  # without it, FSDP2 looks for gradients in groups that never ran
        # The end of every backward that is not aborted. It lets the current stream wait for the reductions in flight,
        # frees their buffers, and reshards. Groups find no gradients, so no rank starts a reduction that others do not.
        state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


def reduce_accumulated(module: nn.Module) -> None:
    """Reduce the gradients that backward passes without a reduction have left; collective.

    Groups are reduced in the order of the module tree, on every rank, and not in that of a backward. A group whose
    gradients are reduced has none left, and starts nothing.

    Args:
        module: The sharded root module.
    """
    for root in fsdp_modules(module, root_only=True):
        root._get_fsdp_state()._root_post_backward_final_callback()


def outer_root(module: FSDPModule) -> nn.Module | None:
    """Return the FSDP root that contains a module; `None` if the module is a root, or FSDP2 knows no root yet."""
    state = module._get_fsdp_state()
    if state._is_root is not False:
        return None
    return next((other._modules[0] for other in state._state_ctx.all_states if other._is_root), None)


def syncs_gradients(module: nn.Module) -> bool:
    """Return True if the next backward reduces gradients, i.e. not inside `no_sync`. Not collective."""
    return all(group.reduce_grads for group in fsdp_groups(module))


@contextmanager
def gradient_sync(module: nn.Module, sync: bool) -> Iterator[None]:
    """Enable or disable the reduction of gradients in backward passes inside. Not collective.

    Args:
        module: The sharded root module.
        sync: True to reduce gradients; False as in `no_sync`.
    """
    # torch has setters for these flags, but no getters.
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in fsdp_groups(module)]
    for group, _, _ in before:
        group.reduce_grads = group.all_reduce_grads = sync
    try:
        yield
    finally:
        for group, reduce, all_reduce in before:
            group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


def drop_unreduced_gradients(module: nn.Module) -> None:
    """Drop the gradients that backward passes inside `no_sync` have accumulated on this rank. Not collective.

    FSDP2 stores these gradients beside the shards, where neither `zero_grad` nor `reset_iter_state` finds them: after a
    discarded accumulation they would be part of the next reduction.

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


_trained: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()
"""FSDP group → `requires_grad` of its parameters when its last forward began."""


def add_hooks(module: nn.Module) -> None:
    """Make FSDP modules follow `requires_grad`, accumulate unevenly, and gather behind views. Not collective.

    Args:
        module: The root, after `fully_shard`.
    """
    parts: list[Any] = [*fsdp_modules(module)]
    for part in parts:
        part.register_forward_pre_hook(_settle_trained)  # behind FSDP2's, which gathers
        part.register_forward_hook(_hook_bases, with_kwargs=True)
    for group in fsdp_groups(module):
        # FSDP2 looks the method up at each call, in its node of the graph and in the root's callback: both find this.
        group.post_backward = partial(_post_backward, group.fsdp_params, group.post_backward)


def _settle_trained(module: nn.Module, args: Any) -> None:
    """Renew the dtypes that FSDP2 gives to gradients, if others are trained than before.

    FSDP2 takes the dtypes of gradients from the parameters that are trained in the first forward: of a group that is
    frozen then, it reduces gradients in the low dtype, and cannot assign them to shards of another dtype.

    Raises:
        PlanError: On every rank, if trained parameters of one group are stored in different dtypes.
    """
    for group in own_groups(module):
        trained = _trained[group] = _requires_grad(group)
        items = zip(group.fsdp_params, trained, strict=True)
        names = {item.orig_dtype: item._param_fqn for item, is_trained in items if is_trained}
        if names.keys() <= {group._orig_dtype}:
            continue
        if len(names) == 1:
            group._init_mp_dtypes()
        elif torch.is_grad_enabled():
            raise PlanError(
                "parameters of one FSDP group that were not trained together before have different dtypes, and FSDP2 "
                "reduces a group as one tensor: freeze those of one dtype, or let all require gradients until the "
                "module is sharded, which separates them:",
                problems=[f"{name} is {dtype}" for dtype, name in names.items()],
            )


def _requires_grad(group: Any) -> list[bool]:
    """Return `requires_grad` of each parameter of a group, after copying to the shards what a user set elsewhere.

    Parameters that are registered in place of shards lose it otherwise: FSDP2 copies it from the shards when it
    gathers. If the two differ later, the one that changed since the last forward began is right.
    """
    flags = [item.sharded_param.requires_grad for item in group.fsdp_params]
    if group not in _trained or group.is_sharded:
        return flags
    name = "_unsharded_param" if group.is_unsharded else "_sharded_post_forward_param"
    registered = [getattr(item, name) for item in group.fsdp_params]
    for index, parameter in enumerate(registered):
        if parameter.requires_grad != flags[index]:
            flags[index] = not _trained[group][index]
            for one in (parameter, group.fsdp_params[index].sharded_param):
                one.requires_grad_(flags[index])
    return flags


def _post_backward(parameters: Sequence[Any], post_backward: Callable[[], None], *_: Any) -> None:
    """Let parameters of a group get gradients in different passes of an accumulation.

    Where gradients are reduced in another dtype than they are computed in, FSDP2 asks a group that has not run yet for
    its full parameters, and refuses a gradient of the last pass alone beside one of an earlier pass. (Seen in torch
    2.13.)
    """
    if not all(hasattr(one, "_unsharded_param") for one in parameters):
        return  # it has not run yet
    if any(one.unsharded_accumulated_grad is not None for one in parameters):
        for one in parameters:
            if one.unsharded_accumulated_grad is None:
                one.to_accumulated_grad_if_needed()  # in the dtype of the others
    post_backward()


def _hook_bases(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Make outputs that are views safe to change in place, without a copy.

    FSDP2 gathers parameters for a backward in a hook of each output. Autograd gives a view that is changed in place a
    new node, without the hook, above that of what it is a view of: so that one gets the hook, too.
    """
    state = module._get_fsdp_state()
    if state._training_state.name == "PRE_BACKWARD":  # activation checkpointing computes the output again
        return
    for base in bases_of(output, (args, kwargs)):
        base.register_hook(state._pre_backward)  # after the hook of the view, if that ran: then it does nothing


def bases_of(output: Any, inputs: Any) -> list[torch.Tensor]:
    """Return the tensors with a graph that tensors of an output are views of, without those of the inputs."""
    bases = [one._base for _, one in leaves(output) if isinstance(one, torch.Tensor) and one._base is not None]
    # A leaf cannot be changed through its views, and would keep the hooks of all forwards.
    bases = [base for base in bases if base.grad_fn is not None]
    if not bases:  # as of most blocks, whose inputs are not looked at then
        return []
    outside = [one if one._base is None else one._base for _, one in leaves(inputs) if isinstance(one, torch.Tensor)]
    return [base for base in bases if not any(base is other for other in outside)]


def tell_fsdp(module: nn.Module) -> None:
    """Make FSDP2 use the parameters that are registered now. Not collective.

    FSDP2 holds references, and renews them in hooks after a `load_state_dict`. A `load_state_dict` with an empty dict
    takes ten times as long, warns about tensors on meta, and runs users' hooks before values are loaded.
    """
    nothing = IncompatibleKeys([], [])
    for _, submodule in named_submodules(module):
        for hook in submodule._load_state_dict_post_hooks.values():
            if is_fsdp_hook(hook):
                hook(submodule, nothing)


def is_fsdp_hook(hook: object) -> bool:
    """Return True if FSDP2 registered the hook."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


offloaded: WeakSet[nn.Module] = WeakSet()
"""Root modules whose shards are in host memory."""


def is_offloaded(root: nn.Module) -> bool:
    """Return True if the shards of a root are in host memory (`Sharding(cpu_offload=True)`)."""
    return unwrapped(root) in offloaded


def mark_offloaded(root: nn.Module) -> None:
    """Record that the shards of a root are in host memory, if the root was not sharded by `shard_module`."""
    offloaded.add(unwrapped(root))


kept_whole: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module → names of its own parameters that `shard_module` left whole, but for ignored modules."""

summoned: WeakSet[nn.Module] = WeakSet()
"""FSDP modules inside `summon_full_params`, whose full parameters are registered (`rank0_only`: on rank 0)."""


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDPModule]:
    """Return the FSDP modules of a tree, in the order of `module.modules()`. Not collective.

    As FSDP1's `FullyShardedDataParallel.fsdp_modules`. A group of several modules is included as each of them.

    Args:
        module: Any module, sharded or not; it is in the result if it is an FSDP module.
        root_only: True for only the modules that no other FSDP module of the tree contains.

    Returns:
        The modules; empty if nothing is sharded.
    """
    modules: list[FSDPModule] = []
    below: set[nn.Module] = set()
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule) and submodule not in below:
            modules.append(submodule)
            below.update(submodule.modules() if root_only else ())
    return modules


until_reshard: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
"""FSDP module → what its next `reshard` calls, once, before it registers the shards."""


_FOR_SHARDS = (
    "raysharding.distributed.fully_shard.internals",
    "raysharding.distributed.fully_shard.execution_order",
    "raysharding.distributed.fully_shard.module_hooks._prefetch_after_first_forward",
)
"""Modules and functions whose hooks serve gathers."""


def is_kept_gathered(module: nn.Module) -> bool:
    """Return True after `keep_gathered`, until `reshard`. Not collective."""
    parts = fsdp_modules(module) if until_reshard else []
    return bool(parts) and all(part in until_reshard for part in parts)


def keep_full(part: Any) -> None:
    """Register the full parameters of an FSDP module's groups, without FSDP2's hooks, until `reshard`; collective.

    Note [Gathered]: what forwards then cost.
        FSDP2 gathers a group's parameters in each forward of the group, and frees them behind it: for `generate` the
        wire carries the model once per token. Its hooks cost the host time, at W=1 too, where FSDP2 besides copies the
        shards in each forward. The parameters that are kept are those that FSDP2's own
        `unshard` registers, in the dtype that the group computes in; without the hooks a forward is that of an
        unsharded module, bit for bit as before.
    """
    with ExitStack() as stack:
        if all(map(_is_whole, own_groups(part))):
            _register_local(part, stack)
        else:
            part.unshard()
        policy = part._get_fsdp_state()._mp_policy
        low = policy.param_dtype if policy.cast_forward_inputs else None
        stack.callback(_replace_hooks(part._forward_pre_hooks, None if low is None else partial(_cast_inputs, low)))
        out = policy.output_dtype
        stack.callback(_replace_hooks(part._forward_hooks, None if out is None else partial(_cast_output, out)))
        until_reshard[part] = stack.pop_all().close


def _is_whole(group: Any) -> bool:
    """Return True if the shards of a group are the parameters that it computes with."""
    low, is_moved = group.mp_policy.param_dtype, isinstance(group.offload_policy, CPUOffloadPolicy)
    is_cut = getattr(group.mesh_info, "shard_mesh_size", 1) > 1
    return not is_cut and not is_moved and all(low in (None, one.sharded_param.dtype) for one in group.fsdp_params)


def _register_local(part: Any, stack: ExitStack) -> None:
    """Register the shards' own memory as full parameters, until the stack closes."""
    for item in (item for group in own_groups(part) if group.is_sharded for item in group.fsdp_params):
        local = item.sharded_param.to_local().detach()
        item._setattr_on_modules(nn.Parameter(local, requires_grad=item.sharded_param.requires_grad))
        stack.callback(item._setattr_on_modules, item.sharded_param)


def _replace_hooks(hooks: dict[int, Any], cast: Callable[..., Any] | None) -> Callable[[], None]:
    """Take the hooks that serve gathers out of a module's table; returns what puts them back in their places.

    Args:
        hooks: The table.
        cast: What takes the place of FSDP2's own hook; `None`: nothing does.
    """
    before = dict(hooks)
    inside = {key: cast if is_fsdp_hook(hook) else None for key, hook in before.items() if _serves_gathers(hook)}

    def fill(kept: dict[int, Any]) -> None:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({key: hook for key, hook in kept.items() if hook is not None} | added)

    fill(before | inside)
    return lambda: fill({key: hook for key, hook in before.items() if key in inside or key in hooks})


def _serves_gathers(hook: Any) -> bool:
    function = getattr(hook, "_torchdynamo_orig_callable", hook)  # under `Sharding.compile`
    function = getattr(function, "func", function)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return is_fsdp_hook(hook) or name.startswith(_FOR_SHARDS)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floating(output, dtype)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a tree."""

    def cast(_: str, leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(cast, tree)


def bytes_to_keep(module: nn.Module) -> int:
    """Return the memory that `keep_full` takes for all groups of a module, the largest message included.

    Not collective. The module is resharded.
    """
    sizes = [0]
    for group in fsdp_groups(module):
        if not _is_whole(group):
            low = group.mp_policy.param_dtype
            items = ((one._orig_size.numel(), low or one.sharded_param.dtype) for one in group.fsdp_params)
            sizes.append(sum(num_elements * dtype.itemsize for num_elements, dtype in items))
    return sum(sizes) + max(sizes)


def reshard(module: nn.Module) -> None:
    """Register the shards of every FSDP group again. Not collective.

    After a forward without a backward, the root's group keeps its full parameters registered, as do groups that are not
    freed after forward. Readers of `module.parameters()` (an optimizer, a gather) need DTensors; also frees memory.
    `requires_grad` that was set on full parameters holds for the shards.

    Raises:
        RuntimeError: Inside `summon_full_params`, which registers the shards itself.
    """
    for name, submodule in named_submodules(module):
        if isinstance(submodule, FSDPModule):
            if submodule in summoned:
                what = f"{name.rstrip('.') or 'the module'} is inside summon_full_params"
                raise RuntimeError(f"{what}: leave that context before you gather, load, save or train")
            if submodule in until_reshard:
                until_reshard.pop(submodule)()
            _leave_forward(submodule)  # before `reshard`, which a group inside forward may ignore
            for group in own_groups(submodule):
                if not group.is_sharded:
                    _requires_grad(group)
            submodule.reshard()


def _leave_forward(module: FSDPModule) -> None:
    """Reset a group after a forward of only some of its modules, such as `model.model(...)` without the head.

    FSDP2 regards such a group as inside forward until the next backward, with full parameters registered: an optimizer
    would hold the full parameters, and never update the shards.
    """
    state = module._get_fsdp_state()
    state._modules_to_run_forward.clear()
    for part in (state, *own_groups(module)):
        if part._training_state.name == "FORWARD":
            part._training_state = type(part._training_state).IDLE


def require_idle(modules: Iterable[FSDPModule]) -> None:
    """Check that no module is inside a forward or backward. Not collective.

    Raises:
        RuntimeError: A module is; or an exception ended its last forward, or the forward ran only some modules of its
            group (`model.model(...)` without the head), after which FSDP2 keeps full parameters registered.
    """
    for module in modules:
        state = module._get_fsdp_state()._training_state.name
        if state != "IDLE":
            raise RuntimeError(
                f"{type(module).__name__} is in a forward or backward (state {state}): its full parameters can be had "
                "before or after it; if an exception ended it, or it ran a part of an FSDP group only, call "
                "reset_iter_state() (torch 2.13) on the root module first"
            )


@contextmanager
def refusing_use(modules: Sequence[Any]) -> Iterator[None]:
    """Make methods raise by which FSDP2 would gather, move or cast its own copies of parameters. Not collective.

    Forward, backward (of an earlier forward), `unshard` and `to` raise a RuntimeError: they would use the shards, and
    replace the full parameters.

    Args:
        modules: FSDP modules whose full parameters are registered, on this rank or another.
    """
    with ExitStack() as stack:
        for module in modules:
            summoned.add(module)
            stack.callback(summoned.discard, module)
            state = module._get_fsdp_state()
            refuse_forward = _refuser(f"a forward of {type(module).__name__}", state)
            # The first of all hooks: FSDP2 has not recorded a forward yet, so there is nothing to reset.
            stack.callback(module.register_forward_pre_hook(refuse_forward, prepend=True).remove)
            _replace(stack, module, "unshard", _refuser("unshard()", state))
            _replace(stack, module, "_apply", _refuser("to(), a cast or a move", state))
            _replace(stack, state, "_register_root_post_backward_final_callback", _refuser("a backward", state))
        yield


def _replace(stack: ExitStack, holder: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object until the stack closes."""
    attributes = vars(holder)
    stack.callback(attributes.update, {key: value for key, value in attributes.items() if key == name})
    attributes[name] = function
    stack.callback(attributes.pop, name)


def _refuser(what: str, state: Any) -> Callable[..., NoReturn]:
    idle = state._training_state

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        state._training_state = idle  # FSDP2 may have recorded the start of a backward, which does not run
        raise RuntimeError(
            f"{what} inside summon_full_params would use the shards, not the full parameters: leave the context first"
        )

    return refuse


@contextmanager
def loadable(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Make `load_state_dict` work on full parameters, without FSDP2's hooks, which expect shards. Not collective.

    Args:
        owners: Modules with registered full parameters.
    """
    with ExitStack() as stack:
        for hooks in [owner._load_state_dict_post_hooks for owner in owners]:
            for key in [key for key, hook in hooks.items() if is_fsdp_hook(hook)]:
                stack.callback(hooks.__setitem__, key, hooks.pop(key))
        yield


def is_not_gathered(error: BaseException) -> bool:
    """Return True if a module computed with its shard, because its parameters were not gathered.

    DTensor's dispatch raises a RuntimeError for that, which only its message distinguishes (torch 2.9 to 2.13).
    """
    return "mixed torch.Tensor and DTensor" in said(error)
