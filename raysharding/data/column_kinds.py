"""Kinds of Arrow columns, and a check that columns of ids hold integers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raysharding.errors import DataError


def kind_of(kind: Any) -> str:
    """Return the kind of a pyarrow type, as far as it matters to a batch: without the width of numbers."""
    import pyarrow as arrow

    if not isinstance(kind, arrow.DataType):
        return str(kind)  # a dataset's column of Python objects
    types = arrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return f"lists of {kind_of(kind.value_type)}"
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if types.is_struct(kind):
        return f"records of {', '.join(f'{one.name}: {kind_of(one.type)}' for one in kind)}"
    named = {
        "whole numbers": types.is_integer,
        "floats": types.is_floating,
        "text": lambda one: types.is_string(one) or types.is_large_string(one),
    }
    return next((name for name, is_one in named.items() if is_one(kind)), str(kind))


def check_whole(kinds: Mapping[str, str], whole: Collection[str], path: str | None = None) -> None:
    """Raise for columns of floats if the model takes ids.

    Args:
        kinds: Column → kind, by `kind_of`.
        whole: Names of columns that must hold integers if they exist.
        path: Path of the file, for the error. Default: none.

    Raises:
        DataError: A column holds other values; the error names it.
    """
    for name in whole:
        if "floats" in (kind := kinds.get(name, "")):
            what = f"the column {name!r} holds {kind}, and the model takes ids, which are whole numbers"
            raise DataError(f"{what}: write it as int64, or make the batches by collate=", path=path)
