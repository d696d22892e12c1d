"""Data as a user gives it to `fit`, made a source that every rank reads for itself."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from raysharding.data import BlockSource, ParquetPath, Reader, Rows, rows_of
from raysharding.data.arrow_rows import arrow_rows
from raysharding.errors import DataError
from raysharding.group.locate import anchored

_FETCH_S = 60.0

_lock = threading.Lock()
_held: dict[str, Sequence[ray.ObjectRef]] = {}


def hold(key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
    """On a rank: keep references to a dataset's blocks until they are taken back by `None`. Ray counts them."""
    with _lock:
        if refs is None:
            _held.pop(key, None)
        else:
            _held[key] = refs


class _TableReader(Reader):
    def __init__(self, table: Any) -> None:
        self._table, self._next = table, 0

    def take(self, num_rows: int) -> list[Any]:
        part = self._table.slice(self._next, num_rows).combine_chunks()
        self._next += num_rows
        return [row for batch in part.to_batches() for row in arrow_rows(batch)]

    def skip(self, num_rows: int) -> None:
        self._next += num_rows


@dataclass(frozen=True)
class DatasetBlocks(BlockSource):
    """The blocks of a `ray.data.Dataset`, in the object store; a rank fetches those that it reads."""

    key: str
    """What the ranks `hold` them under."""
    rows: tuple[int, ...]
    """Rows of each block."""
    columns: tuple[str, ...] | None
    """Columns to read; `None` for all."""

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of each block."""
        return np.array(self.rows, dtype=np.int64)

    def read(self, block: int) -> Reader:
        """Return a reader at a block's first row; the block is memory that all ranks of a node share.

        Raises:
            DataError: The block is lost.
        """
        with _lock:
            ref = _held[self.key][block]
        try:
            table = ray.get(ref, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            raise DataError(f"block {block} of the dataset is lost: {error}") from error
        return _TableReader(table if self.columns is None else table.select(list(self.columns)))


@dataclass(frozen=True)
class Given:
    """What ranks read, and what has to live on the driver meanwhile."""

    source: Rows | ParquetPath
    """For the ranks."""
    refs: tuple[ray.ObjectRef, ...] = ()
    """Blocks that the ranks have to hold."""


def given(data: Any, columns: Sequence[str] | None) -> Given:
    """Make a source of `data`; see `ShardedModelGroup.fit`.

    Raises:
        ValueError: No data, or `columns` for what has none.
        TypeError: Not data.
        DataError: The dataset cannot be computed.
    """
    chosen = None if columns is None else tuple(columns)
    if isinstance(data, str | os.PathLike):
        return Given(ParquetPath(anchored(os.fspath(data)), chosen))
    if "ray.data" in sys.modules and isinstance(data, sys.modules["ray.data"].Dataset):
        return _blocks(data, chosen)
    if chosen is not None:
        raise ValueError(f"columns={columns!r}: only Parquet files and Ray datasets have columns to choose from")
    return Given(rows_of(data))


def _blocks(dataset: Any, columns: tuple[str, ...] | None) -> Given:
    try:
        names = dataset.schema().names
        refs = tuple(dataset.to_arrow_refs())
        rows = tuple(ray.get([_num_rows.remote(ref) for ref in refs]))
    except ray.exceptions.RayError as error:
        raise DataError(f"the Ray dataset cannot be computed: {error}") from error
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise DataError(f"the Ray dataset has no column {', '.join(map(repr, missing))}: it has {names}")
    if not any(rows):
        raise DataError("the Ray dataset has no rows")
    return Given(DatasetBlocks(os.urandom(8).hex(), rows, columns), refs)


@ray.remote(num_cpus=0)
def _num_rows(table: Any) -> int:
    return int(table.num_rows)
