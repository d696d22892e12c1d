"""Blocks of a Ray dataset on a rank: pinned references, and readers of their rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from raysharding.data import BlockSource, Reader, TableReader, schema_from_text
from raysharding.errors import DataError

_FETCH_S = 60.0

_lock = threading.Lock()
_pinned: dict[str, Sequence[ray.ObjectRef]] = {}


def pin(key: str, refs: Sequence[ray.ObjectRef] | None) -> None:
    """Hold references to the blocks of a dataset on this rank, so that Ray keeps the blocks; `None` releases them."""
    with _lock:
        if refs is None:
            _pinned.pop(key, None)
        else:
            _pinned[key] = refs


@dataclass(frozen=True)
class DatasetBlocks(BlockSource):
    """Blocks of a `ray.data.Dataset` in the object store; a rank fetches the blocks that it reads."""

    key: str
    """Key under which the ranks `pin` the blocks."""
    rows: tuple[int, ...]
    """Number of rows of each block."""
    columns: tuple[str, ...] | None
    """Columns to read; `None` for all."""
    schema: str
    """Serialized `common_schema` of the blocks, as base64."""

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of rows of each block."""
        return np.array(self.rows, dtype=np.int64)

    @property
    def types(self) -> Any:
        """`common_schema` of all rows."""
        return schema_from_text(self.schema)

    def read(self, block: int) -> Reader:
        """Return a reader at the first row of a block, which the ranks of a node share in memory.

        Raises:
            DataError: The block is lost.
        """
        with _lock:
            ref = _pinned[self.key][block]
        try:
            table = ray.get(ref, timeout=_FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise DataError(f"block {block} of the dataset did not arrive within {_FETCH_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise DataError(f"block {block} of the dataset is lost: {error}") from error
        return TableReader(table if self.columns is None else table.select(list(self.columns)))
