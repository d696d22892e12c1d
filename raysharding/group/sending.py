"""From a call's arguments to packed parts: what ranks share is packed once, what is a rank's own goes to it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysharding.batch import RankBatch
from raysharding.group.commands import Shared
from raysharding.group.packing import Packed, pack


def pack_same(what: str, *args: Any) -> Packed:
    """Pack positional arguments that are the same on every rank.

    Raises:
        TypeError: One of them cannot be pickled.
    """
    return pack((args, {}), f"an argument of {what}").snapshot()


def pack_batches(what: str, batches: Sequence[RankBatch], *extra: Any) -> tuple[Packed | list[Packed], Packed | None]:
    """Pack a call whose arguments were dealt out.

    Args:
        what: The call, for errors.
        batches: By rank.
        extra: Arguments that follow the batch, the same on every rank.

    Returns:
        The ranks' own arguments (one pack where all ranks get the same), and what they share besides.

    Raises:
        TypeError: An argument cannot be pickled.
    """
    shared: list[Any] = []
    stripped = _strip(batches, shared)
    if all(_is_bare(batch) for batch in stripped):
        return pack_same(what, batches[0], *extra), None
    own = [pack(((batch, *extra), {}), f"an argument of {what}").snapshot() for batch in stripped]
    return own, pack(tuple(shared), f"an argument of {what}").snapshot() if shared else None


def _strip(batches: Sequence[RankBatch], shared: list[Any]) -> list[RankBatch]:
    """Replace top-level values that are one object on every rank by marks, and collect them."""
    args = [list(batch.wrapped_args) for batch in batches]
    kwargs = [dict(batch.wrapped_kwargs) for batch in batches]
    for index, value in enumerate(batches[0].wrapped_args):
        if all(batch.wrapped_args[index] is value for batch in batches):
            _mark(args, index, value, shared)
    for key, value in batches[0].wrapped_kwargs.items():
        if all(batch.wrapped_kwargs[key] is value for batch in batches):
            _mark(kwargs, key, value, shared)
    return [
        replace(batch, wrapped_args=tuple(own_args), wrapped_kwargs=own_kwargs)
        for batch, own_args, own_kwargs in zip(batches, args, kwargs, strict=True)
    ]


def _mark(containers: Sequence[Any], key: Any, value: Any, shared: list[Any]) -> None:
    for container in containers:
        container[key] = Shared(len(shared))
    shared.append(value)


def _is_bare(batch: RankBatch) -> bool:
    """Whether nothing in a stripped batch is this rank's own."""
    values = (*batch.wrapped_args, *batch.wrapped_kwargs.values())
    return batch.num_rows is None and all(isinstance(value, Shared) for value in values)
