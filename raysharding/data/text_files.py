"""JSON Lines and CSV files as blocks of rows, found in one pass over the files, then read by byte ranges."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from raysharding.checkpoint.storage import normal_path
from raysharding.data.arrow_rows import TableReader, check_whole, kind_of, schema_as_text, schema_from_text
from raysharding.data.collate import KnownColumns
from raysharding.data.files import DataPath, RowFiles, chosen_columns, reading
from raysharding.data.source import Reader
from raysharding.errors import DataError

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")
"""Endings of the files that `TextFiles` opens."""
_READ_BYTES = 8 << 20
_BLOCK_BYTES = 256 << 10
_BLOCK_ROWS = 512


@dataclass(frozen=True)
class TextFiles(RowFiles):
    """JSON Lines or CSV files. A block is at most 256 KiB or 512 lines, and at least one.

    Memory: a reader holds the rows of one block as Arrow columns. The source itself holds about 200 bytes for each
    block, and no rows: they are parsed anew in each epoch, and in each evaluation of a `fit`.
    """

    blocks: tuple[tuple[int, int, int, int], ...]
    """Block → number of its file, first byte, number of bytes, number of rows."""
    schema: str
    """Serialized pyarrow schema of all blocks, as base64."""

    @classmethod
    def open(
        cls, source: DataPath, files: tuple[str, ...], whole: Collection[str] | None, known: KnownColumns | None
    ) -> Self:
        """Read the files once, to find rows and types, those that fit the whole column; see `RowFiles.open`.

        A column that is not read may hold values of any types.
        """
        import pyarrow as arrow

        wanted = source.columns or (None if known is None else known.names)
        directory = normal_path(source.path)
        found = cls(directory, files, None, (), "")
        blocks: list[tuple[int, int, int, int]] = []
        types: dict[str, Any] = {}
        for number, file in enumerate(files):
            names: list[str] | None = None
            for start, data in _blocks(found._handle(file), file):
                with reading(file):
                    table = _inferred(file, data, names, wanted)
                if names is None and _is_csv(file):
                    names = table.schema.names
                    if types and names != list(types):
                        raise DataError(f"has the columns {names}, but {files[0]} has {list(types)}", path=file)
                _merge(types, table.schema, file, wanted)
                blocks.append((number, start, len(data), table.num_rows))
        if not any(rows for *_, rows in blocks):
            raise DataError("has no rows", path=directory)
        kinds = {name: kind_of(kind) for name, kind in types.items()}
        columns = chosen_columns(source, kinds, known)
        check_whole({name: kinds[name] for name in columns or kinds}, whole or (), path=directory)
        return cls(directory, files, columns, tuple(blocks), schema_as_text(arrow.schema(types)))

    def check_seen(self) -> None:
        """See `RowFiles.check_seen`. Reads the size of the first file, which may have grown."""
        end = max(start + num_bytes for file, start, num_bytes, _ in self.blocks if file == self.blocks[0][0])
        path = self.files[self.blocks[0][0]]
        with reading(path):
            size = self._handle(path).size()
        if size < end:
            raise DataError(f"has {size} bytes here, and {end} on rank 0", path=path)

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of rows of each block."""
        return np.array([rows for *_, rows in self.blocks], dtype=np.int64)

    def read(self, block: int) -> Reader:
        """Return a reader at the first row of a block.

        Raises:
            DataError: The file is missing, or was changed.
        """
        number, start, num_bytes, rows = self.blocks[block]
        file = self.files[number]
        schema = schema_from_text(self.schema)
        with reading(file):
            data = self._handle(file).read_at(num_bytes, start)
            is_first = block == 0 or self.blocks[block - 1][0] != number
            names = None if is_first or not _is_csv(file) else schema.names
            table = _parsed(file, data, names, schema, self.columns)
        if table.num_rows != rows:
            raise DataError("holds other rows than before: was it written anew meanwhile?", path=file)
        return TableReader(table)


def _is_csv(file: str) -> bool:
    return file.endswith(".csv")


def _blocks(handle: Any, file: str) -> Iterator[tuple[int, bytes]]:
    """Yield first byte and contents of the blocks of a file, whole lines each."""
    begin, rest, size = 0, b"", handle.size()
    while begin < size:
        with reading(file):
            more = handle.read_at(_READ_BYTES, begin + len(rest))
        if not more:
            raise DataError("became shorter while it was read", path=file)
        data, start = rest + more, 0
        for end in _cuts(data, is_quoted=_is_csv(file), is_last=begin + len(data) >= size):
            yield begin + start, data[start:end]
            start = end
        begin, rest = begin + start, data[start:]


