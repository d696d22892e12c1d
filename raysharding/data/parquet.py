"""Parquet files as blocks of rows, read through pyarrow from local disks and object stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from raysharding.checkpoint.storage import normal_path
from raysharding.data.arrow_rows import ArrowRows
from raysharding.data.column_kinds import check_whole, kind_of
from raysharding.data.files import DataPath, list_files, reading, shared_handle
from raysharding.data.source import BlockSource, Reader
from raysharding.errors import DataError

_CHUNK_ROWS = 256
_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class ParquetFiles(BlockSource):
    """The row groups of Parquet files. A reader holds a decoded chunk of 256 rows, and pyarrow's buffers."""

    directory: str
    """Directory or file, as the user gave it."""
    files: tuple[str, ...]
    """Paths inside the file system, sorted."""
    groups: tuple[tuple[int, ...], ...]
    """File → number of rows of each row group."""
    columns: tuple[str, ...] | None
    """Columns to read."""
    _opened: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _handles: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, source: DataPath, whole: Collection[str] | None = ()) -> Self:
        """List the files and read their footers. One rank calls this.

        Args:
            source: Path and columns.
            whole: Names of columns that must hold integers if they exist. `None`: columns may be of any type, which may
                differ between files.

        Raises:
            DataError: There is no file, a file is no Parquet file, columns or their types differ between files, a
                column is missing, or a column of ids holds floats.
        """
        directory = normal_path(source.path)
        found = cls(directory, list_files(directory), (), source.columns)
        groups: list[tuple[int, ...]] = []
        names: list[str] | None = None
        first: dict[str, str] = {}
        for file in found.files:
            metadata = found._footer(file)
            groups.append(_group_rows(metadata))
            schema = metadata.schema.to_arrow_schema()
            here = schema.names
            names = here if names is None else names
            if here != names:
                raise DataError(f"has the columns {here}, but {found.files[0]} has {names}", path=file)
            if whole is None or not metadata.num_rows:
                continue  # pandas writes no types for columns without values
            kinds = {one.name: kind_of(one.type) for one in schema if one.name in (source.columns or here)}
            check_whole(kinds, whole, path=file)
            first = first or kinds
            for name, kind in kinds.items():
                if kind != first[name]:
                    what = f"the column {name!r} holds {kind}, but {first[name]} in {found.files[0]}"
                    raise DataError(f"{what}: write all files with one schema", path=file)
        missing = [name for name in source.columns or () if name not in (names or ())]
        if missing:
            raise DataError(f"has no column {', '.join(map(repr, missing))}: it has {names}", path=directory)
        if not any(map(sum, groups)):
            raise DataError("has no rows", path=directory)
        return cls(directory, found.files, tuple(groups), source.columns)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Make the source from `as_dict` of another rank."""
        groups, columns = tuple(map(tuple, fields["groups"])), fields["columns"]
        return cls(fields["directory"], tuple(fields["files"]), groups, None if columns is None else tuple(columns))

    def as_dict(self) -> dict[str, Any]:
        """Return the source as a JSON value."""
        return {
            "directory": self.directory,
            "files": list(self.files),
            "groups": [list(rows) for rows in self.groups],
            "columns": None if self.columns is None else list(self.columns),
        }

    def check_seen(self) -> None:
        """Check that this process sees the same files as rank 0. Reads one footer.

        Raises:
            DataError: The first file is missing or differs.
        """
        rows = _group_rows(self._footer(self.files[0]))
        if rows != self.groups[0]:
            raise DataError(
                f"has row groups of {rows} rows here, and of {self.groups[0]} on rank 0", path=self.files[0]
            )

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of rows of each row group of each file."""
        return np.array([rows for file in self.groups for rows in file], dtype=np.int64)

    def read(self, block: int) -> Reader:
        """Return a reader at the first row of a row group.

        Raises:
            DataError: The file is missing or damaged.
        """
        for file, groups in zip(self.files, self.groups, strict=True):
            if block < len(groups):
                return _GroupReader(self, file, block)
            block -= len(groups)
        raise AssertionError("no such block")

    def open_file(self, file: str) -> Any:
        """Return a `pyarrow.parquet.ParquetFile`, whose footer and descriptor all readers of the file share."""
        import pyarrow.parquet as parquet

        footer = self._footer(file)
        with reading(file):
            # Buffered: otherwise a reader holds whole column chunks, and there is a reader per row of a batch.
            return parquet.ParquetFile(self._handle(file), metadata=footer, pre_buffer=False, buffer_size=_BUFFER_BYTES)

    def _footer(self, file: str) -> Any:
        import pyarrow.parquet as parquet

        if file not in self._opened:
            with reading(file):
                self._opened[file] = parquet.read_metadata(self._handle(file))
        return self._opened[file]

    def _handle(self, file: str) -> Any:
        """Return an open file that readers share; it is closed with its last reader."""
        return shared_handle(self._handles, self.directory, file)

    def __getstate__(self) -> dict[str, Any]:
        return self.as_dict()

    def __setstate__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(type(self).from_dict(fields).__dict__)


class _GroupReader(Reader):
    """Reads a row group chunk by chunk."""

    def __init__(self, source: ParquetFiles, file: str, group: int) -> None:
        self._file = file
        self._opened = source.open_file(file)
        columns = None if source.columns is None else list(source.columns)
        # Threads of pyarrow would compete with the computation.
        self._chunks = self._opened.iter_batches(_CHUNK_ROWS, row_groups=[group], columns=columns, use_threads=False)
        self._chunk: Any = None
        self._next = 0

    def take(self, num_rows: int) -> Sequence[Any]:
        return ArrowRows([self._chunk.slice(start, length) for start, length in self._advance(num_rows)])

    def skip(self, num_rows: int) -> None:
        for _ in self._advance(num_rows):
            pass

    def _advance(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Advance by a number of rows; yield the range of rows in each chunk, while it is the current chunk."""
        while num_rows:
            if self._chunk is None or self._next == self._chunk.num_rows:
                with reading(self._file):
                    self._chunk, self._next = next(self._chunks, None), 0
                if self._chunk is None:
                    raise DataError("ended before its last row: was it written anew meanwhile?", path=self._file)
            length = min(num_rows, self._chunk.num_rows - self._next)
            yield self._next, length
            self._next += length
            num_rows -= length

    def close(self) -> None:
        self._opened.close()


def _group_rows(footer: Any) -> tuple[int, ...]:
    return tuple(footer.row_group(index).num_rows for index in range(footer.num_row_groups))
