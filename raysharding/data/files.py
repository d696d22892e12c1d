"""Files of rows that have not been opened: which they are, and how they are opened, on local disks and in stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from raysharding.checkpoint.storage import DEFAULT_REMOTE, connect, is_remote
from raysharding.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".csv", ".json")
"""Endings of files of rows. Of a directory, the files with the first of these that it has are read."""
_HANDLES = 32


@dataclass(frozen=True)
class DataPath:
    """Files of rows: Parquet, JSON Lines or CSV."""

    path: str
    """A file, or a directory of files: a local path or a URI."""
    columns: tuple[str, ...] | None = None
    """Columns to read; `None` for all."""


def list_files(directory: str) -> tuple[str, ...]:
    """Return the paths of the files of rows inside their file system, sorted; all have the same suffix.

    Args:
        directory: A directory, or one file, as a normal path or URI.

    Raises:
        DataError: There is no such file.
    """
    import pyarrow.fs as arrow_fs

    with reading(directory):
        system, inside = connected(directory)
        info = system.get_file_info(inside)
        if info.type == arrow_fs.FileType.File:
            return (inside,)
        if info.type == arrow_fs.FileType.NotFound:
            raise DataError("is not there, as rank 0 sees it", path=directory)
        found = system.get_file_info(arrow_fs.FileSelector(inside, recursive=True))
    hidden = ("_", ".")
    shown = [one.path for one in found if one.is_file and not one.path.rpartition("/")[2].startswith(hidden)]
    for suffix in SUFFIXES:
        files = tuple(sorted(path for path in shown if path.endswith(suffix)))
        if files:
            return files
    raise DataError(f"holds no {', '.join(SUFFIXES)} file", path=directory)


@lru_cache(maxsize=8)
def connected(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory, and the path inside the file system."""
    if is_remote(directory):
        return connect(directory, DEFAULT_REMOTE)
    import pyarrow.fs as arrow_fs

    return arrow_fs.LocalFileSystem(), directory


def shared_handle(handles: dict[str, Any], directory: str, file: str) -> Any:
    """Return an open file that readers share; it is closed with its last reader.

    Args:
        handles: The open files, by path.
        directory: See `connected`.
        file: Path inside the file system.
    """
    if file not in handles:
        while len(handles) >= _HANDLES:
            handles.pop(next(iter(handles)))
        handles[file] = connected(directory)[0].open_input_file(file)
    return handles[file]


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert errors of pyarrow into a `DataError` that names the file."""
    import pyarrow as arrow

    try:
        yield
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"cannot be read: {str(error).strip()}", path=path) from error
