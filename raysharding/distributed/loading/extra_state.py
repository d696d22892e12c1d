"""Extra state of modules (`get_extra_state`): broadcast from rank 0 as JSON and tensors, never as pickles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.checkpoint.format import EXTRA_STATE_NAME
from raysharding.distributed.comm import agree, from_rank_0, metadata_device
from raysharding.distributed.fully_shard import named_submodules, persistent_names
from raysharding.distributed.loading.state_dict_source import why_refused
from raysharding.distributed.optim import decode, encode
from raysharding.errors import PlanError
from raysharding.models import clean_name


def extra_state_owners(module: nn.Module, clean: bool = True) -> dict[str, nn.Module]:
    """Return key in a state dict → module whose `set_extra_state` takes the value.

    Args:
        module: The root module.
        clean: True to remove the names of wrappers from keys.
    """
    return {
        (clean_name(prefix) if clean else prefix) + EXTRA_STATE_NAME: submodule
        for prefix, submodule in named_submodules(module, aliases=True)
        if type(submodule).set_extra_state is not nn.Module.set_extra_state
    }


def extra_state_keys(state_dict: Collection[object], module: nn.Module) -> list[str]:
    """Return the keys of extra state in a state dict, whether or not a module takes them; values are not accessed."""
    found = [key for key in state_dict if isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE_NAME]
    own = persistent_names(module) if found else set()  # a tensor may have such a name
    return [key for key in found if key not in own]


@dataclass(frozen=True)
class ExtraState:
    """Extra state of rank 0, the same on every rank."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Key → value, for `set_extra_state`."""
    missing: tuple[str, ...] = ()
    """Keys that the module takes and rank 0's state dict lacks."""
    unexpected: tuple[str, ...] = ()
    """Keys that no module takes."""

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of all extra state in rank 0's state dict."""
        return frozenset((*self.values, *self.unexpected))

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Return a line for each missing or unexpected key."""
        missing = (f"missing from the state dict: {key}" for key in self.missing)
        return (*missing, *(f"unexpected in the state dict: {key}" for key in self.unexpected))

    def apply(self, module: nn.Module) -> None:
        """Call `set_extra_state` on each module with a value; collective, if there are any.

        Raises:
            Exception: On a rank whose module raised: that error. On the other ranks: as from `agree`.
        """
        if not self.values:
            return
        error: Exception | None = None
        try:
            owners = extra_state_owners(module)
            for key, value in self.values.items():
                owners[key].set_extra_state(value)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome
            error = raised
        agree(error)


def distribute_extra_state(module: nn.Module, state_dict: Mapping[str, Any]) -> ExtraState:
    """Broadcast the extra state of rank 0; collective.

    Args:
        module: Module that takes the state; it is not changed.
        state_dict: State dict of rank 0, whose other items are not accessed; ignored on the other ranks.

    Returns:
        The values; tensors have memory of their own, on their type of device.

    Raises:
        PlanError: On every rank, if a value does not consist of tensors and JSON values.
    """
    tensors: list[torch.Tensor] = []

    def outline() -> dict[str, Any]:
        owners = extra_state_owners(module)
        keys = extra_state_keys(state_dict, module)
        values, problems = {}, []
        for key in keys:
            if key in owners:
                before = len(tensors)
                try:
                    values[key] = encode(state_dict[key], key, tensors)
                except ValueError as error:
                    problems.append(str(error))
                problems += [f"{key}: {problem}" for problem in map(why_refused, tensors[before:]) if problem]
        if problems:
            cure = "leave its keys out, pass strict=False, and call set_extra_state of those modules on every rank"
            raise PlanError(
                f"the state dict holds extra state that cannot be sent to other ranks: {cure}:", problems=problems
            )
        return {
            "values": values,
            "missing": [key for key in owners if key not in values],
            "unexpected": [key for key in keys if key not in owners],
            "tensors": [
                [list(item.shape), str(item.dtype).removeprefix("torch."), item.device.type] for item in tensors
            ],
        }

    told = from_rank_0(outline)
    received = _broadcast(tensors, told["tensors"])
    values = {key: decode(value, received) for key, value in told["values"].items()}
    return ExtraState(values, tuple(told["missing"]), tuple(told["unexpected"]))


def _broadcast(tensors: list[torch.Tensor], outlines: list[list[Any]]) -> list[torch.Tensor]:
    """Broadcast rank 0's tensors; collective, if there are any."""
    made = []
    for index, (shape, dtype, device) in enumerate(outlines):
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=metadata_device())
        if tensors:  # rank 0
            value.copy_(tensors[index].detach())
        dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        made.append(value.to(device))
    return made
