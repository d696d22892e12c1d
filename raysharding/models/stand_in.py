"""Stand-ins: a copy of a module tree that shares config and attributes, but not classes changed by FSDP nor tensors.

`fully_shard` replaces a module's class by one named `FSDP...`; transformers looks classes up by name, and its
initialisers write to whatever tensors they find. A stand-in answers both without touching the live module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    return _copy(module, "", tensors, {}, {})


def _copy(
    module: nn.Module, prefix: str, tensors: TensorMap, modules: dict[int, nn.Module], seen: dict[int, torch.Tensor]
) -> nn.Module:
    if id(module) in modules:
        return modules[id(module)]
    cls = original_class(module)
    copy = cls.__new__(cls)
    modules[id(module)] = copy
    # Hooks are left behind: FSDP's would gather, and PreTrainedModel's could touch the live module.
    attributes: dict[str, Any] = {name: value for name, value in vars(module).items() if not name.endswith("_hooks")}
    blank = vars(nn.Module())
    attributes = blank | attributes

    def replaced(held: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        result: dict[str, torch.Tensor | None] = {}
        for name, tensor in held.items():
            if tensor is not None and id(tensor) not in seen:
                seen[id(tensor)] = tensors(prefix + name, tensor)
            result[name] = None if tensor is None else seen[id(tensor)]
        return result

    attributes["_parameters"] = replaced(module._parameters)
    attributes["_buffers"] = replaced(module._buffers)
    attributes["_modules"] = {
        name: None if child is None else _copy(child, f"{prefix}{name}.", tensors, modules, seen)
        for name, child in module._modules.items()
    }
    vars(copy).update(attributes)
    return copy
