"""Stand-ins: copies of a module tree that share config and attributes, but neither tensors nor classes from FSDP.

`fully_shard` replaces a module's class by a class named `FSDP...`. transformers looks classes up by name, and its
initialisers write to all tensors that they find. A stand-in supports both without a change to the live module.

`class_name`, `clean_name`: names as they were before modules were wrapped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which FSDP1, activation checkpointing and torch.compile hold the wrapped module."""

TensorMap = Callable[[str, torch.Tensor], torch.Tensor]
"""(FQN, tensor of the module) → tensor of the stand-in."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of `module` before `fully_shard` changed it."""
    cls = type(module)
    while FSDPModule in cls.__bases__:
        cls = next(base for base in cls.__bases__ if base is not FSDPModule)
    return cls


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class before FSDP changed the class."""
    return original_class(module).__name__


def clean_name(name: str) -> str:
    """Return the FQN that a parameter or module had before modules were wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def stand_in(module: nn.Module, tensors: TensorMap = lambda _, tensor: tensor) -> nn.Module:
    """Copy a module tree without copying its tensors.

    Args:
        module: Root of the tree; not changed.
        tensors: Returns the stand-in's tensor for every parameter and buffer, given the first FQN of each. Default: the
            module's own.

    Returns:
        Modules of the original classes, without hooks. Shared modules and tensors are also shared in the stand-in. A
        module is copied at its first access, so an initialiser that uses one of thousands of modules costs one copy.
    """
    return _Copier(tensors).copy(module, "")


_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
"""Attributes of every module that hold its hooks."""


class _Copier:
    """State of one `stand_in` call."""

    def __init__(self, tensors: TensorMap) -> None:
        self._tensors = tensors
        self._modules: dict[int, nn.Module] = {}
        self._seen: dict[int, torch.Tensor] = {}

    def copy(self, module: nn.Module, prefix: str) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        cls = original_class(module)
        copy = cls.__new__(cls)
        self._modules[id(module)] = copy
        attributes = dict(vars(module))
        # Hooks are not copied: FSDP's would gather, and PreTrainedModel's could change the live module.
        for name in _HOOKS:
            attributes[name] = OrderedDict()
        attributes["_parameters"] = self._replaced(module._parameters, prefix)
        attributes["_buffers"] = self._replaced(module._buffers, prefix)
        attributes["_modules"] = _Children(module._modules, lambda name, child: self.copy(child, f"{prefix}{name}."))
        vars(copy).update(attributes)
        return copy

    def _replaced(self, held: Mapping[str, torch.Tensor | None], prefix: str) -> dict[str, torch.Tensor | None]:
        result: dict[str, torch.Tensor | None] = {}
        for name, tensor in held.items():
            if tensor is not None and id(tensor) not in self._seen:
                self._seen[id(tensor)] = self._tensors(prefix + name, tensor)
            result[name] = None if tensor is None else self._seen[id(tensor)]
        return result


class _Children(dict[str, nn.Module | None]):
    """A stand-in's table of children, each copied at its first access."""

    def __init__(self, children: Mapping[str, nn.Module | None], copy: Callable[[str, nn.Module], nn.Module]) -> None:
        # Through `items()`: given a stand-in's own table, `dict` would take the entries that are not copied yet.
        self._pending = dict(children.items())
        super().__init__(self._pending)
        self._copy = copy

    def __getitem__(self, name: str) -> nn.Module | None:
        child = self._pending.pop(name, None)
        if child is not None:
            super().__setitem__(name, self._copy(name, child))
        return super().__getitem__(name)

    def __setitem__(self, name: str, child: nn.Module | None) -> None:
        self._pending.pop(name, None)
        super().__setitem__(name, child)

    def _complete(self) -> None:
        for name in list(self._pending):
            self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - `get` is what this is

    def pop(self, name: str, *default: Any) -> Any:
        self._complete()
        return super().pop(name, *default)

    def items(self) -> Any:
        self._complete()
        return super().items()

    def values(self) -> Any:
        self._complete()
        return super().values()
