"""`initial_value`: what a parameter or buffer holds when the checkpoint does not say."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models.conversion import CONVERSION_ERRORS, class_name, is_transformers_model
from raysharding.models.stand_in import stand_in
from raysharding.models.writes import Writes

INITIALISED = "_is_hf_initialized"
"""transformers' initialisers leave a tensor alone that carries this attribute."""


def initial_value(module: nn.Module, fqn: str, seed: int) -> torch.Tensor:
    """Compute one initial value by the rule of the module that owns it.

    transformers models: `_init_weights` of the owning module and of those around it, as `from_pretrained` calls it.
    Others: the owner's `reset_parameters`. The rule runs on a stand-in of the module whose only real tensor is the
    one asked for, so that the memory is that tensor's, once (twice for a transformers bool or integer tensor).

    Args:
        module: The root, on meta or real, before or after `fully_shard`; not changed.
        fqn: Parameter or buffer, by any of its names.
        seed: With the FQN it seeds torch's CPU generator, whose state is restored afterwards: the same value on every
            rank and at any world size.

    Returns:
        The full tensor on CPU, in its dtype.

    Raises:
        PlanError: No rule, or one that raises or leaves part of the tensor unset.
    """
    if is_transformers_model(module) or inside_transformers(module, fqn):
        value = _settled(module, fqn, seed, apply_init_weights)
        if value is not None:
            return value
    value = _settled(module, fqn, seed, apply_reset)
    if value is not None:
        return value
    raise PlanError(
        f"{fqn}: the checkpoint has no value for it, and {class_name(owner_of(module, fqn))} has no rule that sets it: "
        "put it into the checkpoint, or give the class a reset_parameters() that sets it"
    )


Rule = Callable[[nn.Module, str], None]
"""Initialise what is real in a stand-in tree, given the FQN."""


def owner_of(module: nn.Module, fqn: str) -> nn.Module:
    """Module that holds `fqn` directly."""
    return module.get_submodule(fqn.rpartition(".")[0])


def _path(module: nn.Module, fqn: str) -> list[nn.Module]:
    """Modules from the root to the owner of `fqn`."""
    names = fqn.split(".")[:-1]
    return [module.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]


def inside_transformers(module: nn.Module, fqn: str) -> bool:
    """Whether a transformers model contains the owner of `fqn`, or is it."""
    return any(is_transformers_model(part) for part in _path(module, fqn))


def _settled(module: nn.Module, fqn: str, seed: int, rule: Rule) -> torch.Tensor | None:
    """The value that `rule` gives, or `None` if an element is left as it was before."""
    target = lookup(owner_of(module, fqn), fqn)
    if target.is_floating_point() or target.is_complex():
        value = _run(module, fqn, seed, rule, fill=float("nan"))
        return None if value is None or bool(value.isnan().any()) else value
    # No value is free to mean "not set": what differs between two fills was not set.
    first, second = (_run(module, fqn, seed, rule, fill=fill) for fill in (0, 1))
    return first if first is not None and second is not None and torch.equal(first, second) else None


def lookup(owner: nn.Module, fqn: str) -> torch.Tensor:
    """Parameter or buffer of `owner` by the last part of its FQN."""
    name = fqn.rpartition(".")[2]
    parameter = owner._parameters.get(name)
    tensor = owner._buffers.get(name) if parameter is None else parameter
    assert tensor is not None, f"{fqn} is neither parameter nor buffer"
    return tensor


def _run(module: nn.Module, fqn: str, seed: int, rule: Rule, fill: float) -> torch.Tensor | None:
    target = lookup(owner_of(module, fqn), fqn)
    real = torch.full(tuple(target.shape), fill, dtype=target.dtype)

    def placeholder(name: str, tensor: torch.Tensor) -> torch.Tensor:
        empty = real if tensor is target else torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if tensor is not target:
            setattr(empty, INITIALISED, True)
        return empty

    copy = stand_in(module, placeholder)
    try:
        with _seeded(seed, fqn), torch.no_grad(), Writes() as writes:
            rule(copy, fqn)
    except CONVERSION_ERRORS as exc:
        raise _unusable_rule(module, fqn, f"raised {type(exc).__name__}: {exc}") from exc
    if writes.spoiled(real):
        raise _unusable_rule(module, fqn, "computes it from another tensor's values")
    result = lookup(owner_of(copy, fqn), fqn).detach()
    # A rule may put a new tensor in the place of the old one.
    if result.device.type == "meta" or result.shape != real.shape:
        return None
    return result.to(device="cpu", dtype=target.dtype)


def _unusable_rule(module: nn.Module, fqn: str, what: str) -> PlanError:
    return PlanError(
        f"{fqn}: the checkpoint has no value for it, and the rule of {class_name(owner_of(module, fqn))} {what}: put "
        "it into the checkpoint, or give the class a reset_parameters() that sets it and reads no other tensor's values"
    )


@contextlib.contextmanager
def _seeded(seed: int, fqn: str) -> Iterator[None]:
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest()
    # The CPU generator only: `torch.manual_seed` would reseed the GPUs of a model that is training.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        yield


def apply_init_weights(root: nn.Module, fqn: str) -> None:
    """As `PreTrainedModel.initialize_weights`: children before parents, each by the closest model's `_init_weights`.

    Only the modules on the way to the tensor are visited: the others hold nothing that is not marked as initialised.
    """
    from transformers.initialization import guard_torch_init_functions

    path: list[Any] = _path(root, fqn)
    with guard_torch_init_functions():
        for depth in reversed(range(len(path))):
            model = next((part for part in reversed(path[: depth + 1]) if is_transformers_model(part)), None)
            if model is not None:
                model._init_weights(path[depth])


def apply_reset(root: nn.Module, fqn: str) -> None:
    """`reset_parameters`, by which torch's modules initialise themselves; MultiheadAttention's has an underscore."""
    owner: Any = owner_of(root, fqn)
    for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"):
        if callable(getattr(owner, name, None)):
            getattr(owner, name)()
            return
