"""`missing_rules`: which tensors no initialisation rule would set, found before any byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from raysharding.errors import PlanError
from raysharding.models.conversion import CONVERSION_ERRORS
from raysharding.models.initial import Initialiser, lookup, owner_of, placeholder_of, rules_for
from raysharding.models.stand_in import stand_in
from raysharding.models.writes import Writes


def missing_rules(module: nn.Module, names: Sequence[str], seed: int) -> tuple[str, ...]:
    """Find the tensors for which `Initialiser.value` would raise; each rank alone, no collective.

    The rules run on a stand-in that is on meta as a whole, and what they write is watched: a tensor that one operation
    sets from end to end needs no values to be proven. Only the others are computed, and dropped again.

    Args:
        module: As for `Initialiser`; not changed.
        names: Canonical FQNs, such as `KeyMap.initialise`.
        seed: As for `Initialiser`.

    Returns:
        One line for each tensor that cannot be initialised, in the order of `names`. Cost: a walk over the modules that
        own `names`, and the memory of the largest tensor that a dry run does not prove.
    """
    proven = _proven(module, names)
    unproven = [name for name in names if name not in proven]
    if not unproven:
        return ()
    initialiser = Initialiser(module, seed)
    problems = []
    for name in unproven:
        try:
            initialiser.value(name)
        except PlanError as error:
            problems.append(str(error))
    return tuple(problems)


def _proven(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Those names whose tensors the rules of their owners set as a whole."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    if not owners:
        return set()
    wanted = {id(lookup(owner_of(module, name), name)) for held in owners.values() for name in held}

    copy = stand_in(module, lambda _, tensor: placeholder_of(tensor, is_settled=id(tensor) not in wanted))
    return {name for held in owners.values() for name in _proven_of_owner(copy, held)}


def _proven_of_owner(root: nn.Module, names: Sequence[str]) -> set[str]:
    """As `_proven`, for tensors of one module of the stand-in, whose rules are the same."""
    owner = owner_of(root, names[0])
    proven: set[str] = set()
    for rule in rules_for(root, names[0]):
        before = {name: lookup(owner, name) for name in names}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), Writes() as writes:
            try:
                rule(root, names[0])
            except CONVERSION_ERRORS:
                # The rule may want values, which this dry run has not: the real one decides.
                return proven
        proven |= {name for name in names if writes.cover(before[name]) or _replaced(before[name], lookup(owner, name))}
    return proven


def _replaced(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a rule put a real tensor with values into the place of the old one."""
    return after.device.type != "meta" and after.shape == before.shape and not bool(after.isnan().any())
