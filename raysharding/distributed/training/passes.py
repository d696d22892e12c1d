"""The forwards that all ranks take for a batch: more than one for a part where `collate_fn` gave ranks other arguments.

Note [Passes]: rows of text beside rows with images.
    A rank whose rows have no image has no `pixel_values`: it would not run the vision tower, and the others would wait
    in the tower's all-gather. So the ranks compare which arguments they have. Where these differ, the part takes a
    forward for each kind, one after the other. In each, the ranks of that kind run their rows, and every other rank
    runs a copy of one rank's arguments as a dummy, which counts nowhere and has a gradient of 0.
    Where only a vision tower or its projector is trained, the loss of a pass over text has no graph. It is read as if
    the logits had one (`Recorder.gave_gradient`), and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import (
    agree,
    all_gather_ints,
    all_gather_json,
    broadcast_json,
    broadcast_tensor,
    get_rank,
)
from raysharding.distributed.fully_shard import unwrapped
from raysharding.distributed.optim import decode, encode
from raysharding.errors import DataError
from raysharding.models import InputBounds
from raysharding.tree import leaves

Passes = list[list[RankBatch]]
"""For each part of a batch, the forwards that every rank takes, in order."""


def passes_of_call(module: nn.Module, batch: RankBatch, num_parts: int, what: str, loss: object = None) -> Passes:
    """Cut a rank's rows into parts, and collate its examples; collective if the call has examples.

    Args:
        module: The root module.
        batch: This rank's part of a call.
        num_parts: Number of parts.
        what: Name of the call, for errors.
        loss: The caller's loss function; `None` for the model's own.

    Raises:
        Exception: On every rank: the error of `collate_fn` on one rank.
        ValueError: On every rank: an id is out of range, or as from `agreed_passes`.
    """
    if batch.examples is None:
        return [[part] for part in batch.parts(num_parts)]

    def make() -> list[RankBatch]:
        bounds = InputBounds.of(unwrapped(module)).for_loss(loss)
        parts = [part.collated() for part in batch.parts(num_parts)]
        for part in parts:
            bounds.check(part, get_rank(), what)
        return parts

    return agreed_passes(make)


def agreed_passes(make: Callable[[], list[RankBatch]]) -> Passes:
    """Make this rank's parts of a batch, and return the passes over them; collective.

    Args:
        make: Returns the parts, with the model's arguments; as many on every rank. Not collective.

    Raises:
        Exception: On every rank: the error of `make` on one rank; as from `agree`.
        ValueError: On every rank, as from `passes_over`.
    """
    parts: list[RankBatch] | None = None
    error: Exception | None = None
    try:
        parts = make()
    except Exception as raised:  # noqa: BLE001 - `are_alike` raises it on all ranks
        error = raised
    alike = are_alike(parts, error)
    assert parts is not None, "this rank would have raised its error"
    return passes_over(parts, alike)


def are_alike(parts: Sequence[RankBatch] | None, error: Exception | None) -> bool | None:
    """Return True if all ranks have parts of the same arguments, False if these differ, `None` if none has parts.

    Collective.

    Args:
        parts: This rank's parts of a batch; `None` at the end of the data, or after an error.
        error: This rank's error, or `None`.

    Raises:
        Exception: On every rank: the error of one rank, as from `agree`.
        DataError: On every rank: some ranks have parts, and others have not.
    """
    # Every rank calls this, with an error or without parts too: the others would wait in the forward.
    outcomes = all_gather_ints([parts is not None, error is not None, code_of(parts or ())])
    have, failed, _ = map(sum, zip(*outcomes, strict=True))
    if failed:
        agree(error)
    if have not in (0, len(outcomes)):
        raise DataError(
            f"the data ended on {len(outcomes) - have} ranks while others have rows: an iterable must give the same "
            "rows, in the same order, on every rank"
        )
    return len({code for *_, code in outcomes}) == 1 if have else None


def own_pass(passes: Sequence[RankBatch]) -> RankBatch:
    """Return the pass with this rank's rows; the first if it has none."""
    return next((one for one in passes if not one.is_dummy), passes[0])


def code_of(parts: Sequence[RankBatch]) -> int:
    """Return a number that is the same on ranks whose parts have the same arguments."""
    return int.from_bytes(sha256("\n".join(map(_kind_of, parts)).encode()).digest()[:7], "little")


def _kind_of(batch: RankBatch) -> str:
    """Return the names of the arguments that are not `None`; those without elements are marked."""
    named = {**{f"[{index}]": value for index, value in enumerate(batch.args)}, **batch.kwargs}
    sizes = {name: max(map(_size, leaves(value)), default=0) for name, value in named.items() if value is not None}
    return ", ".join(sorted(name if size else f"empty {name}" for name, size in sizes.items()))


def _size(named: tuple[str, Any]) -> int:
    return named[1].numel() if isinstance(named[1], torch.Tensor) else named[1] is not None


def passes_over(parts: Sequence[RankBatch], alike: bool | None) -> Passes:
    """Return the passes over parts; collective if their arguments differ over the ranks. See Note [Passes].

    Wire: where a rank lacks arguments, all arguments of one rank, to every rank.

    Args:
        parts: This rank's parts.
        alike: True if all ranks have the same arguments.

    Raises:
        ValueError: On every rank: the arguments hold something that ranks do not send.
    """
    if alike:
        return [[part] for part in parts]
    every: list[list[str]] = all_gather_json([_kind_of(part) for part in parts])
    return [list(_of_part(part, [own[index] for own in every])) for index, part in enumerate(parts)]


def _of_part(part: RankBatch, kinds: Sequence[str]) -> Iterator[RankBatch]:
    for kind in dict.fromkeys(kind for kind, num_rows in zip(kinds, part.rows, strict=True) if num_rows):
        rows = tuple(num_rows if own == kind else 0 for own, num_rows in zip(kinds, part.rows, strict=True))
        # All ranks know all kinds: each takes part in the broadcast, or none does.
        copy = part if set(kinds) == {kind} else _copied(part, next(rank for rank, one in enumerate(rows) if one))
        own = part if kinds[get_rank()] == kind else copy
        yield replace(own, num_rows=rows[get_rank()], rows=rows)


def _copied(part: RankBatch, source: int) -> RankBatch:
    """Return the arguments of one rank on every rank, as JSON and tensors, never as pickles; collective."""
    tensors: list[torch.Tensor] = []
    outline: Any = None
    if get_rank() == source:
        try:
            args = encode([list(part.args), part.kwargs], "an argument", tensors)
            outline = [args, [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in map(_dense, tensors)]]
        except ValueError as error:  # sent to all ranks, which would wait in the broadcasts
            outline = (
                f"collate made other arguments of the rows of some ranks, and {error}; the other ranks get no dummy of "
                "it: let collate return the same arguments for any rows (for rows of text, a blank image)"
            )
    outline = broadcast_json(outline, source=source)
    if isinstance(outline, str):
        raise ValueError(outline)
    own = iter(tensors)
    copies = [broadcast_tensor(next(own, None), dtype, shape, source) for dtype, shape in outline[1]]
    args, kwargs = decode(outline[0], copies)
    return replace(part, wrapped_args=tuple(args), wrapped_kwargs=kwargs, dummy_rows=part.rows[source])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"one is a tensor of layout {tensor.layout}, or nested")
    return tensor
