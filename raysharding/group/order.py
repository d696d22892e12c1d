"""What travels to a rank for one command: a frame over its line, and over Ray what is too large for a frame."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from raysharding.group.packing import Packed

ORDER_BYTES = 256 << 10
"""Longest argument in a frame: the driver sends it to every rank, while Ray sends a stored one once to every node."""
RESULT_BYTES = 48 << 10
"""Longest result that travels in the frame: the driver holds it until it is asked for, Ray a stored one on its node."""

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
    resets: bool = False
    """Whether every rank resets its module first, as those did that raised alone in the call before."""


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


_NUMBER = struct.Struct("!Q")


def store(packed: Packed) -> Packed | ray.ObjectRef:
    """Put a large argument into the object store once; a small one travels in the frame.

    Raises:
        ray.exceptions.RayError: The store is full.
    """
    return packed if packed.num_bytes <= ORDER_BYTES else ray.put(packed)


def seal(
    epoch: int, request: Request, own: Packed | ray.ObjectRef, shared: Packed | ray.ObjectRef | None
) -> tuple[bytes, list[ray.ObjectRef]]:
    """Return an order as bytes, and what is to be fetched before it can be read; see `Order`.

    Args:
        epoch: The driver's.
        request: What to run.
        own: As `store` returned it.
        shared: As `store` returned it; `None`: the ranks share nothing.
    """
    beside = [part for part in (own, shared) if isinstance(part, ray.ObjectRef)]
    # Plain tuples: to pickle a dataclass and back costs as much as all the rest of it.
    asked = request.method, request.output, request.max_output_bytes, request.resets
    return pickle.dumps((epoch, asked, _inside(own), _inside(shared)), pickle.HIGHEST_PROTOCOL), beside


def _inside(part: Packed | ray.ObjectRef | None) -> tuple[Any, ...] | None:
    return (part.stream, part.buffers) if isinstance(part, Packed) else None


def unseal(sealed: bytes, beside: Sequence[Packed]) -> Order:
    """Put together on the rank what `seal` took apart."""
    epoch, asked, own, shared = pickle.loads(sealed)
    rest = list(beside)
    first = rest.pop(0) if own is None else Packed(*own)
    second = None if shared is None else Packed(*shared)
    return Order(epoch, Request(*asked), first, rest.pop(0) if rest else second)


def numbered(number: int, data: bytes) -> bytes:
    """Return the frame of an order, or of the outcome of the one with this number."""
    return _NUMBER.pack(number) + data


def split(frame: bytes) -> tuple[int, bytes]:
    """Return what `numbered` was given."""
    return _NUMBER.unpack_from(frame)[0], frame[_NUMBER.size :]
