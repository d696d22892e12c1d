"""`Command`, `Response` and the other messages between controller and rank, as data that needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from raysharding.group.messages.packing import Packed
from raysharding.group.messages.remote_error import RemoteError

COMMAND_BYTES = 256 << 10
"""Longest argument inside a `Command`, of which every rank gets its own; Ray sends a stored one once to every node."""
RESULT_BYTES = 48 << 10
"""Longest result inside a `Response`, which passes through the controller; Ray holds a stored one on its node."""

NEXT_STEP = "_next"
"""A call in steps begins with its method, and goes on with this after the name as long as rank 0 has more."""
END_STEPS = "end_steps"
"""Command that ends a call in steps of which nobody wants the rest."""

OutputMode = Literal["value", "ref"]

Mode = Literal["train", "eval"] | None
"""Mode of the modules in a call; `None`: the call's own default."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command for one rank."""

    method: str
    """Name of a method of `RankCommands`."""
    number: int
    """Number of the command, the same on every rank; a later command has a greater number."""
    args: Packed | None
    """Packed `(args, kwargs)` of the rank; `None` if it is fetched."""
    shared: Packed | None = None
    """Packed tuple of the values that all ranks share, for which `Shared` marks stand in `args`; `None` if there are
    none, or if it is fetched."""
    is_fetched: bool = False
    """True if `args` or `shared` is too large for the command: `RankActor.fetch` brings it first."""
    output: OutputMode = "value"
    """`value`: the result as `Packed`; `ref`: as an object that `ray.get` turns into the result itself."""
    max_output_bytes: int | None = None
    """Cap on the packed result, `None` for results that are bounded otherwise."""
    resets: bool = False
    """True if every rank resets its module first, as those did that raised alone in the call before."""


@dataclass(frozen=True, slots=True)
class Response:
    """Result or error of a command on one rank."""

    change: StateChange
    """Change of the rank's weights and optimizer state."""
    error: RemoteError | None = None
    """The exception, `None` after success."""
    more: bool = False
    """True if the same call has more to give (`state_dict`, a bucket at a time)."""
    value: Packed | None = None
    """Its packed result, if that is small; `None` also for a result that is `None`."""
    is_stored: bool = False
    """True if the result is the second return of `RankActor.run`: it is large, holds references, or is to be one."""
    keeps_adapters: bool = False
    """True if the command loaded a whole model and kept the adapters that the rank has on it."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """Change of a rank's weights and optimizer state by a command.

    Ranks that held one model before it hold one after it where their changes are equal and whole.
    """

    whole: bool
    """True if no change was left half-way, by this command or an earlier one."""
    num_changes: int
    """Number of times that the command changed them."""
    num_collectives: int = field(default=0, compare=False)
    """Number of collectives that the rank began meanwhile: where ranks differ, the next ones would not match."""
    accumulates: bool = field(default=False, compare=False)
    """True if the rank holds gradients of `forward_backward` for the next update."""
    weights_version: int = field(default=0, compare=False)
    """Version of the rank's weights after the command."""


def in_step(changes: Iterable[StateChange]) -> bool:
    """Return True if ranks with these changes began as many collectives, so that their next ones match."""
    return len({change.num_collectives for change in changes}) == 1


def one_model(changes: Iterable[StateChange]) -> bool:
    """Return True if ranks with these changes hold one model, provided that they held one before."""
    kinds = set(changes)
    return len(kinds) == 1 and all(change.whole for change in kinds)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Python stacks of a rank's threads."""

    text: str
    """The work thread's first, formatted."""
    in_collective: bool
    """True if the work thread waits inside torch.distributed, so for another rank."""
    is_busy: bool = False
    """True if the device, asked for a late rank only, computes or waits for other ranks: the thread may wait for it."""