def _cuts(data: bytes, *, is_quoted: bool, is_last: bool) -> Iterator[int]:
    """Yield the ends of the blocks of some bytes that begin with a line; the last line may be incomplete.

    Args:
        data: The bytes.
        is_quoted: True if a newline in double quotes ends no line.
        is_last: True at the end of the file, which ends a line.
    """
    values = np.frombuffer(data, dtype=np.uint8)
    is_end = values == ord("\n")
    if is_quoted:
        is_end &= np.cumsum(values == ord('"')) % 2 == 0
    if is_last:
        is_end[-1] = True
    ends = np.flatnonzero(is_end) + 1
    start = first = 0
    while first < len(ends):
        within = int(np.searchsorted(ends, start + _BLOCK_BYTES, side="right"))
        first = max(first + 1, min(within, first + _BLOCK_ROWS))
        start = int(ends[first - 1])
        yield start


def _parsed(file: str, data: bytes, names: list[str] | None, schema: Any, columns: Collection[str] | None) -> Any:
    """Return the rows of a block as a table.

    Args:
        file: Path of the file, which says the format.
        data: Whole lines.
        names: Columns of a CSV file; `None` for its first block, which begins with them.
        schema: Types of all columns; `None` to infer them.
        columns: Columns to return; `None` for all.
    """
    import pyarrow as arrow
    from pyarrow import csv
    from pyarrow import json as arrow_json

    size = max(len(data), 1)
    if _is_csv(file):
        return csv.read_csv(
            arrow.BufferReader(data),
            csv.ReadOptions(use_threads=False, block_size=size, column_names=names),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(column_types=schema, include_columns=None if columns is None else list(columns)),
        )
    if schema is None:
        options = arrow_json.ParseOptions()
    else:
        wanted = arrow.schema([one for one in schema if columns is None or one.name in columns])
        options = arrow_json.ParseOptions(explicit_schema=wanted, unexpected_field_behavior="ignore")
    reading_options = arrow_json.ReadOptions(use_threads=False, block_size=size)
    return arrow_json.read_json(arrow.BufferReader(data), reading_options, options)


def _inferred(file: str, data: bytes, names: list[str] | None, wanted: Collection[str] | None) -> Any:
    """Return the rows of a block as a table, with the types that its values have.

    pyarrow refuses a block of JSON in which a column's type changes, and cannot be told to infer some columns only:
    then the values of columns that are not wanted become nulls first.
    """
    import pyarrow as arrow

    try:
        return _parsed(file, data, names, None, None)
    except arrow.ArrowInvalid:
        if wanted is None or _is_csv(file):
            raise
        try:
            rows = [json.loads(line) for line in data.splitlines() if line.strip()]
            kept = [{name: one if name in wanted else None for name, one in row.items()} for row in rows]
        except (ValueError, AttributeError):  # no JSON, or no object: pyarrow's error says where
            kept = None
        if kept is None:
            raise
        return _parsed(file, "\n".join(map(json.dumps, kept)).encode(), names, None, None)


def _merge(types: dict[str, Any], schema: Any, file: str, wanted: Collection[str] | None) -> None:
    """Widen the types of the wanted columns so that they hold the values of one more block."""
    import pyarrow as arrow

    for one in schema:
        before = types.setdefault(one.name, one.type)
        if before == one.type or (wanted is not None and one.name not in wanted):
            continue
        both = [arrow.schema([(one.name, kind)]) for kind in (before, one.type)]
        try:
            types[one.name] = arrow.unify_schemas(both, promote_options="permissive").field(0).type
        except arrow.ArrowException as error:
            # Text that looks like a time is one in some blocks; values of CSV are all text.
            is_time = any(map(arrow.types.is_temporal, (before, one.type)))
            if not _is_csv(file) and not (is_time and arrow.string() in (before, one.type)):
                what = f"the column {one.name!r} holds {kind_of(one.type)}, and {kind_of(before)} in earlier rows"
                raise DataError(what, path=file) from error
            types[one.name] = arrow.string()
