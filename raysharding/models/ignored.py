"""`ignored_modules`: which modules FSDP leaves alone, found in the tree from what the user named."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from raysharding.config import Sharding
from raysharding.errors import PlanError


def ignored_modules(root: nn.Module, sharding: Sharding) -> set[nn.Module]:
    """Find the modules that `Sharding.ignored_modules` means, with all that is inside them; each rank alone.

    Args:
        root: The root module.
        sharding: Its `ignored_modules` is read.

    Raises:
        PlanError: A pattern that matches no name, a module that is not in the tree, or the root itself.
    """
    wanted = sharding.ignored_modules
    if isinstance(wanted, str | nn.Module):
        wanted = (wanted,)
    modules = dict(root.named_modules())
    if isinstance(wanted, Sequence):
        chosen = [module for item in wanted for module in _named(root, modules, item)]
    else:
        chosen = [module for name, module in modules.items() if name and wanted(module)]
    if any(module is root for module in chosen):
        raise PlanError("ignored_modules: the root is among them, so nothing would be left to shard; name parts of it")
    return {inner for module in chosen for inner in module.modules()}


def _named(root: nn.Module, modules: dict[str, nn.Module], item: str | nn.Module) -> list[nn.Module]:
    if isinstance(item, nn.Module):
        if not any(module is item for module in modules.values()):
            raise PlanError(
                f"ignored_modules: the {type(item).__name__} given is no part of this {type(root).__name__}; a module "
                "that travelled to another process is a copy: name it by a regular expression"
            )
        return [item]
    found = [module for name, module in modules.items() if name and re.fullmatch(item, name)]
    if not found:
        names = ", ".join(name for name in list(modules)[1:6])
        raise PlanError(f"ignored_modules: {item!r} matches no module's whole name; names are such as {names}")
    return found


def ignored_parameters(root: nn.Module, sharding: Sharding) -> set[nn.Parameter]:
    """The parameters of `ignored_modules`, those shared with other modules included; each rank alone."""
    modules = ignored_modules(root, sharding)
    return {parameter for module in modules for parameter in module._parameters.values() if parameter is not None}
