"""Output of `predict`: a directory with a Parquet file for each part of the rows, or a table for each part.

Note [Parts]: the rows are cut into parts of adjacent rows. One rank computes a part, and writes it to one file, which
has the number of the part's first row in its name: the files in the order of their names hold the rows in the order of
the data. A file gets its name when it is complete (a rename, or a copy within a store): a directory holds whole parts
only, whenever its writers are killed, and a later run computes the parts without a file. An abort removes what has a
temporary name, and nothing else. Two runs that compute one part write the same rows, and the last file replaces the
other.

Note [Claims]: the record names the run that computes the parts. Neither stores nor network file systems have an atomic
"create if missing" that pyarrow offers, so a run puts a file of its own first, and then lists: of two runs at least one
sees the other, and ends. A run that is resumed gets the name of the new one, and the old one ends in an error.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from raysharding.batch import split_rows
from raysharding.checkpoint.storage import (
    Output,
    is_remote,
    join_path,
    open_output,
    read_bytes,
    split_path,
    storage_of,
)
from raysharding.data.arrow_rows import join_tables
from raysharding.data.files import connected, reading
from raysharding.errors import CheckpointError, DataError, shown

RECORD_NAME: Final = "_predict.json"
"""File that says which run wrote the parts. Readers of Parquet directories skip names with `_` or `.`."""
_FINGERPRINTS: Final = {
    "weights": ("the model's weights or config differ from those", ""),
    "data": (
        "the rows differ from those",
        ": it is other data or another order, other columns=, or files written anew",
    ),
    "code": ("fn= or collate_fn= differs from that", ", in its code, its defaults or a value that it closes over"),
}
"""Entry of the record whose values say nothing to people → what an error says of another value."""
_COUNTS: Final = ("num_rows", "num_parts")
_CLAIM: Final = ".claim-"
_TEMPORARY: Final = (".part-", f".{RECORD_NAME}.")
_GROUP_ROWS: Final = 4096
_GROUP_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent rows of the data, which one rank computes."""

    start: int
    """Number of the first row."""
    num_rows: int
    """Number of rows, 1 or more."""


