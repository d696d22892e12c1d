"""JSON Lines and CSV files as blocks of rows, found in one pass over the files, then read by byte ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from raysharding.checkpoint.storage import normal_path
from raysharding.data.arrow_rows import check_whole, common_type, kind_of, schema_as_text
from raysharding.data.collate import KnownColumns
from raysharding.data.files import DataPath, RowFiles, check_names_differ, chosen_columns, reading
from raysharding.data.source import Reader, TableReader
from raysharding.errors import DataError
from raysharding.tree import leaves

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv")
"""Endings of the files that `TextFiles` opens."""
_READ_BYTES = 8 << 20
_BLOCK_BYTES = 256 << 10
_BLOCK_ROWS = 512
_MAX_ROW_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_FIELD = rb'(?>"[^"]*+(?>""[^"]*+)*+"[^,\r\n]*+|(?!")[^,\r\n]*+)'
_CSV_ROW = re.compile(rb"%b(?>,%b)*+(?>\r\n|\n|\r(?!\Z))" % (_FIELD, _FIELD))
"""A row as pyarrow's parser of CSV ends it: a quote opens a field only at its beginning, and two in it are one."""
_CODE = r"^\s*[+-]?(0[\dxX].*|\d{16,}\s*)$"
"""A number that begins with 0, or that int64 or float64 may change."""
_LONG_OR_PADDED = re.compile(rb"(?<![0-9A-Za-z./:_])0[0-9xX]|(?<![0-9.])[0-9]{16}")
"""Beginning of a text that may be such a number; not within a float, a date, a time or a word."""


@dataclass(frozen=True)
class TextFiles(RowFiles):
    """JSON Lines or CSV files. A block is at most 256 KiB or 512 lines, and at least one.

    Memory: a reader holds the rows of one block as Arrow columns. The source itself holds about 200 bytes for each
    block, and no rows: they are parsed anew in each epoch, and in each evaluation of a `fit`.
    """

    blocks: tuple[tuple[int, int, int, int], ...]
    """Block → number of its file, first byte, number of bytes, number of rows."""

    @classmethod
    def open(
        cls, source: DataPath, files: tuple[str, ...], whole: Collection[str] | None, known: KnownColumns | None
    ) -> Self:
        """Read the files once, to find rows and types, those that fit the whole column.

        A column that is not read may hold values of any types. Times and dates are text, as they are in the file. A
        column of CSV is text if an integer in it begins with 0, does not fit int64, or is another number as float64.
        """
        import pyarrow as arrow

        read = None if known is None or known.names is None else {*known.names, *known.also}
        wanted = source.columns or read
        directory = normal_path(source.path)
        draft = cls(directory, files, None, "", ())
        blocks: list[tuple[int, int, int, int]] = []
        types: dict[str, Any] = {}
        inexact: dict[str, str] = {}
        codes: set[str] = set()
        for number, file in enumerate(files):
            names: list[str] | None = None
            line = 1
            for start, data in _blocks(draft._handle(file), file):
                with _naming_lines(file, data, line):
                    table = _inferred(file, data, names, wanted)
                if names is None and _is_csv(file):
                    names = table.schema.names
                    check_names_differ(names, file)
                    if types and names != list(types):
                        raise DataError(f"has the columns {names}, but {files[0]} has {list(types)}", path=file)
                _merge(types, table.schema, file, wanted)
                for name, value in _unlike_numbers(file, data, table, names):
                    inexact.setdefault(name, f"{value}, in {file}")
                    codes |= {name} if _is_code(value) else set()
                blocks.append((number, start, len(data), table.num_rows))
                line += data.count(b"\n")
        if not any(rows for *_, rows in blocks):
            raise DataError("has no rows", path=directory)
        for name in inexact.keys() & (types.keys() if wanted is None else wanted):
            is_float = "floats" in kind_of(types[name])
            if _is_csv(files[0]) and (is_float or name in codes):
                types[name] = arrow.string()
            elif is_float:
                what = f"the column {name!r} holds floats and an integer that is no float, {inexact[name]}"
                raise DataError(f"{what}: write it as text, or as an integer within int64", path=directory)
        kinds = {name: kind_of(kind) for name, kind in types.items()}
        columns = chosen_columns(source, kinds, known)
        check_whole({name: kinds[name] for name in columns or kinds}, whole or (), path=directory)
        return cls(directory, files, columns, schema_as_text(arrow.schema(types)), tuple(blocks))

    def check_seen(self) -> None:
        """Check that this process sees the same files as rank 0, by the size of the first one, which may have grown."""
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
        schema = self.types
        with reading(file):
            data = self._handle(file).read_at(num_bytes, start)
            is_first = block == 0 or self.blocks[block - 1][0] != number
            names = None if is_first or not _is_csv(file) else schema.names
            table = _parsed(file, data, names, schema, self.columns)
        if table.num_rows != rows:
            raise DataError("holds other rows than before: was it written anew meanwhile?", path=file)
        return TableReader(table)


