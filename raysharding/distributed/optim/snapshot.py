"""`OptimizerSnapshot`: what an optimizer holds, by FQN instead of by position, and how it becomes one again.

Note: three kinds of values.
    Tensors of one dim or more are state that is cut as its parameter is (Adam's moments) or that every rank holds
    whole. 0-dim tensors (Adam's `step`) and plain values are the same on every rank; they travel as JSON, with their
    dtype, and so keep their place in host memory. Hyperparameters belong to a param group and travel as JSON, too.
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

from raysharding.distributed.comm import agree
from raysharding.distributed.fully_shard import local_tensor, meta_like, reshard
from raysharding.distributed.optim.factories import schedule_of
from raysharding.errors import PlanError
from raysharding.models import clean_name

SEPARATOR = "/"
"""Between the FQN of a parameter and the name of its state in tensor names: no FQN holds it."""
_NOT_HYPER = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerSnapshot:
    """An optimizer's contents, its tensors not copied."""

    groups: tuple[dict[str, Any], ...]
    """Param groups: hyperparameters, and under `params` the FQNs."""
    values: Mapping[str, Mapping[str, Any]]
    """FQN → name → 0-dim tensor or plain value."""
    tensors: Mapping[str, torch.Tensor]
    """`FQN/name` → DTensor, or a tensor that every rank holds whole; 1 dim or more."""
    names: tuple[str, ...]
    """FQNs of the parameters that have state, in the optimizer's order."""
    optimizer: str = ""
    """Name of the optimizer's class; empty where only a state dict is known."""
    schedule: tuple[str, Mapping[str, Any]] | None = None
    """Name of the class of its schedule, and the state of that; `None` where it has none."""

    @classmethod
    def of(
        cls, module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None = None
    ) -> OptimizerSnapshot:
        """Look at an optimizer; each rank alone, no collective.

        Args:
            module: The sharded root module.
            optimizer: Over its parameters.
            state_dict: Its `state_dict()`, changed maybe. Default: what the optimizer holds.

        Raises:
            ValueError: It holds a parameter that is not the module's, or `state_dict` is not of its param groups.
        """
        # What the optimizer holds is keyed by the parameters themselves, a state dict by ids in the same order.
        given = optimizer.param_groups if state_dict is None else state_dict["param_groups"]
        held_state = optimizer.state if state_dict is None else state_dict["state"]
        if [len(held["params"]) for held in given] != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError("optim_state_dict: its param groups are not the optimizer's")
        names = parameter_names(module)
        groups: list[dict[str, Any]] = []
        state: dict[str, Mapping[str, Any]] = {}
        for group, held in zip(optimizer.param_groups, given, strict=True):
            fqns = [_name_of(names, parameter) for parameter in group["params"]]
            groups.append({**_hyperparameters(held), "params": fqns})
            for fqn, key in zip(fqns, held["params"], strict=True):
                if key in held_state:
                    state[fqn] = held_state[key]
        values, tensors = split_state(state)
        schedule = schedule_of(optimizer)
        scheduled = None if schedule is None else (type(schedule).__name__, schedule.state_dict())
        return cls(tuple(groups), values, tensors, tuple(state), type(optimizer).__name__, scheduled)

    def outline(self) -> dict[str, Any]:
        """What there is, as JSON: enough to make a like optimizer's state without its tensors' contents.

        Raises:
            ValueError: A value is of a type that JSON and 0-dim tensors do not cover.
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
        """Make what an outline tells of, its tensors on meta, cut as the module's parameters are now.

        Raises:
            PlanError: The module lacks parameters, or has others under those names.
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
        schedule = decode(outline.get("schedule"))  # saves of before have none
        return cls(groups, values, tensors, tuple(outline["names"]), outline["optimizer"], schedule)

    def state(self, tensors: Mapping[str, Any], *, on_cpu: bool = False) -> dict[str, dict[str, Any]]:
        """FQN → name → value, with the given tensors in the place of this snapshot's.

        Args:
            tensors: `FQN/name` → tensor.
            on_cpu: Bring 0-dim tensors to host memory.
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
        """`state` and the param groups, as an optimizer state dict by FQN; see `state` for the arguments."""
        return {"state": self.state(tensors, on_cpu=on_cpu), "param_groups": [dict(held) for held in self.groups]}

    def misfit(self, current: OptimizerSnapshot, told: str) -> PlanError | None:
        """What keeps this snapshot from being put into an optimizer: class and param groups are compared.

        Args:
            current: Of that optimizer.
            told: What this snapshot was: `saved`, `held`.
        """
        problems = []
        if self.optimizer != current.optimizer:
            problems.append(f"the state of {self.optimizer} was {told}, the optimizer is {current.optimizer}")
        if len(self.groups) != len(current.groups):
            problems.append(f"{len(self.groups)} param groups were {told}, the optimizer has {len(current.groups)}")
        for index, (old, new) in enumerate(zip(self.groups, current.groups, strict=False)):
            held, has = set(old["params"]), set(new["params"])
            where = f"param group {index}"
            problems += [f"{where}: {fqn} was {told}, the optimizer has it not" for fqn in sorted(held - has)]
            problems += [f"{where}: {fqn} was not {told}" for fqn in sorted(has - held)]
        kinds = [None if one.schedule is None else one.schedule[0] for one in (self, current)]
        if kinds[0] not in (None, kinds[1]):
            problems.append(
                f"the schedule {kinds[0]} was {told}, the optimizer has {kinds[1] or 'none'}: see Scheduled"
            )
        message = f"the {told} optimizer state does not fit the optimizer:"
        return PlanError(message, problems=problems) if problems else None

    def apply(self, module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put all into an optimizer that fits, past its own `load_state_dict`, which casts to the parameters' dtype.

        Args:
            module: The sharded root module.
            optimizer: Gets state and hyperparameters; what it had is dropped.
            tensors: `FQN/name` → what comes in the place of this snapshot's tensors.
        """
        parameters = {fqn: parameter for parameter, fqn in parameter_names(module).items()}
        optimizer.state.clear()
        for fqn, held in self.state(tensors).items():
            parameter = parameters[fqn]
            device = local_tensor(parameter).device
            # What every rank holds whole came to the mesh's device; it steps where its parameter is.
            whole = {name: value.to(device) for name, value in held.items() if _is_whole(value)}
            optimizer.state[parameter] = {**held, **whole}
        for old, group in zip(self.groups, optimizer.param_groups, strict=True):
            for key, value in old.items():
                if key == "params":
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)  # a captured graph holds on to the tensor
                else:
                    group[key] = value
        schedule = schedule_of(optimizer)
        if schedule is not None and self.schedule is not None:
            schedule.load_state_dict(dict(self.schedule[1]))


