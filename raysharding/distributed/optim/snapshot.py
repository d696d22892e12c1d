"""`OptimizerSnapshot`: the contents of an optimizer, by FQN instead of by position.

Note: three kinds of values.
    Tensors of one dim or more are state that is sharded like its parameter (Adam's moments), or replicated on all
    ranks. 0-dim tensors (Adam's `step`) and plain values are the same on every rank; they are sent as JSON, with their
    dtype, and stay in host memory. Hyperparameters belong to a param group, and are sent as JSON, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from raysharding.distributed.comm import agreeing, all_gather_json, is_available
from raysharding.distributed.fully_shard import local_tensor, meta_like, reshard
from raysharding.distributed.optim.factories import schedule_of, set_hyperparameter, steps_of
from raysharding.errors import PlanError
from raysharding.models import clean_name

SEPARATOR = "/"
"""Separates the FQN of a parameter from the name of its state in tensor names; FQNs do not contain it."""
_NOT_HYPER = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerSnapshot:
    """The contents of an optimizer; tensors are not copied."""

    groups: tuple[dict[str, Any], ...]
    """Param groups: hyperparameters, and under `params` the FQNs."""
    values: Mapping[str, Mapping[str, Any]]
    """FQN → name → 0-dim tensor or plain value."""
    tensors: Mapping[str, torch.Tensor]
    """`FQN/name` → DTensor, or a tensor that is replicated on all ranks; 1 dim or more."""
    names: tuple[str, ...]
    """FQNs of the parameters that have state, in the optimizer's order."""
    optimizer: str = ""
    """Name of the optimizer class; empty if only a state dict is known."""
    schedule: tuple[str, Mapping[str, Any]] | None = None
    """Class name and state of the schedule; `None` without a schedule."""

    @classmethod
    def of(
        cls, module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None = None
    ) -> OptimizerSnapshot:
        """Make the snapshot of an optimizer. Not collective.

        Args:
            module: The sharded root module.
            optimizer: Optimizer over its parameters.
            state_dict: A `state_dict()` of the optimizer, possibly changed. Default: the optimizer's own state.

        Raises:
            ValueError: The optimizer holds a parameter of no module, or `state_dict` has other param groups.
        """
        # The keys of the optimizer's state are parameters, those of a state dict are ids in the same order.
        given = optimizer.param_groups if state_dict is None else state_dict["param_groups"]
        held_state = optimizer.state if state_dict is None else state_dict["state"]
        if [len(held["params"]) for held in given] != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError("optim_state_dict: its param groups are not the optimizer's")
        names = parameter_names(module)
        groups: list[dict[str, Any]] = []
        state: dict[str, Mapping[str, Any]] = {}
        for group, held in zip(optimizer.param_groups, given, strict=True):
            fqns = [_name_of(names, parameter) for parameter in group["params"]]
            hyperparameters = {key: value for key, value in held.items() if key not in _NOT_HYPER}
            groups.append({**hyperparameters, "params": fqns})
            for fqn, key in zip(fqns, held["params"], strict=True):
                if key in held_state:
                    state[fqn] = held_state[key]
        values, tensors = split_state(state)
        schedule = schedule_of(optimizer)
        scheduled = None if schedule is None else (type(schedule).__name__, schedule.state_dict())
        return cls(tuple(groups), values, tensors, tuple(state), type(optimizer).__name__, scheduled)

    def outline(self) -> dict[str, Any]:
        """Return the contents as JSON, without the values of tensors.

        Raises:
            ValueError: A value is neither JSON nor a 0-dim tensor.
        """
        return {
            "optimizer": self.optimizer,
            "schedule": encode(self.schedule, "the schedule"),
            "groups": [encode(group, "param_groups") for group in self.groups],
            "names": list(self.names),
            "values": {
                fqn: {name: encode(value, f"state of {fqn}: {name}") for name, value in held.items()}
                for fqn, held in self.values.items()
            },
            "tensors": {
                key: [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), isinstance(tensor, DTensor)]
                for key, tensor in self.tensors.items()
            },
        }

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any], module: nn.Module) -> OptimizerSnapshot:
        """Make a snapshot from an outline, with tensors on meta that are sharded like the module's parameters.

        Raises:
            PlanError: The module lacks parameters, or their shapes differ.
        """
        parameters = dict(_named(module))
        problems = [f"{fqn}: the module has no such parameter" for fqn in outline["names"] if fqn not in parameters]
        tensors: dict[str, torch.Tensor] = {}
        for key, (shape, dtype, is_cut) in outline["tensors"].items():
            parameter = parameters.get(key.rpartition(SEPARATOR)[0])
            if parameter is None:
                continue
            if is_cut and tuple(shape) != tuple(parameter.shape):
                problems.append(f"{key}: of shape {tuple(shape)}, the module's parameter {tuple(parameter.shape)}")
                continue
            tensors[key] = state_like(parameter, shape, getattr(torch, dtype))
        if problems:
            raise PlanError("the optimizer's state does not fit the module:", problems=problems)
        values = {fqn: {name: decode(value) for name, value in held.items()} for fqn, held in outline["values"].items()}
        groups = tuple(decode(group) for group in outline["groups"])
        schedule = decode(outline.get("schedule"))  # old saves have none
        return cls(groups, values, tensors, tuple(outline["names"]), outline["optimizer"], schedule)

    def state(self, tensors: Mapping[str, Any], *, on_cpu: bool = False) -> dict[str, dict[str, Any]]:
        """Return FQN → name → value, with the given tensors in place of this snapshot's.

        Args:
            tensors: `FQN/name` → tensor.
            on_cpu: True to move 0-dim tensors to host memory.
        """

        def placed(value: Any) -> Any:
            return value.cpu() if on_cpu and isinstance(value, torch.Tensor) else value

        held = {fqn: self.values.get(fqn, {}) for fqn in self.names}
        state = {fqn: {name: placed(value) for name, value in values.items()} for fqn, values in held.items()}
        for key, tensor in tensors.items():
            fqn, _, name = key.rpartition(SEPARATOR)
            state[fqn][name] = tensor
        return state

    def state_dict(self, tensors: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        """Return `state` and the param groups as an optimizer state dict by FQN; arguments as for `state`."""
        return {"state": self.state(tensors, on_cpu=on_cpu), "param_groups": [dict(held) for held in self.groups]}

    def check_fits(self, current: OptimizerSnapshot) -> None:
        """Raise if this snapshot, which was saved, does not fit an optimizer.

        Args:
            current: Snapshot of that optimizer.

        Raises:
            PlanError: With all differences of class, schedule and param groups.
        """
        problems = []
        if self.optimizer != current.optimizer:
            problems.append(f"the state of {self.optimizer} was saved, the optimizer is {current.optimizer}")
        if len(self.groups) != len(current.groups):
            problems.append(f"{len(self.groups)} param groups were saved, the optimizer has {len(current.groups)}")
        for index, (old, new) in enumerate(zip(self.groups, current.groups, strict=False)):
            held, has = set(old["params"]), set(new["params"])
            where = f"param group {index}"
            problems += [f"{where}: {fqn} was saved, the optimizer has it not" for fqn in sorted(held - has)]
            problems += [f"{where}: {fqn} was not saved" for fqn in sorted(has - held)]
        kinds = [None if one.schedule is None else one.schedule[0] for one in (self, current)]
        if kinds[0] not in (None, kinds[1]):
            problems.append(f"the schedule {kinds[0]} was saved, the optimizer has {kinds[1] or 'none'}: see Scheduled")
        cure = "to begin with a new optimizer, load without one and set it after the load"
        if problems:
            raise PlanError(f"the saved optimizer state does not fit the optimizer; {cure}:", problems=problems)

    def dropped(self, given: OptimizerSnapshot) -> str:
        """Return a text on learning rates and options of the schedule that a load of this snapshot drops, if any.

        Args:
            given: Snapshot of the optimizer before the load.
        """
        pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]
        pairs = [
            ({"lr": _base(old)}, {"lr": _base(new)})
            for old, new in zip(self.groups, given.groups, strict=True)
            if self.schedule is None or "initial_lr" in old  # ReduceLROnPlateau keeps no rate of the beginning
        ]
        cure = "group.set_optimizer(...), after the load, begins a new one"
        if self.schedule is not None and given.schedule is not None:
            pairs.append((self.schedule[1], given.schedule[1]))
            step = steps_of(self.schedule[1]) + 1
            cure = f"group.set_scheduler(...), after the load, continues at step {step} of another schedule; {cure}"
        lines = dict.fromkeys(line for pair in pairs for line in _differences(*pair))
        return f"the optimizer goes on as saved, not as given: {'; '.join(lines)}. {cure}" if lines else ""

    def apply(self, module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load this snapshot into an optimizer that fits, not by `load_state_dict`, which casts to the parameter dtype.

        Args:
            module: The sharded root module.
            optimizer: Its state and hyperparameters are replaced.
            tensors: `FQN/name` → tensor in place of this snapshot's.
        """
        parameters = {fqn: parameter for parameter, fqn in parameter_names(module).items()}
        optimizer.state.clear()
        for fqn, held in self.state(tensors).items():
            parameter = parameters[fqn]
            device = local_tensor(parameter).device
            # Replicated state arrived on the device of the mesh, and is needed on the device of its parameter.
            whole = {name: value.to(device) for name, value in held.items() if _is_whole(name, value, parameter)}
            optimizer.state[parameter] = {**held, **whole}
        for old, group in zip(self.groups, optimizer.param_groups, strict=True):
            for key, value in old.items():
                if key != "params":
                    set_hyperparameter(group, key, value)
        schedule = schedule_of(optimizer)
        if schedule is None or self.schedule is None:
            return
        schedule.load_state_dict(dict(self.schedule[1]))
        if isinstance(schedule, LambdaLR):  # the state holds no functions: the given ones count from the next step on
            rates = zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
            for group, base, function in rates:
                set_hyperparameter(group, "lr", base * function(schedule.last_epoch))


def _base(group: Mapping[str, Any]) -> Any:
    """Return the learning rate of a param group before its schedule."""
    return group.get("initial_lr", group.get("lr"))


_CHANGING = ("last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
"""What torch's schedules change as they step, beside attributes that begin with an underscore."""


def _differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a text for each option that differs between the states of two schedules, whatever steps these took."""
    lines: list[str] = []
    for key in sorted(saved.keys() & given.keys()):
        if key == "_schedulers":
            lines += (line for pair in zip(saved[key], given[key], strict=False) for line in _differences(*pair))
        elif saved[key] != given[key] and key not in _CHANGING and (key == "_milestones" or key[0] != "_"):
            lines.append(f"{key.lstrip('_')} is {saved[key]!r} in the save, {given[key]!r} was given")
    return lines


def _is_whole(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return True for replicated state beside its parameter. torch keeps counts, which are 0-dim, in host memory."""
    is_count = name == "step" or parameter.ndim > 0
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and (value.ndim > 0 or not is_count)


def split_state(state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """Split FQN → name → value into the values and the tensors of an `OptimizerSnapshot`."""
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn, held in state.items():
        values[fqn] = {}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                tensors[f"{fqn}{SEPARATOR}{name}"] = value
            else:
                # A copy: later steps must not change kept full state.
                values[fqn][name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return values, tensors


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return parameter shard → clean FQN; tied parameters have their first FQN."""
    return {parameter: name for name, parameter in _named(module)}


def _named(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    reshard(module)
    return ((clean_name(name), parameter) for name, parameter in module.named_parameters())


def _name_of(names: Mapping[torch.Tensor, str], parameter: torch.Tensor) -> str:
    if parameter not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the module's: make it over "
            "module.parameters() after the module was sharded"
        )
    return names[parameter]


def state_like(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on meta for state of `parameter`: sharded like it if the shape is equal, else replicated."""
    if isinstance(parameter, DTensor) and tuple(shape) == tuple(parameter.shape):
        return meta_like(parameter.detach(), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


_KIND = "kind"


def encode(value: Any, where: str, tensors: list[torch.Tensor] | None = None) -> Any:
    """Return a hyperparameter or 0-dim state value as JSON.

    Args:
        value: Number, text, `None`, 0-dim tensor, or lists, tuples and dicts (with text keys) of these.
        where: Name of the value, for the error.
        tensors: List that tensors of any shape are appended to; the result has their index. Default: only 0-dim
            tensors are accepted, by value.

    Raises:
        ValueError: The value is of another type.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_KIND: "float", "item": repr(value)}  # not representable in JSON
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, where, tensors) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [encode(item, where, tensors) for item in value]}
    if isinstance(value, Counter):
        return {_KIND: "counter", "items": sorted(value.elements())}  # milestones of a schedule
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {key: encode(item, f"{where}: {key}", tensors) for key, item in value.items()}
        return {_KIND: "dict", "items": items}
    if tensors is not None and isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_KIND: "place", "item": len(tensors) - 1}
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {_KIND: "tensor", "item": encode(value.item(), where), "dtype": dtype, "device": value.device.type}
    what = "it may be a tensor, number or text, or a list, tuple or dict (keys of text) of them"
    raise ValueError(f"{where} is a {type(value).__name__}: {what}")


def decode(value: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Undo `encode`. A 0-dim tensor is restored in host memory, or on the current device of its type."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] in ("tuple", "counter"):
        items = (decode(item, tensors) for item in value["items"])
        return tuple(items) if value[_KIND] == "tuple" else Counter(items)
    if value[_KIND] == "float":
        return float(value["item"])
    if value[_KIND] == "dict":
        return {key: decode(item, tensors) for key, item in value["items"].items()}
    if value[_KIND] == "place":
        return tensors[value["item"]]
    device = value["device"] if is_available(value["device"]) else "cpu"
    return torch.tensor(decode(value["item"]), dtype=getattr(torch, value["dtype"]), device=device)


def agreed_snapshot(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any] | None = None
) -> OptimizerSnapshot | None:
    """Return the snapshot of the optimizer, after a check that all ranks agree; collective. `None` without optimizers.

    Raises:
        PlanError: On every rank, if an optimizer holds parameters of no module or values that cannot be saved, or if
            ranks differ in param groups or in the names of state.
    """
    snapshot: OptimizerSnapshot | None = None
    digest = ""
    # Before any data collective, on ranks without an optimizer too: ranks with different state would run different
    # collectives, and hang.
    with agreeing():
        if optimizer is not None:
            try:
                snapshot = OptimizerSnapshot.of(module, optimizer, state_dict)
                outline = snapshot.outline()
            except ValueError as error:
                raise PlanError(str(error)) from error
            held = {fqn: sorted(values) for fqn, values in outline.pop("values").items()}
            digest = sha256(repr((outline, held)).encode()).hexdigest()
    digests = all_gather_json(digest)
    differing = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if differing:
        raise PlanError(
            f"the optimizers of ranks {', '.join(differing)} hold other param groups or state than rank 0's: every "
            "rank must pass the same optimizer, after the same steps"
        )
    return snapshot
