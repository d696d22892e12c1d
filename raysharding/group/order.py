"""What travels to a rank for one command: one pickle inside Ray's own message, and beside it what is too large.

Ray serializes every argument and every result of a call by itself, which takes longer than all else that an empty call
does; bytes it takes as they are. So a rank is sent bytes, and sends bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from raysharding.group.packing import Packed

INLINE_BYTES = 48 << 10
"""Longest value that travels inside Ray's message. Two of them, with what is around them, stay below the 100 KiB of
which Ray would make an object of its own, rank by rank, while some ranks are at work already."""

OutputMode = Literal["value", "ref"]


@dataclass(frozen=True, slots=True)
class Request:
    """What to run, and what to do with the result."""

    method: str
    """Name of a method of `RankCommands`."""
    output: OutputMode
    """`value`: the result as `Packed`; `ref`: as an object that `ray.get` turns into the result itself."""
    max_output_bytes: int | None
    """Cap on the packed result, `None` for results that are bounded otherwise."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command as a rank gets it."""

    epoch: int
    """The driver's; a rank refuses the commands of a driver that another has followed."""
    request: Request
    """What to run."""
    own: Packed
    """Packed `(args, kwargs)` of this rank."""
    shared: Packed | None
    """Packed tuple of values that all ranks share, which stand in `own` as `commands.Shared` marks."""


def store(packed: Packed) -> Packed | ray.ObjectRef:
    """Put a large value into the object store once; a small one travels inside the order.

    Raises:
        ray.exceptions.RayError: The store is full.
    """
    return packed if packed.num_bytes <= INLINE_BYTES else ray.put(packed)


def seal(
    epoch: int, request: Request, own: Packed | ray.ObjectRef, shared: Packed | ray.ObjectRef | None
) -> tuple[Any, ...]:
    """Return the arguments of `RankActor.run`; see `Order`.

    Args:
        epoch: The driver's.
        request: What to run.
        own: As `store` returned it.
        shared: As `store` returned it; `None`: the ranks share nothing.
    """
    inside = [None if isinstance(part, ray.ObjectRef) else part for part in (own, shared)]
    beside = [part for part in (own, shared) if isinstance(part, ray.ObjectRef)]
    return pickle.dumps((epoch, request, *inside), pickle.HIGHEST_PROTOCOL), *beside


def unseal(sealed: bytes, beside: Sequence[Packed]) -> Order:
    """Put together on the rank what `seal` took apart."""
    epoch, request, own, shared = pickle.loads(sealed)
    rest = list(beside)
    own = rest.pop(0) if own is None else own
    return Order(epoch, request, own, rest.pop(0) if rest else shared)
