"""The interface of a storage, which `LocalStorage` and `RemoteStorage` implement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from raysharding.errors import CheckpointError

Item = TypeVar("Item")
Result = TypeVar("Result")


Kind = Literal["file", "directory", "missing", "dangling", "other"]


@dataclass(frozen=True)
class Found:
    """What exists at a path, and what distinguishes one version of a file from the next."""

    kind: Kind
    """`dangling`: a symlink whose target is missing; `other`: a pipe, a device, ..."""
    num_bytes: int = 0
    """Size of a file."""
    mtime_ns: int | None = None
    """Time of the last change in nanoseconds since the epoch; `None` where the storage has none."""
    etag: str | None = None
    """The object store's identifier of this version of the content; `None` where the store has none."""


class StoredFile(Protocol):
    """An open file. Every method but `close` is thread-safe."""

    @property
    def found(self) -> Found:
        """A local file as it is now; a remote file as it was when it was opened."""

    def fill(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views` in turn with the bytes from `offset` on, and return the number of bytes.

        Raises:
            CheckpointError: The file ends early, or cannot be read.
        """

    def close(self) -> None:
        """Close the file. No read may be in progress."""


class Storage(Protocol):
    """Files of one kind. Paths are normal, as `uri.normal_path` returns them. Thread-safe."""

    def find(self, path: str) -> Found:
        """Return what exists at `path`; a missing file is not an error."""

    def list_names(self, directory: str) -> list[str]:
        """Return the names of all entries of `directory`, sorted."""

    def open(self, path: str) -> StoredFile:
        """Open a regular file for reading."""

    def identity(self, path: str) -> Hashable:
        """Return a value that changes when another file or directory takes the path; `None` where there is none."""

    def check_inside(self, directory: str, name: str) -> None:
        """Refuse a relative path `name` whose target, through symlinks, is outside `directory`."""

    def put(self, path: str, data: bytes) -> None:
        """Write a whole small file. An object of a store appears as a whole."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is not an error."""

    def remove_tree(self, directory: str) -> None:
        """Remove everything under a directory; a missing one is not an error."""

    def move(self, source: str, target: str) -> None:
        """Give a file another path in the same place; one that is there is replaced."""

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item; concurrently where most of the time is spent waiting."""


@contextmanager
def os_errors(what: str, path: str) -> Iterator[None]:
    """Raise a `CheckpointError` instead of an `OSError`: what could not be done, and what the system says."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror}", path=path) from error


def require_file(found: Found, path: str) -> None:
    """Raise unless a regular file was found."""
    if found.kind in ("missing", "dangling"):
        raise CheckpointError("cannot be read: No such file or directory", path=path)
    if found.kind != "file":
        raise CheckpointError("is not a regular file", path=path)


def read_bytes(file: StoredFile, offset: int, num_bytes: int) -> bytes:
    """Read `num_bytes` at `offset` into new memory."""
    data = bytearray(num_bytes)
    file.fill(offset, (memoryview(data),))
    return bytes(data)
