"""Sources of rows: blocks, which can be read from any row on, and streams, which are iterated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader


class Reader(ABC):
    """Reads the rows of one block in order. Callers request no more rows than the block has."""

    @abstractmethod
    def take(self, num_rows: int) -> Sequence[Any]:
        """Return the next rows, each of which is accessed once."""

    @abstractmethod
    def skip(self, num_rows: int) -> None:
        """Skip the next rows."""

    def close(self) -> None:  # noqa: B027 - most readers hold nothing open
        """Close files."""


class BlockSource(ABC):
    """Rows in blocks. Picklable; the same on every rank."""

    @property
    @abstractmethod
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of rows of each block, int64 [number of blocks]; may be 0."""

    @abstractmethod
    def read(self, block: int) -> Reader:
        """Return a reader at the first row of a block."""

    @property
    def types(self) -> Any:
        """`common_schema` of all rows, if they are Arrow's; else `None`."""
        return None


class _SequenceReader(Reader):
    def __init__(self, rows: Any, start: int) -> None:
        self._rows, self._next = rows, start

    def take(self, num_rows: int) -> list[Any]:
        taken = [self._rows[index] for index in range(self._next, self._next + num_rows)]
        self._next += num_rows
        return taken

    def skip(self, num_rows: int) -> None:
        self._next += num_rows


@dataclass(frozen=True)
class SequenceRows(BlockSource):
    """Rows with indices: a list, or any object with `len` and `[index]`. Every row is a block."""

    rows: Any
    """The rows, all of which every rank can access."""

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One row per block."""
        return np.ones(len(self.rows), dtype=np.int64)

    def read(self, block: int) -> Reader:
        """Return a reader at a row."""
        return _SequenceReader(self.rows, block)


@dataclass(frozen=True)
class Columns:
    """Columns as rows."""

    columns: Mapping[str, Any]
    """Name → tensor or array, all with the same number of rows."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Stream:
    """Rows of an iterable, once per epoch; every rank iterates over all rows and keeps its own."""

    rows: Iterable[Any] | Callable[[], Iterable[Any]]
    """Yields the same rows, in the same order, on every rank and in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows() if callable(self.rows) else self.rows)


Rows: TypeAlias = BlockSource | Stream
"""A source of rows."""


def rows_of(data: Any) -> Rows:
    """Return a source of the user's data.

    Args:
        data: A sequence of rows (`len` and `[index]`: a list, a map-style dataset of torch or Hugging Face), a mapping
            of names to columns of equal length, an iterable of rows, or a function that returns one. A row is an
            element for the collate function, usually a mapping of names to numbers, lists or tensors.

    Raises:
        ValueError: There are no rows, columns differ in length, or `data` is an iterator, which lasts one epoch.
        TypeError: `data` is of another type.
    """
    if isinstance(data, BlockSource | Stream):
        return data
    if hasattr(data, "to_pylist") or hasattr(data, "iloc"):
        cure = "table.to_pylist()" if hasattr(data, "to_pylist") else 'frame.to_dict("records")'
        raise TypeError(
            f"data is a {type(data).__name__}, which has columns: give its rows, {cure}, or its Parquet file"
        )
    if isinstance(data, set | frozenset):
        raise TypeError("data is a set, whose order differs between processes: give a list")
    if isinstance(data, DataLoader):
        raise TypeError(
            "data is a DataLoader, whose batches are made in this process: give its dataset, and batch_size=, shuffle= "
            "and collate= (its collate_fn); every rank then reads its own rows"
        )
    if isinstance(data, Mapping):
        if type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
            raise TypeError(f"data is a {type(data).__name__}: give one of its splits, {', '.join(map(repr, data))}")
        return SequenceRows(_columns(data))
    if isinstance(data, torch.Tensor | np.ndarray) or (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        if isinstance(data, str | bytes):
            raise TypeError(f"data={data[:40]!r} is text: give rows, or a path")
        if len(data) == 0:
            raise ValueError("data has no rows")
        return SequenceRows(data)
    if isinstance(data, Iterator):
        raise ValueError(
            f"data is a {type(data).__name__}, which can be run through once, and only here: give a function that "
            "returns it, such as a generator function itself; every rank calls it"
        )
    if callable(data) or isinstance(data, Iterable):
        return Stream(data)
    raise TypeError(
        f"data is a {type(data).__name__}: give a ray.data.Dataset, a path, a list of rows, a mapping of names to "
        "columns, an iterable of rows, or a function that returns one"
    )


def _columns(data: Mapping[str, Any]) -> Columns:
    lengths: dict[str, int] = {}
    for name, column in data.items():
        if not isinstance(column, torch.Tensor | np.ndarray | Sequence) or isinstance(column, str):
            raise TypeError(f"data[{name!r}] is a {type(column).__name__}: give columns as tensors, arrays or lists")
        lengths[name] = len(column)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns need the same number of rows, but have {lengths}")
    if not any(lengths.values()):
        raise ValueError("data has no rows")
    return Columns(data)
