"""What is needed of a place that holds files. `local_storage` and `remote_storage` are the two kinds."""

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
    """What is under a path, and what tells one version of a file from the next."""

    kind: Kind
    """`dangling`: a symlink to nothing; `other`: a pipe, a device, ..."""
    num_bytes: int = 0
    """Size of a file."""
    mtime_ns: int | None = None
    """Time of the last change in nanoseconds since the epoch; `None` where the storage has none."""
    etag: str | None = None
    """The object store's name of this version of the file's content; `None` where it has none."""


class StoredFile(Protocol):
    """An open file. Thread-safe, but for `close`."""

    @property
    def found(self) -> Found:
        """What was opened; of a local file what it is now, of a remote one what it was then."""

    def fill(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views` in turn with the bytes from `offset` on, and return how many they hold.

        Raises:
            CheckpointError: the file ends too early, or cannot be read.
        """

    def close(self) -> None:
        """Let go of the file. No read may be under way."""


class Storage(Protocol):
    """A place that holds files. Paths are normal ones, as `uri.normal_path` gives them. Thread-safe."""

    def find(self, path: str) -> Found:
        """Look at what is under `path`; nothing there is no error."""

    def list_names(self, directory: str) -> list[str]:
        """Names of everything in `directory`, sorted."""

    def open(self, path: str) -> StoredFile:
        """Open a regular file for reading."""

    def identity(self, path: str) -> Hashable:
        """What tells a directory or file from one that took its path since; `None` where nothing does."""

    def check_inside(self, directory: str, name: str) -> None:
        """Refuse a symlink `name` that leads out of `directory`."""

    def put(self, path: str, data: bytes) -> None:
        """Write a whole small file. An object of a store appears as a whole."""

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item, several at once where most of the time goes into waiting."""


@contextmanager
def os_errors(what: str, path: str) -> Iterator[None]:
    """Raise a `CheckpointError` instead of an `OSError`: what could not be done, and what the system says."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror}", path=path) from error


def require_file(found: Found, path: str) -> None:
    """Refuse what is not a regular file."""
    if found.kind in ("missing", "dangling"):
        raise CheckpointError("cannot be read: No such file or directory", path=path)
    if found.kind != "file":
        raise CheckpointError("is not a regular file", path=path)


def read_bytes(file: StoredFile, offset: int, num_bytes: int) -> bytes:
    """Read `num_bytes` at `offset` into new memory."""
    data = bytearray(num_bytes)
    file.fill(offset, (memoryview(data),))
    return bytes(data)
