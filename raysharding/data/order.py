"""Which row of the data is row i of step t: the same whatever the number of ranks, and found without reading any.

Note [Lanes]:
    In order (`shuffle=False`), step t holds rows t·B … t·B + B - 1 of the data, for a batch of B rows.

    Shuffled, the blocks of the data (row groups of Parquet files; single rows of a list) are put into a random order,
    and that sequence is turned by a random number of rows and cut into B equal parts, the lanes. Row i of every step
    comes from lane i. A rank has neighbouring lanes, so it reads one stretch of the sequence, its own row groups, and
    nothing else; and since lanes belong to the batch and not to the ranks, W ranks train on the batches that one
    process does. Within a lane, rows of one block are shuffled in windows of `WINDOW_ROWS`, which a lane holds, as
    Arrow's columns. Every row comes once an epoch; lanes differ by one row at most, so the last step may be smaller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysharding.batch import split_rows

WINDOW_ROWS = 512
"""Neighbouring rows of a large block that are shuffled with each other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of one block."""

    block: int
    """Number of the block."""
    start: int
    """First row in the block."""
    stop: int
    """One after the last."""


class Order:
    """The order of one epoch."""

    def __init__(
        self, block_rows: Sequence[int] | np.ndarray[Any, Any], batch_size: int, *, shuffle: bool, seed: int, epoch: int
    ) -> None:
        """Find it; reads nothing.

        Args:
            block_rows: Rows of each block.
            batch_size: Rows of a step, all ranks together.
            shuffle: Whether the order is random.
            seed: Of that randomness, 0 or more.
            epoch: Counted from 0; each has an order of its own.
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
        """Steps of the epoch."""
        return -(-self.num_rows // self.batch_size)

    def rows_by_rank(self, step: int, world_size: int) -> tuple[int, ...]:
        """Return how many rows of a step each rank has."""
        if not self.shuffle:
            return split_rows(min(self.batch_size, self.num_rows - step * self.batch_size), world_size)
        lanes = (lanes_of(rank, world_size, self.batch_size) for rank in range(world_size))
        return tuple(sum(self.lane_rows(lane) > step for lane in own) for own in lanes)

    def lane_rows(self, lane: int) -> int:
        """Return how many rows a lane has."""
        return self._lane_begin(lane + 1) - self._lane_begin(lane)

    def _lane_begin(self, lane: int) -> int:
        return lane * self.num_rows // self.batch_size

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the rows from place `begin` to `end` of the sequence, a block at a time."""
        while begin < end:
            # The sequence is turned: its first place is row `_turn` of the blocks one after the other.
            place = (begin + self._turn) % self.num_rows
            index = bisect_right(self._ends, place)
            first = int(self._ends[index - 1]) if index else 0
            length = min(int(self._ends[index]) - place, end - begin)
            yield Piece(int(self._blocks[index]), place - first, place - first + length)
            begin += length

    def lane_windows(self, lane: int, first: int) -> Iterator[tuple[Piece, Sequence[int]]]:
        """Yield a lane's rows from number `first` on: neighbouring rows, and the order in which they come.

        Of the first window all rows are named, but only the places of those that are left.
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
    """Return the places in a whole batch that a rank fills."""
    rows = split_rows(batch_size, world_size)
    start = sum(rows[:rank])
    return range(start, start + rows[rank])
