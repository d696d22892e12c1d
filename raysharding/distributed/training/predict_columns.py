"""Columns of `predict`: what the model gives by itself, the data's own, and the checks of what `fn` returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from raysharding.data import has_unknown_type, plain
from raysharding.errors import DataError, shown


def last_logits(output: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the logits of each row: those of its last position that is not padding, if there is one per position.

    Args:
        output: The model's output: `logits`, an attribute or key, or a tensor; [rows, positions, classes] or of
            another number of dims.
        mask: `attention_mask` of the batch, [rows, positions]; `None`: nothing is padding.

    Raises:
        DataError: There are no logits.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        has = f" ({', '.join(map(str, output))})" if isinstance(output, Mapping) else ""
        what = f"the model's output is a {type(output).__name__}{has} without logits"
        raise DataError(f"{what}: give fn=, a function of (outputs, batch) that returns columns")
    if logits.ndim != 3 or mask is None or mask.shape != logits.shape[:2]:
        return logits[:, -1] if logits.ndim == 3 else logits
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (places * (mask != 0)).argmax(dim=1)
    return logits[torch.arange(len(logits), device=logits.device), last]


def key_columns(rows: Sequence[Any], keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of the data that the result has, as Python values.

    Raises:
        DataError: A row lacks one.
    """
    for row in rows if keys else ():
        missing = [name for name in keys if not isinstance(row, Mapping) or name not in row]
        if missing:
            has = f"the columns {list(row)}" if isinstance(row, Mapping) else f"no columns: {row!r:.40}"
            raise DataError(f"keys={list(keys)}: the rows have no {missing[0]!r}, they have {has}")
    return {name: [plain(row[name]) for row in rows] for name in keys}


def check_columns(name: str, columns: Any, num_rows: int, keys: Sequence[str]) -> None:
    """Check what the user's function returned.

    Args:
        name: Name of the function.
        columns: Its result.
        num_rows: Number of rows of the batch.
        keys: Names that are taken.

    Raises:
        DataError: It is not a mapping of columns with one value per row.
    """
    cure = "return a mapping of column names to tensors, arrays or lists with one value per row"
    if not isinstance(columns, Mapping) or not columns or not all(isinstance(one, str) for one in columns):
        found = "" if isinstance(columns, torch.Tensor) else f" ({shown(columns)})"
        raise DataError(f"fn={name} returned a {type(columns).__name__}{found}: {cure}")
    for column, values in columns.items():
        if column in keys:
            raise DataError(f"fn={name} returned the column {column!r}, which keys= names: give it another name")
        is_column = hasattr(values, "__len__") and not isinstance(values, str | bytes)
        is_column = is_column and getattr(values, "ndim", 1) > 0  # `len` of a 0-dim tensor raises
        is_scalar = isinstance(values, torch.Tensor) and values.ndim == 0
        found = f"{len(values)} values" if is_column else f"a {'0-dim ' * is_scalar}{type(values).__name__}"
        if not is_column or len(values) != num_rows:
            raise DataError(f"fn={name} returned {found} as {column!r} for a batch of {num_rows} rows: {cure}")


def check_types(schema: Any, known: Collection[str], keys: Collection[str], named: Callable[[str], str]) -> None:
    """Check that every column has a type, before files get theirs: a later batch could not change it.

    Args:
        schema: pyarrow schema of the first batches of all ranks.
        known: Columns that have their types from the data as a whole.
        keys: Columns of the data.
        named: Makes of a name what errors call the column.

    Raises:
        DataError: A column has none.
    """
    for one in schema:
        if one.name not in known and has_unknown_type(one.type):
            what = f"{named(one.name)} has only None and empty lists in the first batches, so its type is not known"
            cure = "return a tensor, a NumPy array of a dtype, or a pyarrow array: pa.array(values, pa.string())"
            if one.name in keys:
                cure = "give a Parquet file or a list of rows, whose types are those of all rows"
            raise DataError(f"{what} ({one.type}): {cure}")
