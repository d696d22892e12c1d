"""Stand-ins: a copy of a module tree that shares config and attributes, but not classes changed by FSDP nor tensors.

`fully_shard` replaces a module's class by one named `FSDP...`; transformers looks classes up by name, and its
initialisers write to whatever tensors they find. A stand-in answers both without touching the live module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

TensorMap = Callable[[str, torch.Tensor], torch.Tensor]
"""(FQN, tensor of the module) → tensor of the stand-in."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """Class of `module` before `fully_shard` changed it."""
    cls = type(module)
    while FSDPModule in cls.__bases__:
        cls = next(base for base in cls.__bases__ if base is not FSDPModule)
    return cls


def _keep(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def stand_in(module: nn.Module, tensors: TensorMap = _keep) -> nn.Module:
    """Copy a module tree without copying what it holds.

    Args:
        module: Root of the tree; not changed.
        tensors: Gives the stand-in's tensor for every parameter and buffer, by the first FQN it is found under.

    Returns:
        Modules of the original classes, without hooks. Modules and tensors that were shared are shared again.
    """
    return _Copier(tensors).copy(module, "")


@dataclass
class _Copier:
    """State of one `stand_in` call."""

    tensors: TensorMap
    copies: dict[int, nn.Module] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)

    def copy(self, module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in self.copies:
            return self.copies[id(module)]
        cls = original_class(module)
        copy = cls.__new__(cls)
        self.copies[id(module)] = copy
        # Hooks are left behind: FSDP's would gather, and PreTrainedModel's could touch the live module.
        attributes: dict[str, Any] = {name: item for name, item in vars(module).items() if not name.endswith("_hooks")}
        vars(copy).update(vars(nn.Module()) | attributes)
        vars(copy)["_parameters"] = self._replaced(module._parameters, prefix)
        vars(copy)["_buffers"] = self._replaced(module._buffers, prefix)
        vars(copy)["_modules"] = {
            name: None if child is None else self.copy(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        return copy

    def _replaced(self, held: Mapping[str, torch.Tensor | None], prefix: str) -> dict[str, torch.Tensor | None]:
        result: dict[str, torch.Tensor | None] = {}
        for name, tensor in held.items():
            if tensor is not None and id(tensor) not in self.seen:
                self.seen[id(tensor)] = self.tensors(prefix + name, tensor)
            result[name] = None if tensor is None else self.seen[id(tensor)]
        return result
