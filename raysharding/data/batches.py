"""The batches of an epoch, or of `predict`, on one rank."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from raysharding.batch import incomplete_item, split_rows
from raysharding.data.arrow_rows import ArrowRows, key_table
from raysharding.data.order import Order, Piece
from raysharding.data.part_files import Part
from raysharding.data.source import BlockSource, Reader, Rows, Stream
from raysharding.errors import DataError


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one rank in one step."""

    step: int
    """Number of the step, from 0 in every epoch."""
    rows: list[Any]
    """Rows of the rank, in batch order; an item of another rank if it has none."""
    counts: tuple[int, ...]
    """Number of rows of each rank."""


def check_whole_items(num_rows: int, rows_per_item: int) -> None:
    """Raise DataError if data has an incomplete item at its end."""
    if problem := incomplete_item(num_rows, rows_per_item):
        raise DataError(f"data: {problem}")


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
    rows_per_item: int = 1,
) -> Iterator[StepBatch | None]:
    """Yield the rows of a rank for each step; the same number of steps on every rank. Not collective.

    For each skipped step of a `Stream`, which may take long, a `None` is yielded first.

    Args:
        source: The rows.
        batch_size: Rows of a step, over all ranks.
        rank: This rank.
        world_size: Number of ranks.
        shuffle: True for a random order; not for a `Stream`.
        seed: Seed of the order, 0 or more.
        epoch: Number of the epoch, from 0; each epoch has its own order.
        first_step: Number of steps to skip.
        rows_per_item: Number of consecutive rows that stay together.

    Raises:
        ValueError: `shuffle` for a stream.
        DataError: A stream ended in an incomplete item.
    """
    if isinstance(source, Stream):
        if shuffle:
            raise ValueError("shuffle=True needs rows with numbers, and an iterable has none: shuffle it yourself")
        yield from _stream(source, batch_size, rank, world_size, first_step, rows_per_item)
        return
    order = Order(source.block_rows, batch_size, shuffle=shuffle, seed=seed, epoch=epoch, rows_per_item=rows_per_item)
    own = _shuffled if shuffle else _in_order
    for step, rows in enumerate(own(source, order, rank, world_size, first_step), first_step):
        yield StepBatch(step, rows or _first_item(source, order), order.rows_by_rank(step, world_size))


def _stream(
    source: Stream, batch_size: int, rank: int, world_size: int, first_step: int, rows_per_item: int
) -> Iterator[StepBatch | None]:
    rows = iter(source)
    for _ in range(first_step):
        for _ in islice(rows, batch_size):
            pass
        yield None
    step = first_step
    while batch := list(islice(rows, batch_size)):
        check_whole_items(step * batch_size + len(batch), rows_per_item)
        counts = split_rows(len(batch), world_size, rows_per_item)
        start = sum(counts[:rank])
        yield StepBatch(step, batch[start : start + counts[rank]] or batch[:rows_per_item], counts)
        step += 1


class _Cursor:
    """Reads pieces of blocks, and keeps the reader of a block open between pieces."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._reader: Reader | None = None
        self._block, self._next = -1, 0

    def take(self, pieces: Iterable[Piece]) -> Sequence[Any]:
        """Return the rows of pieces; those of Arrow's are made on access."""
        parts = [self._take(piece) for piece in pieces]
        batches = [part.batches for part in parts if isinstance(part, ArrowRows)]
        return ArrowRows(list(chain(*batches))) if len(batches) == len(parts) else list(chain(*parts))

    def _take(self, piece: Piece) -> Sequence[Any]:
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
    with closing(_Cursor(source)) as cursor:
        for step in range(first_step, order.num_steps):
            counts = order.rows_by_rank(step, world_size)
            begin = step * order.batch_size + sum(counts[:rank])
            yield list(cursor.take(order.pieces(begin, begin + counts[rank])))


def _shuffled(source: BlockSource, order: Order, rank: int, world_size: int, first_step: int) -> Iterator[list[Any]]:
    lanes = [_lane(source, order, lane, first_step) for lane in order.lanes_of(rank, world_size)]
    try:
        for _ in range(first_step, order.num_steps):
            yield [row for lane in lanes for row in islice(lane, order.rows_per_item)]
    finally:
        for lane in lanes:
            lane.close()


def _lane(source: BlockSource, order: Order, lane: int, first: int) -> Generator[Any, None, None]:
    size = order.rows_per_item
    with closing(_Cursor(source)) as cursor:
        for window, places in order.lane_windows(lane, first):
            rows = cursor.take(order.pieces(window.start * size, window.stop * size))
            yield from (rows[place * size + row] for place in places for row in range(size))


