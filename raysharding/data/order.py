"""The order of rows: which row of the data is row i of step t, independent of the number of ranks; reads no data.

Note [Lanes]:
    In order (`shuffle=False`), step t holds rows t·B … t·B + B - 1 of the data, for a batch of B rows.

    With `shuffle=True`, the blocks of the data (row groups of Parquet files; single rows of a list) are put into a
    random order. That sequence is rotated by a random number of rows, and cut into B equal parts, the lanes. Row i of
    every step is from lane i. A rank has adjacent lanes, so that it reads one range of the sequence, its row groups.
    Lanes depend on the batch and not on the ranks, so W ranks train on the same batches as one process. Within a lane,
    rows of one block are shuffled in windows of `WINDOW_ROWS`, which a lane holds as Arrow columns. Every row is used
    once per epoch. Lengths of lanes differ by at most one row, so the last step may be smaller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysharding.batch import split_rows

WINDOW_ROWS = 512
"""Number of adjacent rows of a large block that are shuffled with each other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent rows of one block."""

    block: int
    """Number of the block."""
    start: int
    """First row in the block."""
    stop: int
    """One past the last row."""


class Order:
    """The order of one epoch."""

    def __init__(
        self, block_rows: Sequence[int] | np.ndarray[Any, Any], batch_size: int, *, shuffle: bool, seed: int, epoch: int
    ) -> None:
        """Compute the order, without reading data.

        Args:
            block_rows: Number of rows of each block.
            batch_size: Rows of a step, over all ranks.
            shuffle: True for a random order.
            seed: Seed of the order, 0 or more.
            epoch: Number of the epoch, from 0; each epoch has its own order.
        """
        lengths = np.asarray(block_rows, dtype=np.int64)
        self.num_rows = int(lengths.sum())
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._entropy = (seed, epoch)
        self._blocks = np.arange(len(lengths))
        self._turn = 0
        if shuffle:
            random = self._random()
            random.shuffle(self._blocks)
            self._turn = int(random.integers(max(self.num_rows, 1)))
        self._ends = np.cumsum(lengths[self._blocks])

    @property
    def num_steps(self) -> int:
        """Number of steps of the epoch."""
        return -(-self.num_rows // self.batch_size)

    def rows_by_rank(self, step: int, world_size: int) -> tuple[int, ...]:
        """Return the number of rows of each rank in a step."""
        if not self.shuffle:
            return split_rows(min(self.batch_size, self.num_rows - step * self.batch_size), world_size)
        lanes = (lanes_of(rank, world_size, self.batch_size) for rank in range(world_size))
        return tuple(sum(self.lane_rows(lane) > step for lane in own) for own in lanes)

    def lane_rows(self, lane: int) -> int:
        """Return the number of rows of a lane."""
        return self._lane_begin(lane + 1) - self._lane_begin(lane)

    def _lane_begin(self, lane: int) -> int:
        return lane * self.num_rows // self.batch_size

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the rows from position `begin` to `end` of the sequence, one block at a time."""
        while begin < end:
            # The sequence is rotated: it starts at row `_turn` of the concatenated blocks.
            place = (begin + self._turn) % self.num_rows
            index = bisect_right(self._ends, place)
            first = int(self._ends[index - 1]) if index else 0
            length = min(int(self._ends[index]) - place, end - begin)
            yield Piece(int(self._blocks[index]), place - first, place - first + length)
            begin += length

    def lane_windows(self, lane: int, first: int) -> Iterator[tuple[Piece, Sequence[int]]]:
        """Yield the rows of a lane from number `first` on, as windows of adjacent rows and their order.

        The first window has all its rows, but only the remaining positions.
        """
        begin = self._lane_begin(lane)
        done = 0
        for number, window in enumerate(self._windows(begin, self._lane_begin(lane + 1))):
            length = window.stop - window.start
            done += length
            if done > first:
                places = self._random(lane, number).permutation(length).tolist() if length > 1 else [0]
                yield window, places[max(0, first - done + length) :]

    def _windows(self, begin: int, end: int) -> Iterator[Piece]:
        for piece in self.pieces(begin, end):
            for start in range(piece.start, piece.stop, WINDOW_ROWS):
                yield Piece(piece.block, start, min(start + WINDOW_ROWS, piece.stop))

    def _random(self, *more: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*self._entropy, *more))))


def lanes_of(rank: int, world_size: int, batch_size: int) -> range:
    """Return the positions of a rank in the whole batch."""
    rows = split_rows(batch_size, world_size)
    start = sum(rows[:rank])
    return range(start, start + rows[rank])
