"""`FileStat`, which every storage returns for a path, and errors of paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from raysharding.errors import CheckpointError

Item = TypeVar("Item")
Result = TypeVar("Result")


Kind = Literal["file", "directory", "missing", "dangling", "other"]


@dataclass(frozen=True)
class FileStat:
    """Kind of a path; and size, time and etag, by which versions of a file differ."""

    kind: Kind
    """`dangling`: a symlink whose target is missing; `other`: a pipe, a device, ..."""
    num_bytes: int = 0
    """Size of a file."""
    mtime_ns: int | None = None
    """Time of the last change in nanoseconds since the epoch; `None` where the storage has none."""
    etag: str | None = None
    """The object store's identifier of this version of the content; `None` where the store has none."""


@contextmanager
def os_errors(what: str, path: str, tensor: str | None = None) -> Iterator[None]:
    """Raise a `CheckpointError` instead of an `OSError`: what could not be done, and what the system says."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror}", path=path, tensor=tensor) from error


def require_file(stat: FileStat, path: str) -> None:
    """Raise unless a path is a regular file."""
    if stat.kind in ("missing", "dangling"):
        raise CheckpointError("cannot be read: No such file or directory", path=path)
    if stat.kind != "file":
        raise CheckpointError("is not a regular file", path=path)