def _first_item(source: BlockSource, order: Order) -> list[Any]:
    """Return the rows for ranks without rows, which do not count."""
    with closing(_Cursor(source)) as cursor:
        return list(cursor.take(order.pieces(0, order.rows_per_item)))


_WINDOW_BATCHES = 64
"""Batches among whose rows those of like length are brought together."""


@dataclass(frozen=True, slots=True)
class PartBatch:
    """Rows of one rank in one forward of `predict`."""

    part: Part | None
    """The part that the rows are of; `None` for a rank that has no rows left, which takes part with a dummy row."""
    rows: list[Any]
    """Rows of the rank; a row of another rank if it has none."""
    keys: Any
    """pyarrow table of the rows' keys; `None` if the rows are not Arrow's."""
    places: Sequence[int]
    """Place of each row in its window."""
    counts: tuple[int, ...]
    """Number of rows of each rank."""
    ends_window: bool
    """True if the rows of the window are complete, and can be put in order."""
    ends_part: bool
    """True if the rows of the part are complete."""
    ends_wave: bool
    """True if no rank has rows of its current part left."""


def part_batches(
    source: BlockSource,
    parts: Sequence[Part],
    num_rows: int,
    rank: int,
    world_size: int,
    *,
    by_length: bool,
    keys: Mapping[str, Any],
) -> Iterator[PartBatch]:
    """Yield the rows of a rank for each forward; the same number of forwards on every rank. Not collective.

    The parts are computed in waves of one part for each rank.

    Args:
        source: The rows.
        parts: The parts to compute, on all ranks.
        num_rows: Rows of a forward on a rank.
        rank: This rank.
        world_size: Number of ranks.
        by_length: True to bring rows of like length together, in windows of 64 batches, the longest first.
        keys: Columns that the batches have as `keys`, and their types, `None` for those of the values.

    Raises:
        DataError: Keys do not fit their types.
    """
    order = Order(source.block_rows, num_rows, shuffle=False, seed=0, epoch=0)
    dummy = _first_item(source, order)
    with closing(_Cursor(source)) as cursor:
        for first in range(0, len(parts), world_size):
            wave = parts[first : first + world_size]
            sizes = [part.num_rows for part in wave] + [0] * (world_size - len(wave))
            options = num_rows, by_length, keys
            chosen = _rows_of(cursor, order, wave[rank], *options) if sizes[rank] else iter(())
            num_steps = num_forwards(wave, num_rows, world_size)
            for step in range(num_steps):
                counts = tuple(min(num_rows, max(0, size - step * num_rows)) for size in sizes)
                ends_wave = step == num_steps - 1
                if counts[rank]:
                    rows, table, places, ends_window = next(chosen)
                    ends_part = (step + 1) * num_rows >= sizes[rank]
                    yield PartBatch(wave[rank], rows, table, places, counts, ends_window, ends_part, ends_wave)
                else:
                    yield PartBatch(None, dummy, None, (), counts, False, False, ends_wave)


def num_forwards(parts: Sequence[Part], num_rows: int, world_size: int) -> int:
    """Return the number of forwards that `part_batches` yields: in each wave, those of its longest part."""
    waves = (parts[first : first + world_size] for first in range(0, len(parts), world_size))
    return sum(-(-max(part.num_rows for part in wave) // num_rows) for wave in waves)


def _rows_of(
    cursor: _Cursor, order: Order, part: Part, num_rows: int, by_length: bool, keys: Mapping[str, Any]
) -> Iterator[tuple[list[Any], Any, Sequence[int], bool]]:
    """Yield rows of a part, their keys, their places in their window, and True at the end of the window."""
    end, window = part.start + part.num_rows, num_rows * (_WINDOW_BATCHES if by_length else 1)
    for start in range(part.start, end, window):
        found = cursor.take(order.pieces(start, min(start + window, end)))
        rows, table = list(found), key_table(found, keys)
        places: Sequence[int] = range(len(rows))
        if by_length:
            places = sorted(places, key=lambda place: _length(rows[place]), reverse=True)
        for first in range(0, len(rows), num_rows):
            taken = places[first : first + num_rows]
            own = None if table is None else table.take(list(taken))
            yield [rows[place] for place in taken], own, taken, first + num_rows >= len(rows)


def _length(row: Any) -> int:
    """Return the length of `input_ids`, or of the longest text or list of a row."""
    values = row.values() if isinstance(row, Mapping) else [row]
    if isinstance(row, Mapping) and "input_ids" in row:
        values = [row["input_ids"]]
    # A number may be a 0-dim array or tensor, which has `__len__`, and raises there.
    return max((len(one) for one in values if hasattr(one, "__len__") and getattr(one, "ndim", 1) > 0), default=0)
