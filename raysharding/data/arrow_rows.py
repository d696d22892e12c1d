"""Rows of Arrow record batches, the kinds of their columns, and tables made of columns."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from raysharding.errors import DataError

_MAX_ELEMENTS: Final = 2**31 - 1
_MIXED: Final = b"mixed"
_named: Final = "the column {!r}".format


class ArrowRows(Sequence[dict[str, Any]]):
    """Rows of record batches, made on access: as Python objects they take many times the memory."""

    def __init__(self, batches: Sequence[Any]) -> None:
        """Store the batches.

        Args:
            batches: Record batches of one schema.
        """
        self.batches = [batch for batch in batches if batch.num_rows]
        """The record batches with rows."""

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def __getitem__(self, index: Any) -> Any:
        for batch in self.batches:
            if index < batch.num_rows:
                return _rows(batch.slice(index, 1))[0]
            index -= batch.num_rows
        raise IndexError(index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            yield from _rows(batch)


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
            raise DataError(f"{what}: write it as int64, or make the batches by collate_fn=", path=path)


def schema_as_text(schema: Any) -> str:
    """Return a pyarrow schema, serialized, as base64."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def schema_from_text(text: str) -> Any:
    """Return the pyarrow schema of `schema_as_text`."""
    import pyarrow as arrow

    return arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(text)))


def common_schema(schemas: Iterable[tuple[str, Any]]) -> Any:
    """Return a pyarrow schema of the columns of all schemas, with types that hold the values of each.

    A column without such a type is of nulls, which `mixed_types` tells from others. Columns of extension types, such as
    tensors, are left out.

    Args:
        schemas: (where it was found, pyarrow schema) of each part of the data.
    """
    import pyarrow as arrow

    fields: dict[str, Any] = {}
    first: dict[str, str] = {}
    for where, schema in schemas:
        for one in schema:
            kind = one.type.value_type if arrow.types.is_dictionary(one.type) else one.type
            if isinstance(kind, arrow.BaseExtensionType) or not isinstance(kind, arrow.DataType):
                continue
            known = fields.setdefault(one.name, arrow.field(one.name, kind))
            first.setdefault(one.name, where)
            if known.type == kind or known.metadata:
                continue
            common, mixed = common_type(known.type, kind), None
            if common is None:
                mixed = {_MIXED: f"holds {known.type} in {first[one.name]}, and {kind} in {where}"}
            fields[one.name] = arrow.field(one.name, arrow.null() if common is None else common, metadata=mixed)
    return arrow.schema(list(fields.values()))


def common_type(first: Any, second: Any) -> Any:
    """Return a pyarrow type that holds the values of both types; `None` if there is none."""
    import pyarrow as arrow

    schemas = [arrow.schema([("", kind)]) for kind in (first, second)]
    try:
        return arrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except arrow.ArrowException:
        return None


def mixed_types(field: Any) -> str:
    """Return what types a column of `common_schema` has, if no one type holds its values; else an empty text."""
    return str((field.metadata or {}).get(_MIXED, b""), "utf-8")


def key_table(rows: Sequence[Any], types: Mapping[str, Any]) -> Any:
    """Return columns of rows as a pyarrow table, without a step through Python; `None` if the rows are not Arrow's.

    Args:
        rows: Rows, or rows of several blocks.
        types: Column → its pyarrow type in the result; `None` for that of its values.

    Raises:
        DataError: Values do not fit the type.
    """
    import pyarrow as arrow

    batches = getattr(rows, "batches", None)
    if batches is None or not types or any(name not in batch.schema.names for batch in batches for name in types):
        return None
    columns = {}
    for name, kind in types.items():
        parts = [batch.column(name) for batch in batches]
        try:
            columns[name] = arrow.chunked_array([_storable(one) if kind is None else one.cast(kind) for one in parts])
        except arrow.ArrowException as error:
            raise DataError(f"the column {name!r} of the data (keys=) is no {kind}: {str(error).strip()}") from error
    return arrow.table(columns)


def _storable(column: Any) -> Any:
    """Return a column of tensors as one of lists; others unchanged."""
    import pyarrow as arrow

    if not isinstance(column.type, arrow.BaseExtensionType):
        return column
    values = column.to_pylist()
    is_even = len({getattr(one, "shape", None) for one in values}) == 1
    return _as_array(np.stack(values) if is_even and isinstance(values[0], np.ndarray) else values)


