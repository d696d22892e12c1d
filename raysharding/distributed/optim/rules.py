"""`adapt`: optimizers whose rules do not run on DTensors, or not rightly.

Note: three kinds of rules.
    Most of torch's rules are elementwise, and run on DTensors. Some are elementwise, but use operations that DTensor
    lacks: they run on the local shards. Matrix-wise rules (Adafactor's means over rows and columns, Muon's
    orthogonalization) run on whole parameters, gathered one after the other, on every rank alike. State of the shape of
    its parameter is sharded like it in all three; other state (Adafactor's means) is equal on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import cut, local_tensor, mesh_device, with_layout

_WHOLE = frozenset({"Adafactor", "Muon"})
"""Classes, by name, with a matrix-wise rule; those of torch and transformers were tried."""
_LOCAL = {"Rprop": "step_sizes", "SGD": "fused", "Adagrad": "fused"}
"""Classes with an elementwise rule that DTensor cannot run → hyperparameter that is then set."""
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
    is_odd = not _WHOLE.isdisjoint(names) or any(group.get(_LOCAL.get(name)) for group in groups for name in names)
    if is_odd and inspect.unwrap(optimizer.step) is not _step:
        # torch's wrapper runs the optimizer's hooks, once for all parameters.
        optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(_step), optimizer)  # type: ignore[method-assign]


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Run the rule of the optimizer's class on plain tensors; collective for a matrix-wise rule."""
    loss = None if closure is None else torch.enable_grad()(closure)()
    is_whole = not _WHOLE.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__)
    groups = optimizer.param_groups
    try:
        for group in groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            # One at a time: full tensors are as large as the largest parameter, not as the model.
            for part in [[one] for one in trained] if is_whole else [trained]:
                _run_rule(optimizer, group, part, is_whole)
    finally:
        optimizer.param_groups = groups
    return loss


@torch.no_grad()
def _run_rule(optimizer: Any, group: dict[str, Any], parameters: Sequence[nn.Parameter], is_whole: bool) -> None:
    """Run the rule on plain tensors in place of these parameters, and put the results back into the shards."""
    twins = [_twin(optimizer, one, is_whole) if isinstance(one, DTensor) else one for one in parameters]
    optimizer.param_groups = [{**group, "params": twins}]
    inspect.unwrap(type(optimizer).step)(optimizer)
    for parameter, twin in zip(parameters, twins, strict=True):
        if isinstance(parameter, DTensor):
            state = optimizer.state.pop(twin, {})
            optimizer.state[parameter] = {name: _shard_of(one, parameter, is_whole) for name, one in state.items()}
            local_tensor(parameter).copy_(local_tensor(_shard_of(twin, parameter, is_whole)))


def _twin(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, is_whole: bool) -> nn.Parameter:
    """Return a plain parameter with the gradient and the optimizer's state of a sharded one."""
    twin = nn.Parameter(_plain(parameter, is_whole))
    twin.grad = _plain(parameter.grad, is_whole)
    if parameter in optimizer.state:
        held = optimizer.state[parameter]
        optimizer.state[twin] = {name: _plain(value, is_whole, twin.device) for name, value in held.items()}
    return twin


def _plain(value: Any, is_whole: bool, device: torch.device | None = None) -> Any:
    """Return a DTensor in full (collective), or its local shard; other state on `device`, but for 0-dim tensors."""
    if isinstance(value, DTensor) and is_whole:
        # Shards in host memory are gathered on the device of the mesh, and the rule runs there.
        local = local_tensor(value).to(mesh_device(value.device_mesh))
        return with_layout(local, value, requires_grad=False).full_tensor()
    if isinstance(value, DTensor):
        return local_tensor(value)
    return value.to(device) if isinstance(value, torch.Tensor) and value.ndim else value


def _shard_of(value: Any, parameter: DTensor, is_whole: bool) -> Any:
    """Undo `_plain`: what has the shape of a parameter is cut like it, what has another is equal on all ranks."""
    local = local_tensor(parameter)
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if value.shape != (parameter if is_whole else local).shape:
        return value.to(local.device)
    return cut(value, parameter) if is_whole else with_layout(value.detach(), parameter, requires_grad=False)
