"""What the columns of Arrow's tables hold, and what a model does not take of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raysharding.errors import DataError


def kind_of(kind: Any) -> str:
    """Return what a type of pyarrow's holds, as far as it makes a difference to a batch: not how wide numbers are."""
    import pyarrow as arrow

    if not isinstance(kind, arrow.DataType):
        return str(kind)  # a dataset's column of Python's objects
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
    """Refuse columns of floats where the model takes ids.

    Args:
        kinds: Column → what it holds, by `kind_of`.
        whole: Columns that must hold whole numbers, where there are such columns.
        path: Of the file, for the error. Default: there is none.

    Raises:
        DataError: Names a column.
    """
    for name in whole:
        if "floats" in (kind := kinds.get(name, "")):
            what = f"the column {name!r} holds {kind}, and the model takes ids, which are whole numbers"
            raise DataError(f"{what}: write it as int64, or make the batches by collate=", path=path)