def unify_schemas(schemas: Sequence[Any], maker: str = "the data") -> Any:
    """Return one pyarrow schema for tables of several, with types that hold the values of all.

    Args:
        schemas: The schemas.
        maker: What made the columns, for the error.

    Raises:
        DataError: There is no such type for a column.
    """
    import pyarrow as arrow

    try:
        return arrow.unify_schemas(schemas, promote_options="permissive")
    except arrow.ArrowException as error:
        what = f"{maker}: no one type holds the values of a column in all batches: {str(error).strip()}"
        raise DataError(f"{what}: give values of one type") from error


def has_unknown_type(kind: Any) -> bool:
    """Return True if a pyarrow type was made from `None` or empty lists alone, at any depth."""
    import pyarrow as arrow

    types = arrow.types
    if types.is_struct(kind):
        return any(has_unknown_type(one.type) for one in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return has_unknown_type(kind.value_type)
    return bool(types.is_null(kind))


def as_table(columns: Mapping[str, Any], types: Mapping[str, Any], named: Callable[[str], str] = _named) -> Any:
    """Return columns as a pyarrow table.

    Args:
        columns: Name → one value per row: a tensor or array whose first dim is the row, a pyarrow array, or a list of
            values or tensors. Rows of more dims become lists, bfloat16 and float8 become float32.
        types: Name → pyarrow type, for columns whose type is known.
        named: Makes of a name what errors call the column.

    Raises:
        DataError: Values make no column; the error names it.
    """
    import pyarrow as arrow

    made = {}
    for name, values in columns.items():
        try:
            is_made = name not in types or isinstance(values, arrow.ChunkedArray)
            made[name] = _as_array(values) if is_made else arrow.array(values, type=types[name])
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{named(name)} cannot be written: {str(error).strip()}") from error
    return arrow.table(made)


def _as_array(values: Any) -> Any:
    import pyarrow as arrow

    if isinstance(values, arrow.Array | arrow.ChunkedArray):
        return values
    if isinstance(values, Sequence) and values and all(isinstance(one, torch.Tensor) for one in values):
        if len({one.shape for one in values}) > 1:
            return arrow.array([_as_numpy(one) for one in values])
        values = torch.stack(tuple(values))
    if isinstance(values, torch.Tensor):
        values = _as_numpy(values)
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return arrow.array(values)
    if values.size > _MAX_ELEMENTS:
        raise ValueError(f"a batch of {values.size} numbers: take a smaller batch_size, or return fewer from fn")
    array = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for depth in range(values.ndim - 1, 0, -1):
        length = int(np.prod(values.shape[:depth]))
        offsets = np.arange(length + 1, dtype=np.int32) * values.shape[depth]
        array = arrow.ListArray.from_arrays(arrow.array(offsets), array)
    return array


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError("it is a sparse or nested tensor: return a dense one, tensor.to_dense()")
    if tensor.is_complex():
        raise ValueError(f"it is {tensor.dtype}: return two columns, tensor.real and tensor.imag")
    tensor = tensor.detach().cpu()
    is_known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
    return (tensor if is_known else tensor.float()).contiguous().numpy()


def same_columns(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema in its order, with the table's own types.

    Raises:
        DataError: It has other columns.
    """
    if set(table.schema.names) != set(schema.names):
        raise DataError(f"rows have the columns {table.schema.names}, and rows before them had {schema.names}")
    return table.select(schema.names)


def cast_table(table: Any, schema: Any, named: Callable[[str], str] = _named) -> Any:
    """Return a table with the columns and types of the run's first batch.

    Args:
        table: The table.
        schema: The columns and types.
        named: Makes of a name what errors call the column.

    Raises:
        DataError: Columns differ, or values do not fit the types.
    """
    import pyarrow as arrow

    table = same_columns(table, schema)
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        try:
            columns.append(table[field.name].cast(field.type))
        except arrow.ArrowException as error:
            held = table.schema.field(field.name).type
            what = f"{named(field.name)} holds {held}, and its type is {field.type}, that of the first batches"
            raise DataError(f"{what}: give values of one type ({str(error).strip()})") from error
    return arrow.table(columns, schema=schema)


def join_tables(tables: Sequence[Any]) -> Any:
    """Return the rows of pyarrow tables of the same columns as one table. Copies a column only if its types differ.

    Raises:
        DataError: No type holds the values of a column.
    """
    import pyarrow as arrow

    try:
        return arrow.concat_tables(tables, promote_options="permissive")
    except arrow.ArrowException as error:
        raise DataError(f"rows of a column cannot be joined: {str(error).strip()}: give values of one type") from error


def in_order(tables: Sequence[Any], places: Sequence[int]) -> Any:
    """Return the rows of several tables as one table, row i at `places[i]`."""
    return join_tables(tables).take(np.argsort(np.asarray(places)))
