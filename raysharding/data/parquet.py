"""Parquet files as blocks of rows, read through pyarrow from local disks and object stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from raysharding.checkpoint.storage import normal_path
from raysharding.data.arrow_rows import ArrowRows, check_whole, common_schema, kind_of, schema_as_text
from raysharding.data.collate import KnownColumns
from raysharding.data.files import DataPath, RowFiles, check_names_differ, chosen_columns, reading
from raysharding.data.source import Reader
from raysharding.errors import DataError

_CHUNK_ROWS = 256
_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class ParquetFiles(RowFiles):
    """The row groups of Parquet files. A reader holds a decoded chunk of 256 rows, and pyarrow's buffers."""

    groups: tuple[tuple[int, ...], ...]
    """File → number of rows of each row group."""
    _opened: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(
        cls, source: DataPath, files: tuple[str, ...], whole: Collection[str] | None, known: KnownColumns | None
    ) -> Self:
        """Read the footers of all files."""
        directory = normal_path(source.path)
        draft = cls(directory, files, None, "", ())
        groups: list[tuple[int, ...]] = []
        names: list[str] | None = None
        columns: tuple[str, ...] | None = None
        first: dict[str, str] = {}
        schemas: list[tuple[str, Any]] = []
        for file in files:
            metadata = draft._footer(file)
            groups.append(_group_rows(metadata))
            schema = metadata.schema.to_arrow_schema()
            names = schema.names if names is None else names
            if schema.names != names:
                raise DataError(f"has the columns {schema.names}, but {files[0]} has {names}", path=file)
            check_names_differ(names, file)
            if not metadata.num_rows:
                continue  # pandas writes no types for columns without values
            schemas.append((file, schema))
            kinds = {one.name: kind_of(one.type) for one in schema}
            if not first:
                first, columns = kinds, chosen_columns(source, kinds, known)
            if whole is None:
                continue
            # Keys of `predict` have the types of `common_schema`, and the model does not see them.
            keys = () if known is None else {*known.also} - {*(known.names or ())}
            own = {name: kinds[name] for name in columns or kinds if name not in keys}
            check_whole(own, whole, path=file)
            for name, kind in own.items():
                if kind != first[name]:
                    what = f"the column {name!r} holds {kind}, but {first[name]} in {files[0]}"
                    raise DataError(f"{what}: write all files with one schema", path=file)
        if not first:
            raise DataError("has no rows", path=directory)
        return cls(directory, files, columns, schema_as_text(common_schema(schemas)), tuple(groups))

    def check_seen(self) -> None:
        """Check that this process sees the same files as rank 0, by the footer of the first one."""
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
