"""Blocks of a Ray dataset on a rank: what keeps them alive, and the rows that are read from them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from raysharding.data import ArrowRows, BlockSource, Reader
from raysharding.errors import DataError

_FETCH_S = 60.0

_lock = threading.Lock()
_pinned: dict[str, Sequence[ray.ObjectRef]] = {}


def pin(key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
    """On a rank: keep references to a dataset's blocks until they are taken back by `None`. Ray counts them."""
    with _lock:
        if refs is None:
            _pinned.pop(key, None)
        else:
            _pinned[key] = refs


class _TableReader(Reader):
    def __init__(self, table: Any) -> None:
        self._table, self._next = table, 0

    def take(self, num_rows: int) -> Sequence[Any]:
        part = self._table.slice(self._next, num_rows)
        self._next += num_rows
        return ArrowRows(part.to_batches())

    def skip(self, num_rows: int) -> None:
        self._next += num_rows


@dataclass(frozen=True)
class DatasetBlocks(BlockSource):
    """The blocks of a `ray.data.Dataset`, in the object store; a rank fetches those that it reads."""

    key: str
    """What the ranks `pin` them under."""
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
            ref = _pinned[self.key][block]
        try:
            table = ray.get(ref, timeout=_FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise DataError(f"block {block} of the dataset did not come within {_FETCH_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise DataError(f"block {block} of the dataset is lost: {error}") from error
        return _TableReader(table if self.columns is None else table.select(list(self.columns)))