def cut_parts(num_rows: int, num_parts: int) -> list[Part]:
    """Cut rows into parts whose sizes differ by at most one row.

    Args:
        num_rows: Number of rows.
        num_parts: Number of parts, from 1 to `num_rows`.
    """
    sizes = split_rows(num_rows, num_parts)
    return [Part(int(end) - size, size) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


class PartTable:
    """The table of a part that stays in memory; has the methods of `PartWriter`."""

    def __init__(self) -> None:
        """Begin without rows."""
        self._tables: list[Any] = []
        self.table: Any = None
        """The whole part, once finished."""

    def write(self, table: Any) -> None:
        """Add rows."""
        self._tables.append(table)

    def finish(self) -> None:
        """Join the rows."""
        self.table = join_tables(self._tables).combine_chunks()

    def abort(self) -> None:
        """Drop the rows."""
        self._tables.clear()


class PartWriter:
    """Writes the Parquet file of a part. Holds a row group: 4096 rows, or 16 MiB."""

    def __init__(self, path: str, schema: Any) -> None:
        """Create the file under a temporary name.

        Args:
            path: Path of the file, normal or a URI.
            schema: Of all tables.

        Raises:
            DataError: The file cannot be created.
        """
        import pyarrow.parquet as parquet

        self._tables: list[Any] = []
        with writing(path):
            self._file = _AtomicFile(path)
            self._path = path
            self._writer = parquet.ParquetWriter(self._file, schema)

    def write(self, table: Any) -> None:
        """Add rows.

        Raises:
            DataError: The file cannot be written.
        """
        self._tables.append(table)
        num_rows = sum(one.num_rows for one in self._tables)
        if num_rows >= _GROUP_ROWS or sum(one.nbytes for one in self._tables) >= _GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        """Give the file its name; it is on disk before.

        Raises:
            DataError: The file cannot be written.
        """
        self._flush()
        with writing(self._path):
            self._writer.close()
            self._file.commit()

    def abort(self) -> None:
        """Remove the file."""
        self._file.abort()

    def _flush(self) -> None:
        if self._tables:
            with writing(self._path):
                self._writer.write_table(join_tables(self._tables))
            self._tables.clear()


class _AtomicFile(io.RawIOBase):
    """A file that is whole when it gets its name."""

    def __init__(self, path: str) -> None:
        super().__init__()
        directory, name = split_path(path)
        self._path = path
        # In a store, too: pyarrow has no abort of an upload, and closing it would replace another run's file.
        self._temporary = join_path(directory, f".{name}.{secrets.token_hex(4)}")
        self._output: Output | None = open_output(self._temporary)
        self._length = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._output is not None:  # after `abort`, pyarrow's writer still writes a footer when it is collected
            self._output.write(view, self._length, None)
        self._length += view.nbytes
        return view.nbytes

    def commit(self) -> None:
        output, self._output = self._output, None
        assert output is not None, "not yet committed"
        output.finish()
        if storage_of(self._path).find(self._temporary).kind == "missing":
            what = "its file is gone before it had its name: another predict has continued this one in the meantime"
            raise CheckpointError(f"{what}; wait until that one ends", path=self._path)
        storage_of(self._path).move(self._temporary, self._path)

    def abort(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.abort()


def writing(path: str) -> AbstractContextManager[None]:
    """Convert errors of storage and pyarrow into a `DataError` that names the file."""
    return reading(path, "cannot be written")


@dataclass
class PartFiles:
    """The files of a run in its directory, a local one that all nodes share or the URI of one."""

    directory: str
    """Normal path or URI."""
    run: str = ""
    """Name of the run, once this process has begun it."""

    def begin(self, record: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
        """Begin a run in the directory, or find the one that is to go on. One rank calls this.

        Args:
            record: What the run computes, as JSON values: `run` is its name, `num_rows` and `num_parts` say how the
                rows are cut, and all else must be equal in a run that goes on.
            resume: Continue the run that is there, if there is one. A run of the same name continues in any case.

        Returns:
            The record of the run, with its own `num_parts`.

        Raises:
            DataError: The directory holds other files, or a run that is not to go on or computes something else; or
                another run begins there at the same time.
        """
        with writing(self.directory):
            storage = storage_of(self.directory)
            kind = storage.find(self.directory).kind
            if kind not in ("directory", "missing"):
                raise DataError("is not a directory: the rows are written to a directory of files", path=self.directory)
            names = storage.list_names(self.directory) if kind == "directory" else []
            if RECORD_NAME in names:
                return self._continued(record, resume=resume)
            others = [name for name in names if not name.startswith(".")]
            if others:
                what = f"holds {', '.join(others[:3])}, which no predict wrote: give another directory as output="
                raise DataError(what, path=self.directory)
            if not is_remote(self.directory):
                os.makedirs(self.directory, exist_ok=True)
            claim = join_path(self.directory, f"{_CLAIM}{secrets.token_hex(4)}")
            storage.put(claim, b"")
            try:
                seen = [name for name in storage.list_names(self.directory) if name.startswith((_CLAIM, RECORD_NAME))]
                if len(seen) > 1:
                    what = f"another predict begins here at the same time ({', '.join(seen)}): give each its own "
                    raise DataError(f"{what}output=, or remove these files if no other runs", path=self.directory)
                return self._write_record(record)
            finally:
                storage.remove(claim)

    def _write_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        self.run = record["run"]
        file = _AtomicFile(join_path(self.directory, RECORD_NAME))
        file.write(json.dumps(record, indent=1).encode())
        file.commit()
        return dict(record)

    def _continued(self, record: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
        stored = self._read_record()
        is_own = stored["run"] == record["run"]
        if not is_own and not resume:
            what = f"holds rows of an earlier predict ({stored['num_rows']} in all): resume=True continues it"
            raise DataError(f"{what}; else remove the directory, or give another one", path=self.directory)
        for name in (name for name in record if name not in ("run", "num_parts")):
            was = stored.get(name)
            if was != record[name]:
                what = f"the run that is to be resumed had {name}={was!r}, and this one has {record[name]!r}"
                if name in _FINGERPRINTS:
                    what = " of the run that is to be resumed".join(_FINGERPRINTS[name])
                raise DataError(f"{what}: pass the same, or give another directory as output=", path=self.directory)
        return self._write_record(stored | {"run": record["run"]})

    def _read_record(self) -> dict[str, Any]:
        path = join_path(self.directory, RECORD_NAME)
        file = storage_of(self.directory).open(path)
        try:
            stored = json.loads(read_bytes(file, 0, file.stat.num_bytes))
        except ValueError as error:  # of JSON, or of its encoding
            stored = str(error)
        finally:
            file.close()
        if isinstance(stored, dict) and "run" in stored and all(type(stored.get(one)) is int for one in _COUNTS):
            return stored
        what = f"is damaged ({shown(stored)}), so the run in this directory cannot be continued"
        raise DataError(f"{what}: remove the directory, or give another one as output=", path=path)

    def path_of(self, part: Part) -> str:
        """Return the path of a part's file."""
        return join_path(self.directory, _name(part))

    def find(self, parts: Sequence[Part]) -> tuple[list[Part], Any]:
        """Return the parts that have a whole file, and the pyarrow schema of the first file, if any. One rank calls it.

        Removes the temporary files of writers that were killed.
        """
        import pyarrow.parquet as parquet

        storage = storage_of(self.directory)
        with writing(self.directory):
            names = set(storage.list_names(self.directory))
            system, inside = connected(self.directory)
            for name in names:
                if name.startswith(_TEMPORARY):
                    storage.remove(join_path(self.directory, name))

            def footer(part: Part) -> Any:
                try:
                    metadata = parquet.read_metadata(system.open_input_file(f"{inside}/{_name(part)}"))
                except ValueError:  # cut off, by other than a predict: it has no footer
                    return None
                return metadata if metadata.num_rows == part.num_rows else None

            there = [part for part in parts if _name(part) in names]
            footers = storage.each(footer, there)
        whole = [part for part, found in zip(there, footers, strict=True) if found is not None]
        schema = next((found.schema.to_arrow_schema() for found in footers if found is not None), None)
        return whole, schema

    def check_complete(self, parts: Sequence[Part]) -> None:
        """Check that every part has its file, as this rank sees the directory, and that no other run has taken it.

        Raises:
            DataError: Files are missing, or may be another run's.
        """
        with writing(self.directory):
            names = set(storage_of(self.directory).list_names(self.directory))
            if RECORD_NAME in names and self._read_record()["run"] != self.run:
                what = "another predict has continued this one meanwhile, and writes the same files: wait until it ends"
                raise DataError(f"{what}, or end it and pass resume=True", path=self.directory)
        missing = [part for part in parts if _name(part) not in names]
        if missing:
            what = f"lacks {len(missing)} of {len(parts)} files on rank 0's node, {_name(missing[0])} first"
            cure = "give a directory that all ranks' nodes share, or a URI"
            raise DataError(f"{what}, though the ranks have written all: {cure}", path=self.directory)


def _name(part: Part) -> str:
    return f"part-{part.start:012d}.parquet"
