"""Files of rows: which they are, and how they are opened, on local disks and in stores."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self

from raysharding.checkpoint.storage import DEFAULT_REMOTE, is_remote, normal_path, remote_storage, root_of
from raysharding.data.arrow_rows import schema_from_text
from raysharding.data.collate import KnownColumns
from raysharding.data.source import BlockSource, HubRows
from raysharding.errors import CheckpointError, DataError

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".json")
"""Endings of files of rows. Of a directory, the files with the first of these that it has are read."""
_HUB_NAME = re.compile(r"(?P<name>[^:]+)(:(?P<split>[\w.%+\[\]:-]+))?")
_HANDLES = 32
_OTHER_SUFFIXES = [".gz", ".bz2", ".zst", ".xz", ".zip", ".arrow", ".feather", ".txt", ".tsv", ".xlsx", ".pkl"]
_CURE = "write Parquet, such as by pandas.DataFrame(rows).to_parquet(other); what is compressed, decompress"


@dataclass(frozen=True)
class DataPath:
    """Files of rows: Parquet, JSON Lines or CSV."""

    path: str
    """A file, or a directory of files: a local path or a URI."""
    columns: tuple[str, ...] | None = None
    """Columns to read; `None` for all."""
    others: tuple[str, ...] = ()
    """Paths of files or directories whose rows follow."""


@dataclass(frozen=True)
class RowFiles(BlockSource):
    """Files of rows of one format, whose blocks are known. A copy in another process opens the files for itself."""

    directory: str
    """Directory or file, as a normal path or URI."""
    files: tuple[str, ...]
    """Paths inside the file system, sorted."""
    columns: tuple[str, ...] | None
    """Columns to read; `None` for all. Other columns are not decoded, and where the format allows it not read."""
    schema: str
    """`common_schema` of all files, serialized, as base64."""
    _handles: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    @abstractmethod
    def open(
        cls, source: DataPath, files: tuple[str, ...], whole: Collection[str] | None, known: KnownColumns | None
    ) -> Self:
        """Find the blocks. One rank calls this.

        Args:
            source: Path and columns.
            files: Result of `list_files` for the path.
            whole: Names of columns that must hold integers if they exist. `None`: columns may be of any type.
            known: Leaves out the columns that the model does not take; `None`: none are left out.

        Raises:
            DataError: A file is not of the format, columns or their types differ, there are no rows, a column is
                missing, a column of ids holds floats, or the model takes no column.
        """

    @abstractmethod
    def check_seen(self) -> None:
        """Check that this process sees the same files as rank 0, by the first one.

        Raises:
            DataError: The first file is missing or differs.
        """

    @property
    def types(self) -> Any:
        """`common_schema` of all files."""
        return schema_from_text(self.schema)

    def as_dict(self) -> dict[str, Any]:
        """Return the source as a JSON value."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Make the source from `as_dict` of another rank."""
        return cls(**{name: _as_tuples(value) for name, value in found.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return self.from_dict, (self.as_dict(),)

    def _handle(self, file: str) -> Any:
        """Return an open file that readers share; up to `_HANDLES` stay open as long as the source lives."""
        if file not in self._handles:
            while len(self._handles) >= _HANDLES:
                self._handles.pop(next(iter(self._handles)))
            with reading(file):
                self._handles[file] = connected(self.directory)[0].open_input_file(file)
        return self._handles[file]


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def check_names_differ(names: Sequence[str], file: str) -> None:
    """Raise DataError if two columns of a file have one name: a row could hold only one of them."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"has more than one column {', '.join(map(repr, twice))}: rename or drop the others", path=file)


def chosen_columns(source: DataPath, kinds: Mapping[str, str], known: KnownColumns | None) -> tuple[str, ...] | None:
    """Return the columns to read of those that files have; `None` for all.

    Args:
        source: Path, and the user's choice.
        kinds: Column → kind, by `kind_of`.
        known: Leaves out the columns that the model does not take; `None`: none are left out.

    Raises:
        DataError: A column is missing, or the model takes none.
    """
    missing = [name for name in source.columns or () if name not in kinds]
    if missing:
        what = f"has no column {', '.join(map(repr, missing))}: it has {list(kinds)}"
        raise DataError(what, path=normal_path(source.path))
    if known is None:
        return source.columns
    return tuple(known.kept({name: kinds[name] == "text" for name in source.columns or kinds}))


def is_path(data: Any) -> bool:
    """Return True for a path object, a directory and a text with the ending of a file of rows; others may be rows."""
    if not isinstance(data, str):
        return isinstance(data, os.PathLike)
    return data.partition("?")[0].lower().endswith(SUFFIXES) or os.path.isdir(data)


def hub_name(text: str) -> HubRows | None:
    """Return the dataset that a text names: `org/name` or `name:split`; `None` if it is a path.

    What exists here is a path, and so is what has a scheme, or the ending of a file of rows.
    """
    match = _HUB_NAME.fullmatch(text)
    if match is None or "://" in text or text.lower().endswith(SUFFIXES) or os.path.exists(text):
        return None
    if match["split"] is None and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        return None
    return HubRows(match["name"], match["split"] or "train")


def list_all_files(source: DataPath) -> tuple[str, ...]:
    """Return `list_files` of every path of a source, in the order of the paths.

    Raises:
        DataError: There are none, or they are in different file systems or of different formats.
    """
    paths = [normal_path(path) for path in (source.path, *source.others)]
    stores = {root_of(path) if is_remote(path) else "a disk" for path in paths}
    files = tuple(file for path in paths for file in list_files(path))
    endings = {next((suffix for suffix in SUFFIXES if file.lower().endswith(suffix)), "") for file in files}
    if len(stores) > 1 or len(endings) > 1:
        what = f"and the {len(source.others)} paths after it are not of one kind: {', '.join(sorted(endings))}"
        raise DataError(f"{what}: give files of one format, on disks or in one store", path=paths[0])
    return files


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
            if os.path.splitext(inside)[1] in _OTHER_SUFFIXES:
                raise DataError(f"ends in none of {', '.join(SUFFIXES)}: {_CURE}", path=directory)
            return (inside,)
        if info.type == arrow_fs.FileType.NotFound:
            cure = "check the spelling, and that the ranks' nodes see it"
            raise DataError(f"is not there, as rank 0 sees it: {cure}", path=directory)
        infos = system.get_file_info(arrow_fs.FileSelector(inside, recursive=True))
    # As pyarrow's datasets do: .ipynb_checkpoints/, _temporary/, _delta_log/ and others hold no rows.
    paths = [one.path for one in infos if one.is_file]
    shown = [path for path in paths if not re.search(r"(^|/)[._]", path[len(inside) :].lstrip("/"))]
    for suffix in SUFFIXES:
        files = tuple(sorted(path for path in shown if path.lower().endswith(suffix)))
        if files:
            return files
    raise DataError(f"holds no {', '.join(SUFFIXES)} file that is not hidden: {_CURE}", path=directory)


def connected(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory (of a URI: `RemoteFileSystem`), and the path inside the file system."""
    if is_remote(directory):
        return remote_storage(DEFAULT_REMOTE).file_system(directory)
    import pyarrow.fs as arrow_fs

    return arrow_fs.LocalFileSystem(), directory


@contextmanager
def reading(path: str, what: str = "cannot be read") -> Iterator[None]:
    """Convert errors of storage and pyarrow into a `DataError` that names the file and what could not be done."""
    import pyarrow as arrow

    try:
        yield
    except (CheckpointError, OSError, arrow.ArrowException) as error:
        said = error.message if isinstance(error, CheckpointError) else str(error).strip()
        raise DataError(f"{what}: {said}", path=getattr(error, "path", None) or path) from error
