"""`Initialiser`: initial values of parameters and buffers that the checkpoint lacks.

`Writes`: records the in-place writes of an initialisation rule that runs on a stand-in.

`missing_rules`: finds the tensors that no initialisation rule would set, before any byte moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models.adapters import apply_adapter_reset, holder_of_adapter, magnitude_layer
from raysharding.models.conversion import is_transformers_model
from raysharding.models.stand_in import class_name, stand_in
from raysharding.torch_internals import TorchDispatchMode

_SETTERS = "bernoulli_ cauchy_ copy_ exponential_ fill_ log_normal_ normal_ random_ uniform_ zero_"
"""Operations that discard the old values; `mul_` does not, nor does `copy_` of a tensor to itself."""


class Writes(TorchDispatchMode):
    """Record of in-place operations on tensors, some of which are on meta and have no values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._set: dict[int, torch.UntypedStorage] = {}
        self._unknown: set[int] = set()

    def cover(self, tensor: torch.Tensor) -> bool:
        """Return True if one operation set all of `tensor`, and no operation wrote a result of unknown values."""
        return _key(tensor) in self._set and not self.has_unknown(tensor)

    def has_unknown(self, tensor: torch.Tensor) -> bool:
        """Return True if an operation on `tensor` needed another tensor's values, which do not exist on meta.

        torch does not always raise in this case: `real.mul_(on_meta)` returns without any change.
        """
        return _key(tensor) in self._unknown

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and record its writes."""
        result = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        tensors: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for argument in func._schema.arguments:
            if isinstance(tensor := arguments.get(argument.name), torch.Tensor):
                tensors[argument.alias_info is not None and argument.alias_info.is_write].append(tensor)
        for tensor in tensors[True]:
            self._note(func.overloadpacket.__name__, tensor, tensors[False])
        return result

    def _note(self, operation: str, tensor: torch.Tensor, read: Sequence[torch.Tensor]) -> None:
        key = _key(tensor)
        others = [item for item in read if item.device != tensor.device or _key(item) != key]
        is_whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
        if any(item.is_meta for item in others):
            self._unknown.add(key)
        elif operation in _SETTERS.split() and len(others) == len(read) and is_whole:
            self._unknown.discard(key)
            # The reference keeps a later storage from reusing this address.
            self._set[key] = tensor.untyped_storage()


def _key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory; on meta all data pointers are 0."""
    return int(tensor.untyped_storage()._cdata)


INITIALISED = "_is_hf_initialized"
"""Attribute that makes transformers' initialisers skip a tensor."""

Rule = Callable[[nn.Module, str], None]
"""Initialises the real tensor in a stand-in tree, given its FQN."""


