"""Collation of rows into the arguments of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate as stack

from raysharding.batch import Collate, RankBatch, Split
from raysharding.errors import DataError
from raysharding.tree import leaves


def default_collate(rows: list[Any]) -> Any:
    """Stack rows by torch's `default_collate`, column by column.

    Lists of numbers become tensors; integers become int64, which losses and embeddings take, and float64 becomes the
    default dtype of torch.

    Raises:
        ValueError: A column has rows of different shapes, a null, or no tensors; the error names the column.
    """
    tensors = [_as_tensors(row) for row in rows]
    try:
        return stack(tensors)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{_misfit(tensors) or error}; give collate_fn= a function that makes a batch of rows, "
                         "such as transformers' DataCollatorWithPadding(tokenizer)") from error  # fmt: skip


class KnownColumns:
    """Collates by `default_collate`, without the columns of mappings that the model does not take."""

    def __init__(self, known: Collection[str] | None, also: Collection[str] = ()) -> None:
        """Begin with no column dropped.

        Args:
            known: Columns to keep; `None`: all but text, of which no tensor can be made.
            also: Columns to keep beside those.
        """
        self.also = also
        """Columns that are kept beside those."""
        self.names = known
        """Columns that the model takes; `None`: all but text."""
        self.dropped: tuple[str, ...] = ()
        """Names of the columns that were dropped so far. Safe to read from any thread."""

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows.

        Raises:
            DataError: No column is left.
            ValueError: As `default_collate` raises.
        """
        texts = {name for row in rows if isinstance(row, Mapping) for name, one in row.items() if isinstance(one, str)}
        return default_collate([self._kept_of(row, texts) if isinstance(row, Mapping) else row for row in rows])

    def _kept_of(self, row: Mapping[str, Any], texts: Collection[str]) -> Mapping[str, Any]:
        return {name: row[name] for name in self.kept({name: name in texts for name in row})}

    def kept(self, columns: Mapping[str, bool]) -> list[str]:
        """Return the columns that the model takes, and note that the others are dropped.

        Args:
            columns: Column → True if it holds text.

        Raises:
            DataError: No column is left.
        """
        known, also = self.names, self.also
        kept = [
            name
            for name, is_text in columns.items()
            if name in also or (not is_text if known is None else name in known)
        ]
        if not kept:
            takes = "no text" if known is None else f"only {', '.join(sorted(known))}"
            have = f"the rows have the columns {', '.join(columns)}"
            raise DataError(f"{have}, and the model takes {takes}: rename columns, or give collate_fn=")
        self.dropped += tuple(name for name in columns if name not in kept and name not in self.dropped)
        return kept


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_tensors(one) for name, one in value.items()}
    if isinstance(value, list) and all(isinstance(one, int | float | list) for one in value):
        value = _tensor(value)
    elif isinstance(value, tuple):
        return tuple(_as_tensors(one) for one in value)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        if value.dtype.kind == "u":  # torch computes with no other unsigned integers than uint8
            if value.size and value.max() > np.iinfo(np.int64).max:
                raise ValueError(f"an integer of the data, {value.max()}, is over int64: convert its column")
            value = value.astype(np.int64)
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        return value
    if not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool):
        return value.long()
    return value.to(torch.get_default_dtype()) if value.dtype is torch.float64 else value


def _tensor(value: list[Any]) -> Any:
    try:
        return torch.tensor(value)
    except (ValueError, TypeError):
        return value  # lists of unequal lengths: torch's stack raises


def null_in(rows: Sequence[Any]) -> str:
    """Return a text about the first null in the rows of a batch; empty without one."""
    for index, row in enumerate(rows):
        null = next((path for path, leaf in leaves(row, "row") if leaf is None), None)
        if null is not None:
            return f"{null} is null in row {index} of the batch: fill such values in, or leave their rows out"
    return ""


def _misfit(rows: Sequence[Any]) -> str:
    """Return a text about the first column that does not stack; empty without one."""
    if null := null_in(rows):
        return null
    for path, first in leaves(rows[0], "row"):
        for row in rows[1:]:
            other = dict(leaves(row, "row")).get(path)
            if other is None or getattr(first, "shape", None) != getattr(other, "shape", None):
                return f"{path} does not stack: {_shown(first)} in one row, {_shown(other)} in another"
    return ""


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r:.40}"


def rank_batch(
    collate: Collate, rank: int, rows: list[Any], counts: tuple[int, ...], rows_per_item: int = 1
) -> RankBatch:
    """Make this rank's part of a call from its rows of a step.

    Args:
        collate: The user's function, or `default_collate`.
        rank: This rank.
        rows: Rows of this rank; an item of another rank if it has none.
        counts: Number of rows of each rank.
        rows_per_item: Number of consecutive rows that belong together.
    """

    def collate_or_name(rows: list[Any]) -> Any:
        try:
            return collate(rows)
        except (TypeError, ValueError) as error:  # as tokenizers raise for a null among texts
            null = "" if isinstance(error, DataError) else null_in(rows)
            if not null or null in str(error):
                raise
            raise ValueError(f"{error}; {null}") from error

    split = Split(rows, rows_per_item=rows_per_item, collate_fn=collate_or_name)
    return RankBatch((split,), num_rows=counts[rank], rows=counts, rows_per_item=rows_per_item)