def _is_whole(value: Any) -> bool:
    """Whether a value is state that every rank holds whole: torch keeps 0-dim state in host memory."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not isinstance(value, DTensor)


def split_state(
    state: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """FQN → name → value as `OptimizerSnapshot` holds it: what travels as JSON, and what as tensors."""
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for fqn, held in state.items():
        values[fqn] = {}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                tensors[f"{fqn}{SEPARATOR}{name}"] = value
            else:
                # A copy: full state that is kept must not follow the next steps.
                values[fqn][name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return values, tensors


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Parameter → clean FQN, tied ones under their first; the shards, whatever a forward left registered."""
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


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPER}


def state_like(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on meta for state of `parameter`: cut as it is where it has its shape, else whole on every rank."""
    if isinstance(parameter, DTensor) and tuple(shape) == tuple(parameter.shape):
        return meta_like(parameter.detach(), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


_KIND = "kind"


def encode(value: Any, where: str, tensors: list[torch.Tensor] | None = None) -> Any:
    """A hyperparameter or 0-dim state value as JSON.

    Args:
        value: Number, text, `None`, 0-dim tensor, or lists, tuples and dicts (keys of text) of them.
        where: What it is, for the error.
        tensors: Gets the tensors of any shape, for which the result has their place in it. Default: 0-dim ones alone
            are taken, by value.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_KIND: "float", "item": repr(value)}  # JSON has no word for it
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
    """Undo `encode`. A 0-dim tensor comes back where it was: in host memory, or on the current device of that type."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if value[_KIND] == "float":
        return float(value["item"])
    if value[_KIND] == "counter":
        return Counter(value["items"])
    if value[_KIND] == "dict":
        return {key: decode(item, tensors) for key, item in value["items"].items()}
    if value[_KIND] == "place":
        return tensors[value["item"]]
    if value[_KIND] != "tensor":
        raise ValueError(f"no kind of value is called {value[_KIND]!r}")
    device = value["device"] if value["device"] == "cpu" or torch.cuda.is_available() else "cpu"
    return torch.tensor(decode(value["item"]), dtype=getattr(torch, value["dtype"]), device=device)


def agreed_snapshot(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any] | None = None
) -> OptimizerSnapshot | None:
    """What the optimizer holds, once every rank was seen to hold the like; collective. `None` where none has any.

    Raises:
        PlanError: On every rank, when an optimizer holds what is not the module's, or what cannot be saved, or when
            ranks differ in param groups, or in which state there is.
    """
    snapshot: OptimizerSnapshot | None = None
    digest = ""
    error: Exception | None = None
    try:
        if optimizer is not None:
            snapshot = OptimizerSnapshot.of(module, optimizer, state_dict)
            outline = snapshot.outline()
            held = {fqn: sorted(values) for fqn, values in outline.pop("values").items()}
            digest = sha256(repr((outline, held)).encode()).hexdigest()
    except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
        error = PlanError(str(raised)) if isinstance(raised, ValueError) else raised
    # Before any data collective, with an optimizer or without: ranks that hold different state would send what nobody
    # receives, and hang.
    digests = agree(error, digest)
    differing = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if differing:
        raise PlanError(
            f"the optimizers of ranks {', '.join(differing)} hold other param groups or state than rank 0's: every "
            "rank must pass the same optimizer, after the same steps"
        )
    return snapshot