class Initialiser:
    """Computation of initial values by the rules of the modules that own the tensors.

    LoRA adapters use peft's rule. Other tensors in transformers models use `_init_weights` of the owning module and of
    the modules around it, as `from_pretrained` calls `_init_weights`. All other tensors use the owner's
    `reset_parameters`. The rule runs on a stand-in of the module with the requested tensor as its only real tensor, so
    a call takes that tensor's memory once (twice for a transformers bool or integer tensor). Every value has its own
    stand-in: a rule may change modules, and no value may depend on earlier requests.

    Args:
        module: The root, on meta or real, before or after `fully_shard`; not changed.
        seed: Seeds, together with the FQN, torch's CPU generator, whose state is restored afterwards. A value is the
            same on every rank and at any world size.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        self._seed = seed
        self._tree = stand_in(module, lambda _, tensor: placeholder_of(tensor, is_initialised=True))

    def value(self, fqn: str) -> torch.Tensor:
        """Compute one value.

        Args:
            fqn: Any name of the parameter or buffer.

        Returns:
            The full tensor on CPU, in its dtype.

        Raises:
            PlanError: There is no rule, or the rule raises or leaves part of the tensor unset.
        """
        for rule in rules_for(self._tree, fqn):
            value = self._value_by(fqn, rule)
            if value is not None:
                return value
        raise PlanError(
            f"{fqn}: the checkpoint has no value for it, and {class_name(owner_of(self._tree, fqn))} has no rule that "
            "sets it: put it into the checkpoint, or give the class a reset_parameters() that sets it"
        )

    def _value_by(self, fqn: str, rule: Rule) -> torch.Tensor | None:
        """Return the value that `rule` sets; `None` if the rule leaves an element unset."""
        target = lookup(self._tree, fqn)
        if target.is_floating_point() or target.is_complex():
            value = self._run(fqn, rule, fill=float("nan"))
            return None if value is None or bool(value.isnan().any()) else value
        # No value can mark an element as unset: elements that differ between two fills are unset.
        first, second = (self._run(fqn, rule, fill=fill) for fill in (0, 1))
        return first if first is not None and second is not None and torch.equal(first, second) else None

    def _run(self, fqn: str, rule: Rule, fill: float, beside: frozenset[int] = frozenset()) -> torch.Tensor | None:
        target = lookup(self._tree, fqn)
        real = torch.full(tuple(target.shape), fill, dtype=target.dtype)
        copy = self._copy_with(target, real, beside)
        why, cause = "", None
        try:
            with _seeded(self._seed, fqn), torch.no_grad(), Writes() as writes:
                drawn = torch.get_rng_state()
                rule(copy, fqn)
                drew = not torch.equal(drawn, torch.get_rng_state())
        except Exception as exc:  # noqa: BLE001 - a rule may be a user's code
            why, cause = f"raised {type(exc).__name__}: {exc}", exc
        else:
            if writes.has_unknown(real) or (beside and drew):
                why = "computes it from another tensor's values"
        if why and not beside and (beside := self._set_beside(fqn)):
            return self._run(fqn, rule, fill, beside)
        if why:
            raise PlanError(
                f"{fqn}: the checkpoint has no value for it, and the rule of {class_name(owner_of(self._tree, fqn))} "
                f"{why}: put it into the checkpoint, or give the class a reset_parameters() that sets it and reads no "
                "other tensor's values"
            ) from cause
        result = lookup(copy, fqn).detach()
        # A rule may replace the tensor by a new one.
        if result.device.type == "meta" or result.shape != real.shape:
            return None
        return result.to(device="cpu", dtype=target.dtype)

    def _set_beside(self, fqn: str) -> frozenset[int]:
        """Return the ids of buffers that the rule of a float buffer may set first, and then read.

        No checkpoint has them, so that they too are as their rule says; if it leaves one unset, NaNs show it. A rule
        that draws numbers is refused: each buffer would have others.
        """
        owner, target = owner_of(self._tree, fqn), lookup(self._tree, fqn)
        held = {name: buffer for name, buffer in owner._buffers.items() if name in owner._non_persistent_buffers_set}
        if not target.is_floating_point() or not any(buffer is target for buffer in held.values()):
            return frozenset()
        return frozenset(id(one) for one in held.values() if one is not None and one.is_floating_point()) - {id(target)}

    def _copy_with(self, target: torch.Tensor, real: torch.Tensor, beside: frozenset[int]) -> nn.Module:
        """Return the stand-in with `real` in place of `target`, and NaNs in place of the tensors `beside` it."""

        def placeholder(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in beside:
                return torch.full(tuple(tensor.shape), float("nan"), dtype=tensor.dtype)
            if tensor is not target:
                return tensor
            return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real

        return stand_in(self._tree, placeholder)


def placeholder_of(tensor: torch.Tensor, *, is_initialised: bool) -> torch.Tensor:
    """Return a meta tensor of the same shape; transformers' initialisers skip the tensor if `is_initialised`."""
    empty = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    if is_initialised:
        setattr(empty, INITIALISED, True)
    return empty


def owner_of(module: nn.Module, fqn: str) -> nn.Module:
    """Return the module that holds `fqn` directly."""
    return module.get_submodule(fqn.rpartition(".")[0])


def _path(module: nn.Module, fqn: str) -> list[nn.Module]:
    """Return the modules from the root to the owner of `fqn`."""
    names = fqn.split(".")[:-1]
    return [module.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]


