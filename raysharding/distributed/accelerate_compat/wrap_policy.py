"""accelerate's and FSDP1's wrap policies as predicates over modules.

Note: supported policies.
    With FSDP2, accelerate supports two policies, which it compares by identity: torch's `transformer_auto_wrap_policy`
    and `size_based_auto_wrap_policy`. For those the predicates here equal accelerate's. accelerate ignores any other
    callable without a warning, and the model becomes one FSDP group. Here such a callable is applied to the model once,
    as FSDP1 does, and the predicate is True for the modules that it selected.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from raysharding.config import Sharding
from raysharding.distributed.fully_shard import named_submodules
from raysharding.errors import PlanError
from raysharding.models import ignored_modules
from raysharding.torch_internals import recursive_wrap

Predicate = Callable[[nn.Module], bool]


def min_num_params(plugin: Any) -> int:
    """Return the size of a size-based policy: the plugin's, else that of the policy's partial, else FSDP1's."""
    given: int = getattr(plugin.auto_wrap_policy, "keywords", {}).get("min_num_params", 100_000_000)
    return given if plugin.min_num_params is None else int(plugin.min_num_params)


def _is_of_classes(classes: tuple[type[nn.Module], ...], module: nn.Module) -> bool:
    """Return True if a module, or the module in a checkpoint wrapper, is an instance of one of some classes."""
    return isinstance(getattr(module, "_checkpoint_wrapped_module", module), classes)


def _is_larger_than(num_params: int, module: nn.Module) -> bool:
    """Return True if a module has more parameters than a number, including those of its submodules."""
    return sum(parameter.numel() for parameter in module.parameters()) > num_params


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Predicate | None:
    """A plugin's wrap policy as a predicate over the modules of a model. Not collective.

    As accelerate's function of this name, with the same result for accelerate's two policies: instances of the named
    classes (`transformer_based_wrap`; without names, the model's `_no_split_modules`), or modules with more than
    `min_num_params` parameters (`size_based_wrap`). accelerate has no others for FSDP2. This function also applies
    FSDP1's callables `policy(module, recurse, nonwrapped_numel)` (partials of them, `lambda_auto_wrap_policy`),
    `ModuleWrapPolicy`, `CustomPolicy`, and predicates `policy(module)`, each as FSDP1 calls it.

    Args:
        fsdp2_plugin: accelerate's plugin or this library's; `auto_wrap_policy`, `transformer_cls_names_to_wrap`,
            `min_num_params` and `ignored_modules` are read.
        model: The root, before it is sharded, on meta or real.

    Returns:
        The predicate, or `None` if the plugin has no policy. It can be pickled unless the policy selected modules.

    Raises:
        PlanError: (a ValueError) A class that was asked for is in no module of the model.
    """
    policy = fsdp2_plugin.auto_wrap_policy
    if policy is None:
        return None
    base, keywords = getattr(policy, "func", policy), getattr(policy, "keywords", {})
    if base is transformer_auto_wrap_policy:
        names = fsdp2_plugin.transformer_cls_names_to_wrap
        if names is None and "transformer_layer_cls" in keywords:
            return functools.partial(_is_of_classes, tuple(keywords["transformer_layer_cls"]))
        wanted = (getattr(model, "_no_split_modules", None) or ()) if names is None else names
        return functools.partial(_is_of_classes, classes_named(model, wanted, strict=names is not None))
    if base is size_based_auto_wrap_policy:
        return functools.partial(_is_larger_than, min_num_params(fsdp2_plugin))
    ignored = fsdp2_plugin.ignored_modules
    chosen = Sharding(ignored_modules=ignored if isinstance(ignored, str) else tuple(ignored or ()))
    return frozenset(_picked(policy, model, ignored_modules(model, chosen))).__contains__


def classes_named(model: nn.Module, names: Iterable[str], *, strict: bool = True) -> tuple[type[nn.Module], ...]:
    """Return the classes of a model's modules with certain names; several if classes share a name.

    Args:
        model: The root; its own class counts.
        names: Class names.
        strict: True to raise for a name that no module has. False for `_no_split_modules`, which may name parts that
            this model lacks.

    Raises:
        PlanError: A name that no module's class has.
    """
    classes: dict[str, dict[type[nn.Module], None]] = {}
    for _, module in named_submodules(model):
        classes.setdefault(type(module).__name__, {})[type(module)] = None
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in classes]
    if unknown and strict:
        raise PlanError(
            f"transformer_cls_names_to_wrap names {', '.join(map(repr, unknown))}, but no module of "
            f"{type(model).__name__} has that class; its modules' classes are {', '.join(sorted(classes))}"
        )
    return tuple(kind for name in wanted for kind in classes.get(name, ()))


# --- other policies -------------------------------------------------------------------------------------------------


def _picked(policy: Any, model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    """Return the modules that a policy object or callable selects."""
    if isinstance(policy, _Policy):
        targets = policy._run_policy(model, ignored, {})
        if any(targets.values()):
            warnings.warn(
                f"{type(policy).__name__} gives modules options of their own; here all groups have the same options",
                UserWarning,
                stacklevel=2,
            )
        return set(targets)
    picked: set[nn.Module] = set()
    if _is_fsdp1_callable(policy):

        def mark(module: nn.Module, **_: Any) -> nn.Module:
            picked.add(module)
            return module

        # FSDP1's own walk, in which each module that it would wrap is wrapped in itself.
        recursive_wrap(model, policy, mark, ignored, {one for other in ignored for one in other.parameters()})
    else:
        picked.update(module for _, module in named_submodules(model) if module not in ignored and policy(module))
    return picked


def _is_fsdp1_callable(policy: Callable[..., Any]) -> bool:
    """Return True if a callable takes FSDP1's arguments of a policy; any other is a predicate over modules."""
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):  # no signature to look at: something built in
        return False
    return True
