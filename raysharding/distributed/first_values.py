"""What a module's tensors hold before they are cut: `param_init_fn` and `sync_module_states`, one group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.config import Sharding
from raysharding.distributed.agreement import agree
from raysharding.distributed.layout import module_tensors, named_submodules
from raysharding.distributed.metadata import all_gather_json
from raysharding.errors import PlanError


class FirstValues:
    """Gives tensors on meta memory and values, and every rank rank 0's.

    Args:
        module: The root, before any `fully_shard`.
        device: Where it computes.
        sharding: Its `param_init_fn` and `sync_module_states` are read.

    Raises:
        PlanError: On every rank, when ranks hold different modules, or rank 0 has nothing to send.
    """

    def __init__(self, module: nn.Module, device: torch.device, sharding: Sharding) -> None:
        self._device = device
        self._fn = sharding.param_init_fn
        self._syncs = sharding.sync_module_states
        # Tensors that no group takes may be shared between modules of several groups, and are few.
        self._done: dict[torch.Tensor, torch.Tensor] = {}
        self._sent: set[torch.Tensor] = set()
        if self._syncs:
            _check_alike(module, has_rule=self._fn is not None)

    def settle(self, modules: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
        """Settle the tensors of one FSDP group that is about to be cut; collective under `sync_module_states`.

        Memory: the group's full tensors on this rank.

        Args:
            modules: Of the group; inner groups are cut already, and left alone.
            kept: Parameters that no group cuts.

        Raises:
            Exception: What `param_init_fn` raised; under `sync_module_states` on every rank.
        """
        error: Exception | None = None
        submodules = list(_own_submodules(modules))
        try:
            self._initialise(submodules, kept)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
            error = raised
        if self._syncs:
            # A rank whose function failed, or that has no memory, must not leave the others in the broadcasts.
            agree(error)
        if error is not None:
            raise error
        if self._syncs:
            self._broadcast(submodules, kept)

    def _initialise(self, submodules: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
        if self._fn is None and not self._syncs:
            return
        new: dict[torch.Tensor, torch.Tensor] = {}
        filled: list[nn.Module] = []
        for submodule in submodules:
            for table, name, tensor in _tensors([submodule]):
                if not tensor.is_meta:
                    continue
                shared = self._done if tensor in kept or not isinstance(tensor, nn.Parameter) else new
                if tensor not in shared:
                    shared[tensor] = _empty_like(tensor, self._device)
                table[name] = shared[tensor]
                if submodule not in filled[-1:]:
                    filled.append(submodule)
        if self._fn is None:
            return
        with torch.no_grad():
            for submodule in filled:
                self._fn(submodule)

    def _broadcast(self, submodules: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
        kept_now = {self._done.get(parameter, parameter) for parameter in kept}
        sent: set[torch.Tensor] = set()
        for _, _, tensor in _tensors(submodules):
            if tensor in sent or tensor in self._sent or not tensor.numel():
                continue
            # What no group takes may be met again. What is cut must not be held on to.
            (self._sent if tensor in kept_now or not isinstance(tensor, nn.Parameter) else sent).add(tensor)
            staged = tensor.detach().to(self._device).contiguous()
            # All ranks hold the same tensors in the same order (`_check_alike`), so each one meets its own.
            dist.broadcast(staged.reshape(-1).view(torch.uint8), src=0)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(staged)


def _own_submodules(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    for module in modules:
        for _, submodule in named_submodules(module):
            if submodule not in seen:
                seen.add(submodule)
                yield submodule


def _tensors(submodules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(table, name, tensor) of what these modules hold themselves and FSDP has not cut."""
    for submodule in submodules:
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and not isinstance(tensor, DTensor):
                    yield table, name, tensor


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # Marks that models hang on tensors, and those of subclasses of nn.Parameter.
    value.__dict__.update(tensor.__dict__)
    return value


def _check_alike(module: nn.Module, *, has_rule: bool) -> None:
    """Compare names, shapes and dtypes over the ranks; collective."""
    tensors = module_tensors(module)
    mine = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    on_meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    # Ranks with other tensors would wait in broadcasts that have no partner.
    every = all_gather_json({"tensors": mine, "on_meta": on_meta, "has_rule": has_rule})
    for rank, other in enumerate(every):
        if other["tensors"] != every[0]["tensors"]:
            pairs = zip(other["tensors"], every[0]["tensors"], strict=False)
            found = next((pair for pair in pairs if pair[0] != pair[1]), None)
            what = f"has {found[0]} where rank 0 has {found[1]}" if found else "has more or fewer tensors than rank 0"
            raise PlanError(f"sync_module_states: rank {rank} {what}; build the same module on every rank")
        if other["has_rule"] != every[0]["has_rule"]:
            raise PlanError("sync_module_states: give param_init_fn on every rank or on none")
    if every[0]["on_meta"] is not None and not has_rule:
        raise PlanError(
            f"sync_module_states: {every[0]['on_meta']} is on meta on rank 0, which has nothing to send: build the "
            "module with values there, give param_init_fn, or load a checkpoint instead"
        )