def _is_csv(file: str) -> bool:
    return file.lower().endswith(".csv")


def _blocks(handle: Any, file: str) -> Iterator[tuple[int, bytes]]:
    """Yield first byte and contents of the blocks of a file, whole rows each."""
    begin, rest, size = 0, b"", handle.size()
    while begin < size:
        if len(rest) > _MAX_ROW_BYTES:
            what = f"has a row of over {_MAX_ROW_BYTES >> 20} MiB that begins at byte {begin}"
            raise DataError(f"{what}: is a quote not closed?", path=file)
        with reading(file):
            more = handle.read_at(_READ_BYTES, begin + len(rest))
        if not more:
            raise DataError("became shorter while it was read", path=file)
        data, start = rest + more, 0
        for end in _cuts(data, _row_ends(file, data, begin), is_last=begin + len(data) >= size):
            yield begin + start, data[start:end]
            start = end
        begin, rest = begin + start, data[start:]


def _row_ends(file: str, data: bytes, begin: int) -> Any:
    """Return the ends of the whole rows of some bytes of a file, which begin with a row at byte `begin`; int64 [rows].

    A row of CSV may hold newlines in quotes. The last row of the file may lack a newline, and is then left out.
    """
    if not _is_csv(file) or (b'"' not in data and b"\n" in data):
        return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
    ends: list[int] = []
    start = len(_BOM) if begin == 0 and data.startswith(_BOM) else 0
    while match := _CSV_ROW.match(data, start):
        start = match.end()
        ends.append(start)
    return np.array(ends, dtype=np.int64)


def _cuts(data: bytes, ends: Any, *, is_last: bool) -> Iterator[int]:
    """Yield the ends of the blocks of some bytes that begin with a row.

    Args:
        data: The bytes.
        ends: Ends of the whole rows.
        is_last: True at the end of the file, which ends a row.
    """
    if is_last and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    start = first = 0
    while first < len(ends):
        within = int(np.searchsorted(ends, start + _BLOCK_BYTES, side="right"))
        first = max(first + 1, min(within, first + _BLOCK_ROWS))
        start = int(ends[first - 1])
        yield start


@contextmanager
def _naming_lines(file: str, data: bytes, line: int) -> Iterator[None]:
    """Convert an error of pyarrow, which counts rows of the block, into one that names the line of the file.

    Args:
        file: Path of the file.
        data: The block.
        line: Number of its first line, from 1.
    """
    import pyarrow as arrow

    try:
        with reading(file):
            yield
    except DataError as error:
        cause = error.__cause__
        match = re.search(r"(?:Row #|in row )(\d+)(: )?", str(cause)) if isinstance(cause, arrow.ArrowInvalid) else None
        if match is None:
            raise
        starts = [0, *_row_ends(file, data, 1).tolist()]
        # Rows of CSV are counted from 1, those of JSON from 0; neither counts empty lines.
        rows = [start for start in starts if data[start : start + 1] not in (b"\n", b"\r", b"")]
        place = rows[min(int(match[1]) - _is_csv(file), len(rows) - 1)]
        text = str(cause).replace(match[0], "").strip().rstrip(",")
        is_array = not _is_csv(file) and data.lstrip().startswith(b"[")
        hint = "; write a JSON array as lines, pandas.read_json(path).to_json(other, orient='records', lines=True)"
        raise DataError(
            f"cannot be read: line {line + data[:place].count(10)}: {text}{hint * is_array}", path=file
        ) from cause


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

    if names is not None and data.startswith(_BOM):  # a value of CSV: pyarrow drops such bytes at the beginning
        data = b"\n" + data
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


