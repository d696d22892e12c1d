"""Sources of rows: blocks, which can be read from any row on, and streams, which are iterated.

`key_types`: the types of the columns that `predict` takes over from the data: those of the data as a whole, not of a
batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from raysharding.data.arrow_rows import ArrowRows, as_table, common_schema, mixed_types
from raysharding.errors import DataError


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


class TableReader(Reader):
    """Reads the rows of a table."""

    def __init__(self, table: Any) -> None:
        """Begin at the first row of a pyarrow table."""
        self._table, self._next = table, 0

    def take(self, num_rows: int) -> Sequence[Any]:
        """Return the next rows, as `ArrowRows`."""
        part = self._table.slice(self._next, num_rows)
        self._next += num_rows
        return ArrowRows(part.to_batches())

    def skip(self, num_rows: int) -> None:
        """Skip the next rows."""
        self._next += num_rows


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
class HubRows:
    """The rows of one split. Picklable; each process loads them when it first needs them."""

    name: str
    """What `datasets.load_dataset` takes: `org/name`, or a directory."""
    split: str
    """Name of the split, or a part of one: `train[:1000]`."""

    @cached_property
    def loaded(self) -> Any:
        """The `datasets.Dataset`."""
        import datasets

        try:
            return datasets.load_dataset(self.name, split=self.split)
        except Exception as error:  # `datasets` has errors of many libraries
            raise DataError(f"datasets.load_dataset({self.name!r}, split={self.split!r}): {error}") from error

    def __len__(self) -> int:
        return len(self.loaded)

    def __getitem__(self, index: int) -> Any:
        return self.loaded[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.split)


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
            "and collate_fn=; every rank then reads its own rows"
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


def key_types(source: BlockSource, keys: Sequence[str]) -> Any:
    """Return a pyarrow schema of the columns whose types can be known without reading rows from storage.

    Args:
        source: The data: files and blocks have types, and so have datasets of Hugging Face; lists and columns in memory
            are read whole.
        keys: Names of columns.

    Raises:
        DataError: No one type holds the values of a column.
    """
    import pyarrow as arrow

    if not keys:
        return arrow.schema([])
    rows = source.rows if isinstance(source, SequenceRows) else None
    if isinstance(rows, Columns):
        return _inferred({name: _typed(rows.columns[name]) for name in keys if name in rows.columns})
    if isinstance(rows, list | tuple):
        has = [name for name in keys if all(isinstance(row, Mapping) and name in row for row in rows)]
        return _inferred({name: [plain(row[name]) for row in rows] for name in has})
    schema = _schema_of_features(rows) if rows is not None else source.types
    known = [one for one in schema or () if one.name in keys]
    for one in known:
        if mixed := mixed_types(one):
            raise DataError(f"keys={list(keys)}: the column {one.name!r} {mixed}: write it with one type")
    return arrow.schema([(one.name, one.type) for one in known])


def plain(value: Any) -> Any:
    """Return an array, tensor or scalar of one as Python values; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _inferred(columns: Mapping[str, Any]) -> Any:
    return as_table(columns, {}, "the column {!r} of the data (keys=)".format).schema


def _typed(column: Any) -> Any:
    """Return values that have the type of a column; of tensors and arrays, which have one, an empty part."""
    if isinstance(column, torch.Tensor) or (isinstance(column, np.ndarray) and column.dtype != object):
        return column[:0]
    return [plain(value) for value in column]


def _schema_of_features(rows: Any) -> Any:
    """Return the schema of a dataset of Hugging Face; empty for others, and where a transform makes other rows."""
    loaded = rows.loaded if isinstance(rows, HubRows) else rows
    schema = getattr(getattr(loaded, "features", None), "arrow_schema", None)
    return () if schema is None or loaded.format["type"] == "custom" else common_schema([("", schema)])
