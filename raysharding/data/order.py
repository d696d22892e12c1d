"""The order of rows: which row of the data is row i of step t, independent of the number of ranks; reads no data.

Note [Lanes]:
    In order (`shuffle=False`), step t holds rows t·B … t·B + B - 1 of the data, for a batch of B rows.

    With `shuffle=True`, the blocks of the data (row groups of Parquet files; single rows of a list) are put into a
    random order. That sequence is rotated by a random number of rows, and cut into B equal parts, the lanes. Row i of
    every step is from lane i. A rank has adjacent lanes, so that it reads one range of the sequence, its row groups.
    Lanes depend on the batch and not on the ranks, so W ranks train on the same batches as one process. Within a lane,
    rows of one block are shuffled in windows of `WINDOW_ROWS`, which a lane holds as Arrow columns. Every row is used
    once per epoch. Lengths of lanes differ by at most one row, so the last step may be smaller.

    With `rows_per_item=k`, rows n·k … n·k + k - 1 of the data are item n. What is said of rows above then holds for
    items: a lane and a window are of items, and an item is in the block of its first row, though it may end in another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from raysharding.batch import split_rows

WINDOW_ROWS = 512
"""Number of adjacent rows of a large block, or items, that are shuffled with each other."""


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
        self,
        block_rows: Sequence[int] | np.ndarray[Any, Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: int,
        rows_per_item: int = 1,
    ) -> None:
        """Compute the order, without reading data.

        Args:
            block_rows: Number of rows of each block; their sum divides by `rows_per_item`.
            batch_size: Rows of a step, over all ranks; divides by `rows_per_item`.
            shuffle: True for a random order.
            seed: Seed of the order, 0 or more.
            epoch: Number of the epoch, from 0; each epoch has its own order.
            rows_per_item: Number of consecutive rows that stay together.
        """
        self._row_ends = np.cumsum(np.asarray(block_rows, dtype=np.int64))
        self.num_rows = int(self._row_ends[-1]) if len(self._row_ends) else 0
        self.batch_size = batch_size
        self.rows_per_item = rows_per_item
        self.shuffle = shuffle
        self._entropy = (seed, epoch)
        self._num_items = self.num_rows // rows_per_item
        if shuffle:
            # An item is in the block of its first row, so a block's end is rounded up.
            ends = -(-self._row_ends // rows_per_item)
            blocks, random = np.arange(len(ends)), self._random()
            random.shuffle(blocks)
            self._turn = int(random.integers(max(self._num_items, 1)))
            self._ends = np.cumsum(np.diff(ends, prepend=0)[blocks])
            # Place of an item in the data, minus its place in the concatenated blocks.
            self._shifts = ends[blocks] - self._ends

    @property
    def num_steps(self) -> int:
        """Number of steps of the epoch."""
        return -(-self.num_rows // self.batch_size)

    def rows_by_rank(self, step: int, world_size: int) -> tuple[int, ...]:
        """Return the number of rows of each rank in a step."""
        if not self.shuffle:
            left = min(self.batch_size, self.num_rows - step * self.batch_size)
            return split_rows(left, world_size, self.rows_per_item)
        lanes = (self.lanes_of(rank, world_size) for rank in range(world_size))
        return tuple(self.rows_per_item * sum(self.lane_items(lane) > step for lane in own) for own in lanes)

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Return the lanes of a rank."""
        items = split_rows(self._num_lanes, world_size)
        start = sum(items[:rank])
        return range(start, start + items[rank])

    @property
    def _num_lanes(self) -> int:
        return self.batch_size // self.rows_per_item

    def lane_items(self, lane: int) -> int:
        """Return the number of items of a lane."""
        return self._lane_begin(lane + 1) - self._lane_begin(lane)

    def _lane_begin(self, lane: int) -> int:
        return lane * self._num_items // self._num_lanes

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield rows `begin` to `end` of the data, one block at a time."""
        while begin < end:
            block = bisect_right(self._row_ends, begin)
            first = int(self._row_ends[block - 1]) if block else 0
            stop = min(int(self._row_ends[block]), end)
            yield Piece(block, begin - first, stop - first)
            begin = stop

    def lane_windows(self, lane: int, first: int) -> Iterator[tuple[range, Sequence[int]]]:
        """Yield the items of a lane from number `first` on, as windows of adjacent items of the data and their order.

        The first window has all its items, but only the remaining positions.
        """
        begin = self._lane_begin(lane)
        done = 0
        for number, window in enumerate(self._windows(begin, self._lane_begin(lane + 1))):
            length = window.stop - window.start
            done += length
            if done > first:
                places = self._random(lane, number).permutation(length).tolist() if length > 1 else [0]
                yield window, places[max(0, first - done + length) :]

    def shuffled_rows(self, step: int, rank: int, world_size: int) -> list[int]:
        """Return the numbers in the data of a rank's rows of a step, with `shuffle`."""
        size = self.rows_per_item
        found = (next(self.lane_windows(lane, step), None) for lane in self.lanes_of(rank, world_size))
        items = [window.start + places[0] for window, places in filter(None, found)]
        return [item * size + row for item in items for row in range(size)]

    def _windows(self, begin: int, end: int) -> Iterator[range]:
        """Yield the items from position `begin` to `end` of the random sequence, as windows of one block each."""
        while begin < end:
            # The sequence is rotated: it starts at item `_turn` of the concatenated blocks.
            place = (begin + self._turn) % self._num_items
            index = bisect_right(self._ends, place)
            length = min(int(self._ends[index]) - place, end - begin)
            begin += length
            item = place + int(self._shifts[index])
            for start in range(item, item + length, WINDOW_ROWS):
                yield range(start, min(start + WINDOW_ROWS, item + length))

    def _random(self, *more: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*self._entropy, *more))))


