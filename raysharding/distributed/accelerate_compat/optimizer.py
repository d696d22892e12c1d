"""Moving an optimizer from the original parameters of a model to the sharded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raysharding.distributed.fully_shard import cut, local_tensor
from raysharding.distributed.optim import adapt


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.Tensor]) -> None:
    """Put an optimizer on sharded parameters, in place. Not collective.

    As accelerate's function of this name. Options of the groups and the order of the parameters stay. Existing state of
    the optimizer moves to the sharded parameters (accelerate's function leaves the state under the original ones): a
    tensor of a parameter's shape is cut like the sharded parameter, with equal dtype and device. Each rank cuts its own
    copy, so the copies must be equal on all ranks, as after equal steps.

    Args:
        optimizer: Holds the parameters from before sharding, or stand-ins whose attribute `data_ptr` is an int, as
            accelerate leaves them so that the full parameters can be freed.
        mapping: `data_ptr()` of an original parameter (of its local part, for a DTensor) → the sharded parameter.

    Raises:
        KeyError: On the rank that sees it: parameters without a partner, each with its group, place, shape and name
            where the optimizer knows it. The optimizer is as it was.
        ValueError: On the rank that sees it: state that belongs to no parameter of the mapping, or is a DTensor. The
            optimizer is as it was.
    """
    adapt(optimizer)
    switched = _partners(optimizer, mapping)
    states = _moved_state(optimizer, mapping)
    for group in optimizer.param_groups:
        group["params"] = [switched[parameter] for parameter in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(states)


def _address(parameter: torch.Tensor) -> int:
    """Return the address of the values of an original parameter."""
    found: Any = parameter.data_ptr  # an int on a stand-in
    if isinstance(found, int):
        return found
    return local_tensor(parameter).data_ptr()


def _partners(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Return original → sharded parameter, for all parameters of the optimizer."""
    switched: dict[torch.Tensor, torch.Tensor] = {}
    taken: set[int] = set()
    problems = []
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        for place, parameter in enumerate(group["params"]):
            new = mapping.get(_address(parameter))
            if new is None or id(new) in taken:
                name = f"{names[place]} " if place < len(names) else ""
                known = "no" if new is None else "the same as another's"
                where = f"group {index}, parameter {place}, shape {tuple(parameter.shape)}"
                problems.append(f"{name}({where}): {known} sharded parameter for data_ptr {_address(parameter)}")
                continue
            switched[parameter] = new
            taken.add(id(new))
    if problems:
        raise KeyError(
            f"{len(problems)} of the optimizer's parameters have no partner of their own among {len(mapping)} sharded "
            f"ones: {'; '.join(problems)}. Take the addresses before the model is sharded, moved or cast, and give the "
            "optimizer parameters of this model only; nothing was switched"
        )
    return switched


def _moved_state(optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.Tensor]) -> dict[Any, Any]:
    """Return the optimizer's state, keyed by the sharded parameters, with tensors of a parameter's shape cut alike."""
    states: dict[Any, Any] = {}
    for key, state in optimizer.state.items():
        if not isinstance(key, torch.Tensor):  # of the optimizer as a whole
            states[key] = state
            continue
        # Behind a stand-in the state is still under the original, found by its address, unless that has moved.
        parameter = mapping.get(_address(key))
        if parameter is None or parameter.shape != key.shape:
            raise ValueError(
                f"the optimizer holds state ({', '.join(map(str, state))}) of a parameter of shape {tuple(key.shape)} "
                "whose sharded partner is not known, maybe because it was moved: switch before the first step, or load "
                "the optimizer's state after sharding; nothing was switched"
            )
        states[parameter] = {name: _cut_like(value, parameter) for name, value in state.items()}
    return states


def _cut_like(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not parameter.ndim:
        return value
    if isinstance(value, DTensor):
        raise ValueError(f"the optimizer holds state that is cut already, as {value.placements}: nothing was switched")
    value = value.to(local_tensor(parameter).device, parameter.dtype if value.is_floating_point() else value.dtype)
    return cut(value, parameter) if isinstance(parameter, DTensor) else value