def _unlike_numbers(file: str, data: bytes, table: Any, names: list[str] | None) -> Iterator[tuple[str, str]]:
    """Yield (column, value) of an integer in a block that int64 or float64 would change, or that begins with 0."""
    import pyarrow as arrow
    from pyarrow import compute

    numbers = {one.name: kind for one in table.schema if "numbers" in (kind := kind_of(one.type)) or "floats" in kind}
    for name in numbers:
        for values in _integers(table[name].combine_chunks()):
            with np.errstate(invalid="ignore"):  # 2^63
                inexact = values[values.astype(np.float64).astype(values.dtype) != values]
            yield from ((name, str(one)) for one in inexact[:1])
    if not _LONG_OR_PADDED.search(data):
        return
    if _is_csv(file):
        texts = _parsed(file, data, names, arrow.schema([(name, arrow.string()) for name in numbers]), list(numbers))
        for name in numbers:
            found = texts[name].filter(compute.match_substring_regex(texts[name], _CODE)).to_pylist()
            unlike = [one for one in found if _is_code(one) or int(float(one)) != int(one)]
            yield from ((name, one) for one in (*filter(_is_code, unlike), *unlike)[:1])
    elif any("floats" in kind for kind in numbers.values()):
        rows = list(_objects(data.decode()))
        for name in numbers:
            leaf = (one for row in rows for _, one in leaves(row.get(name)) if type(one) is int)
            unlike = [one for one in leaf if _is_code(one) or int(float(one)) != one]
            yield from ((name, str(one)) for one in unlike[:1])


def _integers(column: Any) -> Iterator[Any]:
    """Yield the integers of a column, of its lists and of its records, as arrays."""
    import pyarrow as arrow

    if arrow.types.is_integer(column.type):
        yield column.drop_null().to_numpy(zero_copy_only=False)
    elif arrow.types.is_list(column.type):
        yield from _integers(column.flatten())
    elif arrow.types.is_struct(column.type):
        for one in column.flatten():
            yield from _integers(one)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON text, which may be several in a line, as pyarrow takes them."""
    decoder, place = json.JSONDecoder(), 0
    while match := re.compile(r"\s*(?=\S)").match(text, place):
        found, place = decoder.raw_decode(text, match.end())
        yield found


def _is_code(value: Any) -> bool:
    """Return True for a number that int64 would change: one that begins with 0, or an integer that is too large."""
    return re.match(r"\s*[+-]?0[\dxX]", str(value)) is not None or not -(2**63) <= int(value) < 2**63


def _without_times(kind: Any) -> Any:
    """Return a type in which what pyarrow takes for times and dates is text, at any depth."""
    import pyarrow as arrow

    if arrow.types.is_list(kind):
        return arrow.list_(_without_times(kind.value_type))
    if arrow.types.is_struct(kind):
        return arrow.struct([(one.name, _without_times(one.type)) for one in kind])
    return arrow.string() if arrow.types.is_temporal(kind) else kind


def _merge(types: dict[str, Any], schema: Any, file: str, wanted: Collection[str] | None) -> None:
    """Widen the types of the wanted columns so that they hold the values of one more block."""
    import pyarrow as arrow

    for one in schema:
        kind = _without_times(one.type)
        before = types.setdefault(one.name, kind)
        if before == kind or (wanted is not None and one.name not in wanted):
            continue
        common = common_type(before, kind)
        if common is None and not _is_csv(file):
            what = f"the column {one.name!r} holds {kind_of(kind)}, and {kind_of(before)} in earlier rows"
            raise DataError(what, path=file)
        types[one.name] = arrow.string() if common is None else common  # values of CSV are all text
