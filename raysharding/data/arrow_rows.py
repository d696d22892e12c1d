"""Rows of Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from raysharding.data.source import Reader


class ArrowRows(Sequence[dict[str, Any]]):
    """Rows of record batches, made on access: as Python objects they take many times the memory."""

    def __init__(self, batches: Sequence[Any]) -> None:
        """Store the batches.

        Args:
            batches: Record batches of one schema.
        """
        self._batches = [batch for batch in batches if batch.num_rows]

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def __getitem__(self, index: Any) -> Any:
        for batch in self._batches:
            if index < batch.num_rows:
                return _rows(batch.slice(index, 1))[0]
            index -= batch.num_rows
        raise IndexError(index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield from _rows(batch)


class TableReader(Reader):
    """Reads the rows of a table."""

    def __init__(self, table: Any) -> None:
        """Begin at the first row of a pyarrow table."""
        self._table, self._next = table, 0

    def take(self, num_rows: int) -> Sequence[Any]:
        """See `Reader`."""
        part = self._table.slice(self._next, num_rows)
        self._next += num_rows
        return ArrowRows(part.to_batches())

    def skip(self, num_rows: int) -> None:
        """See `Reader`."""
        self._next += num_rows


def _rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch: name → number, text, or array for a list of numbers."""
    columns = {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(column: Any) -> Sequence[Any]:
    import pyarrow as arrow

    kind = column.type
    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    if not is_list or column.null_count or not arrow.types.is_primitive(kind.value_type) or column.flatten().null_count:
        values: Sequence[Any] = column.to_pylist()
        return values
    flat = column.flatten().to_numpy(zero_copy_only=False)
    offsets = np.asarray(column.offsets) - column.offsets[0].as_py()
    # Copies: an array of pyarrow is read-only, and keeps its whole chunk alive.
    return [flat[start:stop].copy() for start, stop in pairwise(offsets)]
