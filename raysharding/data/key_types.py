"""Types of the columns that `predict` takes over from the data: those of the data as a whole, not of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raysharding.data.arrow_rows import as_table, common_schema, mixed_types
from raysharding.data.hub_rows import HubRows
from raysharding.data.source import BlockSource, Columns, SequenceRows
from raysharding.errors import DataError


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
