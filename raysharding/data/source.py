"""Where rows come from: blocks that can be read from any row on, or a stream that can only be run through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch


class Reader(ABC):
    """Reads one block's rows in order. Never asked for more rows than the block has."""

    @abstractmethod
    def take(self, num_rows: int) -> Sequence[Any]:
        """Return the next rows, as one holds them who will want each of them once."""

    @abstractmethod
    def skip(self, num_rows: int) -> None:
        """Leave out the next rows."""

    def close(self) -> None:  # noqa: B027 - most readers hold nothing open
        """Let go of files."""


class BlockSource(ABC):
    """Rows in blocks. Picklable; opened on every rank alike."""

    @property
    @abstractmethod
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of each block, int64 [number of blocks]; 0 is fine."""

    @abstractmethod
    def read(self, block: int) -> Reader:
        """Return a reader at a block's first row."""


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
    """Rows that have numbers: a list, or anything with `len` and `[number]`. Every row is a block."""

    rows: Any
    """Every rank has all of it, or, as datasets that map files have, a way to it."""

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ones."""
        return np.ones(len(self.rows), dtype=np.int64)

    def read(self, block: int) -> Reader:
        """Return a reader at a row."""
        return _SequenceReader(self.rows, block)


@dataclass(frozen=True)
class Columns:
    """Columns as rows."""

    columns: Mapping[str, Any]
    """Name → tensor or array, all with as many rows."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Stream:
    """Rows that come one after the other, once an epoch; every rank runs through all of them and keeps its own."""

    rows: Iterable[Any] | Callable[[], Iterable[Any]]
    """Gives the same rows, in the same order, on every rank and in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows() if callable(self.rows) else self.rows)


Rows: TypeAlias = BlockSource | Stream
"""What batches are taken from."""


def rows_of(data: Any) -> Rows:
    """Make a source of what a user gives.

    Args:
        data: A sequence of rows (`len` and `[number]`: a list, a map-style dataset of torch or Hugging Face), a mapping
            of names to columns with as many rows each, an iterable of rows, or a function that returns one. A row is
            what the collate function takes: usually a mapping of names to numbers, lists or tensors.

    Raises:
        ValueError: No rows, columns of unequal lengths, or an iterator, which is spent after one epoch.
        TypeError: None of these.
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
    if isinstance(data, Mapping):
        return SequenceRows(_columns(data))
    if isinstance(data, torch.Tensor | np.ndarray) or (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        if isinstance(data, str | bytes):
            raise TypeError(f"data={data[:40]!r} is text: give rows, or a path that ends in .parquet")
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
        f"data is a {type(data).__name__}: give a ray.data.Dataset, a Parquet path, a list of rows, a mapping of names "
        "to columns, an iterable of rows, or a function that returns one"
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
