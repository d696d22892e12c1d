"""`adapt`: optimizers whose rules do not run on DTensors, or not rightly, or not fast.

Note: two kinds of rules.
    Most of torch's rules are elementwise, and run on the local shards: an operation on a list of DTensors costs the
    host several microseconds for each, where the device takes less for the update, and DTensor lacks some operations.
    Matrix-wise rules (Adafactor's means over rows and columns, Muon's orthogonalization) run on whole parameters,
    gathered one after the other, on every rank alike. State of the shape of its parameter is sharded like it in both;
    other state (Adafactor's means) is equal on all ranks. Classes with a `step` of their own run on DTensors.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import cut, local_tensor, mesh_device, with_layout

_WHOLE = frozenset({"Adafactor", "Muon"})
"""Classes, by name, with a matrix-wise rule; those of torch and transformers were tried."""
_ELEMENTWISE = frozenset(
    inspect.unwrap(cls.step)
    for cls in (
        *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Rprop, optim.SGD),
    )
)
"""torch's elementwise rules: the `step` of these classes, and of subclasses that do not replace it."""
_LACKING = {"Rprop": "step_sizes", "SGD": "fused", "Adagrad": "fused"}
"""Of these, the classes that do not run on DTensors → hyperparameter that is then set."""
_WRAPPERS = {optim.Optimizer.profile_hook_step.__code__.co_filename, inspect.getfile(optim.lr_scheduler)}
"""Files of the functions that torch puts around a `step`."""
_REFUSED = {
    "LBFGS": "it runs the loss several times in one step, and train_step runs it once: give AdamW, SGD or Adafactor",
    "SparseAdam": "it takes sparse gradients only, and FSDP reduces dense ones: give Adam or AdamW",
}


def adapt(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step rightly over DTensors, by a `step` of its own, if its class's does not. Not collective.

    A step of a matrix-wise rule is collective: every rank gathers each parameter that has a gradient, with the
    gradient, and runs the rule. Wire: one all-gather of all trained parameters and one of their gradients. Memory above
    the shards: the largest parameter, its gradient, its state, and what the rule needs for them.

    Args:
        optimizer: Of any class; adapted once. Parameters that are no DTensors are updated as by its class.

    Raises:
        ValueError: The rule has no form over shards that equals one process.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    groups = getattr(optimizer, "param_groups", ())
    if names[0] in _REFUSED:
        raise ValueError(f"{names[0]} is not supported: {_REFUSED[names[0]]}")
    if any(group.get("differentiable") for group in groups):
        raise ValueError(f"{names[0]}(differentiable=True) is not supported: no graph leads through an update")
    if inspect.unwrap(optimizer.step) is _step:
        return
    if not _WHOLE.isdisjoint(names) or _is_torchs(optimizer):
        # By a weak reference: as a method of its own it would keep the optimizer, and its state, until a collection.
        optimizer.step = MethodType(_call_step, weakref.ref(optimizer))  # type: ignore[method-assign]
        return
    lacking = [name for name in names for group in groups if group.get(_LACKING.get(name))]
    if lacking and any(isinstance(one, DTensor) for group in groups for one in group["params"]):
        raise ValueError(
            f"{names[0]} has a step of its own around that of {lacking[0]}, which does not run on sharded "
            f"parameters ({_LACKING[lacking[0]]} is set): use register_step_pre_hook or register_step_post_hook"
        )


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `step` is an elementwise rule of torch's, on torch's state, below nothing but torch's wrappers."""
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    while hasattr(step, "__wrapped__") and step.__code__.co_filename in _WRAPPERS:
        step = step.__wrapped__
    initial: Any = getattr(type(optimizer), "_init_group", None)
    return step in _ELEMENTWISE and getattr(initial, "__module__", "").startswith("torch.optim.")


@torch.no_grad()
def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Run the rule of the optimizer's class on plain tensors; collective for a matrix-wise rule."""
    optimizer._opt_called = True  # for schedules, which warn where they step first
    loss = None if closure is None else torch.enable_grad()(closure)()
    groups, rule = optimizer.param_groups, inspect.unwrap(type(optimizer).step)
    try:
        if rule in _ELEMENTWISE:
            _run_on_shards(optimizer, rule)
            return loss
        for group in groups:
            for parameter in [one for one in group["params"] if one.grad is not None]:
                # One at a time: full tensors are as large as the largest parameter, not as the model.
                optimizer.param_groups = [{**group, "params": [parameter]}]
                _run_on_full(optimizer, rule, parameter)
    finally:
        optimizer.param_groups = groups
    return loss


# torch's wrapper runs the optimizer's hooks, once for all parameters.
_hooked_step: Any = optim.Optimizer.profile_hook_step(_step)


@functools.wraps(_step)
def _call_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    return _hooked_step(optimizer() if isinstance(optimizer, weakref.ref) else optimizer, closure)


_call_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a schedule's own wrapper notes what `_step` does


def _run_on_shards(optimizer: Any, rule: Callable[[Any], Any]) -> None:
    """Run an elementwise rule on the local shards, in place; state that it makes is cut like its parameter."""
    state, shards = optimizer.state, {}
    optimizer.state, optimizer.param_groups = defaultdict(dict), [dict(group) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            group["params"] = [local_tensor(parameter) for parameter in trained]
            for shard, parameter in zip(group["params"], trained, strict=True):
                shards[shard] = parameter
                gradient = local_tensor(parameter.grad)
                if gradient.dtype != shard.dtype:
                    shard.grad_dtype = None  # any
                shard.grad = gradient
                if parameter in state:
                    optimizer.state[shard] = {name: _local(value) for name, value in state[parameter].items()}
        rule(optimizer)
    finally:
        made, optimizer.state = optimizer.state, state
        for shard, parameter in shards.items():
            shard.grad = None
            for name, value in made.get(shard, {}).items():
                if _local(state[parameter].get(name)) is not value:
                    is_cut = isinstance(parameter, DTensor) and getattr(value, "shape", None) == shard.shape
                    state[parameter][name] = with_layout(value, parameter, requires_grad=False) if is_cut else value


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _run_on_full(optimizer: Any, rule: Callable[[Any], Any], parameter: nn.Parameter) -> None:
    """Run a matrix-wise rule on the only parameter of `param_groups` in full, and cut the results; collective."""
    if not isinstance(parameter, DTensor):
        rule(optimizer)
        return
    full = nn.Parameter(_full(parameter))
    full.grad = _full(parameter.grad)
    if parameter in optimizer.state:
        held = optimizer.state[parameter]
        optimizer.state[full] = {name: _full(value, full.device) for name, value in held.items()}
    optimizer.param_groups[0]["params"] = [full]
    rule(optimizer)
    state = optimizer.state.pop(full, {})
    optimizer.state[parameter] = {name: _shard_of(value, parameter) for name, value in state.items()}
    local_tensor(parameter).copy_(local_tensor(cut(full, parameter)))


def _full(value: Any, device: torch.device | None = None) -> Any:
    """Return a DTensor in full (collective); other state on `device`, but for 0-dim tensors."""
    if isinstance(value, DTensor):
        # Shards in host memory are gathered on the device of the mesh, and the rule runs there.
        local = local_tensor(value).to(mesh_device(value.device_mesh))
        return with_layout(local, value, requires_grad=False).full_tensor()
    return value.to(device) if isinstance(value, torch.Tensor) and value.ndim else value


def _shard_of(value: Any, parameter: DTensor) -> Any:
    """Undo `_full`: what has the shape of a parameter is cut like it, what has another is equal on all ranks."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return cut(value, parameter) if value.shape == parameter.shape else value.to(local_tensor(parameter).device)