def lookup(module: nn.Module, fqn: str) -> torch.Tensor:
    """Return the parameter or buffer that `fqn` names."""
    owner, name = owner_of(module, fqn), fqn.rpartition(".")[2]
    parameter = owner._parameters.get(name)
    tensor = owner._buffers.get(name) if parameter is None else parameter
    assert tensor is not None, f"{fqn} is neither parameter nor buffer"
    return tensor


@contextmanager
def _seeded(seed: int, fqn: str) -> Iterator[None]:
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest()
    # The CPU generator only: `torch.manual_seed` would reseed the GPUs of a model that is training.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        yield


def rules_for(root: nn.Module, fqn: str) -> tuple[Rule, ...]:
    """Return the rules that may set a tensor, in the order to try them."""
    if holder_of_adapter(root, fqn) is not None:
        return apply_adapter_reset, apply_reset
    if any(map(is_transformers_model, _path(root, fqn))):
        return apply_init_weights, apply_reset
    return (apply_reset,)


def apply_init_weights(root: nn.Module, fqn: str) -> None:
    """Initialise as `PreTrainedModel.initialize_weights`: children first, each by the closest model's `_init_weights`.

    Only the modules on the path to the tensor are visited: all tensors of other modules are marked as initialised.
    """
    from transformers.initialization import guard_torch_init_functions

    path: list[Any] = _path(root, fqn)
    with guard_torch_init_functions():
        for depth in reversed(range(len(path))):
            model = next((part for part in reversed(path[: depth + 1]) if is_transformers_model(part)), None)
            if model is not None:
                model._init_weights(path[depth])


def apply_reset(root: nn.Module, fqn: str) -> None:
    """Call the owner's `reset_parameters`, as torch's modules do; MultiheadAttention's has a leading underscore."""
    owner: Any = owner_of(root, fqn)
    for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"):
        if callable(getattr(owner, name, None)):
            getattr(owner, name)()
            return


def missing_rules(module: nn.Module, names: Sequence[str], seed: int) -> tuple[str, ...]:
    """Find the tensors for which `Initialiser.value` would raise. No collective.

    The rules run on a stand-in that is entirely on meta, and their writes are recorded: if one operation sets a whole
    tensor, its rule is proven without values. Only unproven tensors are computed, and then freed.

    Args:
        module: As for `Initialiser`; not changed.
        names: Canonical FQNs, such as `KeyMap.initialise`.
        seed: As for `Initialiser`.

    Returns:
        One line for each tensor that cannot be initialised, in the order of `names`. Cost: a walk over the modules that
        own `names`, and the memory of the largest tensor that a dry run does not prove.
    """
    names = [name for name in names if magnitude_layer(module, name) is None]  # computed from what was loaded
    proven = _proven(module, names)
    initialiser = Initialiser(module, seed)
    problems = []
    for name in names:
        try:
            if name not in proven:
                initialiser.value(name)
        except PlanError as error:
            problems.append(str(error))
    return tuple(problems)


def _proven(module: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the names whose whole tensors are set by their owners' rules, which a module's tensors share."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    wanted = {id(lookup(module, name)) for name in names}
    copy = stand_in(module, lambda _, tensor: placeholder_of(tensor, is_initialised=id(tensor) not in wanted))
    proven: set[str] = set()
    for held in owners.values():
        # A rule may need values, which this dry run lacks; the run on a real tensor decides.
        with suppress(Exception):
            for rule in rules_for(copy, held[0]):
                before = {name: lookup(copy, name) for name in held}
                with torch.random.fork_rng(devices=[]), torch.no_grad(), Writes() as writes:
                    rule(copy, held[0])
                for name, tensor in before.items():
                    if writes.cover(tensor) or _replaced(tensor, lookup(copy, name)):
                        proven.add(name)
    return proven


def _replaced(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if a rule replaced the old tensor by a real tensor without NaNs."""
    return after.device.type != "meta" and after.shape == before.shape and not bool(after.isnan().any())
