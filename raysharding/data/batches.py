"""The batches of an epoch on one rank."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raysharding.batch import split_rows
from raysharding.data.order import Order, Piece, lanes_of
from raysharding.data.source import BlockSource, Reader, Rows, Stream


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one rank in one step."""

    step: int
    """Number of the step, from 0 in every epoch."""
    rows: list[Any]
    """Rows of the rank, in batch order; a row of another rank if it has none."""
    counts: tuple[int, ...]
    """Number of rows of each rank."""


def epoch_batches(
    source: Rows,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    first_step: int = 0,
) -> Iterator[StepBatch | None]:
    """Yield the rows of a rank for each step; the same number of steps on every rank. Not collective.

    For each skipped step of a `Stream`, which may take long, a `None` is yielded first.

    Args:
        source: The rows.
        batch_size: Rows of a step, over all ranks.
        rank: This rank.
        world_size: Number of ranks.
        shuffle: See `Order`; not for a `Stream`.
        seed: See `Order`.
        epoch: See `Order`.
        first_step: Number of steps to skip.

    Raises:
        ValueError: `shuffle` for a stream.
    """
    if isinstance(source, Stream):
        if shuffle:
            raise ValueError("shuffle=True needs rows with numbers, and an iterable has none: shuffle it yourself")
        yield from _stream(source, batch_size, rank, world_size, first_step)
        return
    order = Order(source.block_rows, batch_size, shuffle=shuffle, seed=seed, epoch=epoch)
    own = _shuffled if shuffle else _in_order
    for step, rows in enumerate(own(source, order, rank, world_size, first_step), first_step):
        yield StepBatch(step, rows or _first_row(source), order.rows_by_rank(step, world_size))


def _stream(source: Stream, batch_size: int, rank: int, world_size: int, first_step: int) -> Iterator[StepBatch | None]:
    rows = iter(source)
    for _ in range(first_step):
        for _ in islice(rows, batch_size):
            pass
        yield None
    step = first_step
    while batch := list(islice(rows, batch_size)):
        counts = split_rows(len(batch), world_size)
        start = sum(counts[:rank])
        yield StepBatch(step, batch[start : start + counts[rank]] or batch[:1], counts)
        step += 1


class _Cursor:
    """Reads pieces of blocks, and keeps the reader of a block open between pieces."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._reader: Reader | None = None
        self._block, self._next = -1, 0

    def take(self, piece: Piece) -> Sequence[Any]:
        if self._reader is None or piece.block != self._block or piece.start < self._next:
            self.close()
            self._reader, self._block, self._next = self._source.read(piece.block), piece.block, 0
        if piece.start > self._next:
            self._reader.skip(piece.start - self._next)
        self._next = piece.stop
        return self._reader.take(piece.stop - piece.start)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _in_order(source: BlockSource, order: Order, rank: int, world_size: int, first_step: int) -> Iterator[list[Any]]:
    cursor = _Cursor(source)
    try:
        for step in range(first_step, order.num_steps):
            counts = order.rows_by_rank(step, world_size)
            begin = step * order.batch_size + sum(counts[:rank])
            yield [row for piece in order.pieces(begin, begin + counts[rank]) for row in cursor.take(piece)]
    finally:
        cursor.close()


def _shuffled(source: BlockSource, order: Order, rank: int, world_size: int, first_step: int) -> Iterator[list[Any]]:
    lanes = [_lane(source, order, lane, first_step) for lane in lanes_of(rank, world_size, order.batch_size)]
    try:
        for _ in range(first_step, order.num_steps):
            yield [row for lane in lanes for row in islice(lane, 1)]
    finally:
        for lane in lanes:
            lane.close()


def _lane(source: BlockSource, order: Order, lane: int, first: int) -> Generator[Any, None, None]:
    cursor = _Cursor(source)
    try:
        for window, places in order.lane_windows(lane, first):
            rows = cursor.take(window)
            yield from (rows[place] for place in places)
    finally:
        cursor.close()


def _first_row(source: BlockSource) -> list[Any]:
    """Return the row for ranks without rows, which does not count."""
    block = next(block for block, rows in enumerate(source.block_rows) if rows)
    reader = source.read(block)
    try:
        return list(reader.take(1))
    finally:
        reader.close()