@dataclass(frozen=True)
class Position:
    """Position of a run in its data, after an update."""

    epoch: int
    """Number of completed epochs."""
    step: int
    """Number of completed steps of the current epoch."""
    num_steps: int
    """Number of completed steps of the run."""
    batch_size: int
    """Rows of a step, over all ranks."""
    shuffle: bool
    """True for a random order of the rows."""
    seed: int
    """Seed of the order."""
    num_rows: int | None
    """Number of rows of the data; `None` for an iterable."""
    layout: str = ""
    """Digest of the block sizes, which a random order depends on; empty without a random order."""
    rows_per_item: int = 1
    """Number of consecutive rows that stay together."""
    run: str = ""
    """Name of the run, in all its saves and resumes."""
    loss: float | None = None
    """Loss of the last step of the run whose loss was finite; `None` before it."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Evaluations of the run so far, in order: `step`; `metrics`, those that were finite; and, for an evaluation that
    was the best one, `best`, the metric that decided, and `path`, its save."""

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Check and make a position from the result of `as_dict`, possibly changed.

        Raises:
            ValueError: A field is missing or of another type.
        """
        values = {field.name: found.get(field.name) for field in fields(cls)}
        # Saves of earlier versions have none of these.
        loss, evaluations = values.pop("loss"), values.pop("evaluations") or ()
        values["rows_per_item"] = found.get("rows_per_item", 1)
        if not isinstance(loss, float | None) or not all(isinstance(one, Mapping) for one in evaluations):
            raise ValueError(f"position: loss is {loss!r}, evaluations are {evaluations!r}")
        for name, value in values.items():
            kind = {"shuffle": bool, "layout": str, "run": str}.get(name, int)
            is_fine = type(value) is kind and (not isinstance(value, int) or value >= 0)
            if not is_fine and not (name == "num_rows" and value is None):
                raise ValueError(f"position: {name} is {value!r}")
        return cls(**values, loss=loss, evaluations=tuple(evaluations))  # type: ignore[arg-type]

    @property
    def best(self) -> str | None:
        """Path of the save of the best evaluation so far; `None` without one."""
        return next((one["path"] for one in reversed(self.evaluations) if one.get("path")), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the position as a JSON value."""
        return asdict(self)
