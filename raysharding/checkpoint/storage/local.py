"""Local files, and the kernel's mount table, which gives the file system of a path."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final

from raysharding.checkpoint.storage.interface import FileStat, Item, Kind, Result, os_errors
from raysharding.checkpoint.storage.uri import scheme_of
from raysharding.errors import CheckpointError

_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def file_system_type(path: str) -> str:
    """Return the type of the file system that holds `path` in this process's mount namespace.

    Args:
        path: A local path, which need not exist, or a URI.

    Returns:
        `ext4`, `tmpfs`, `nfs4`, `overlay`, ...; for a URI its scheme, such as `s3`; `unknown` where the mount table
        cannot be read.
    """
    scheme = scheme_of(path)
    if scheme is not None:
        return scheme
    place = os.fsencode(os.path.realpath(path))
    # Of mounts on one point, the last one hides the others.
    inside = [one for one in _mounts() if place == one[0] or place.startswith(one[0].rstrip(b"/") + b"/")]
    return max(reversed(inside), key=lambda mount: len(mount[0]), default=(b"", "unknown"))[1]


def is_mount_point(path: str) -> bool:
    """Return True for a mount point, including a bind mount of the same file system.

    Args:
        path: A normal path without symlinks.
    """
    # The table may be unreadable; `ismount` compares device numbers.
    return any(point == os.fsencode(path) for point, _ in _mounts()) or os.path.ismount(path)


def _mounts() -> list[tuple[bytes, str]]:
    """Return mount point and file system type of this process's mounts; empty where the table cannot be read."""
    try:
        with open(_MOUNTS, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    points = [_ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), line.split(b" ")[4]) for line in lines]
    types = [os.fsdecode(line.partition(b" - ")[2].split(b" ")[0]) for line in lines]
    return list(zip(points, types, strict=True))


_MAX_VIEWS: Final = os.sysconf("SC_IOV_MAX")
"""Most buffers that one `preadv` takes; 1,024 on Linux."""
_num_bytes = attrgetter("nbytes")


class LocalFile:
    """An open local file. Positional reads share no file offset, so threads read concurrently."""

    def __init__(self, path: str) -> None:
        self._path = path
        with os_errors("cannot open", path):
            # O_NONBLOCK does not affect files; without it, opening a named pipe would block until it has a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if self.stat.kind != "file":
            os.close(self._descriptor)
            raise CheckpointError("is not a regular file", path=path)
        # Doubles the kernel's read-ahead window: the load plan reads each file forward.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @property
    def stat(self) -> FileStat:
        """The file as it is now."""
        return _stat(os.fstat(self._descriptor))

    def fill(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views` in turn with the bytes from `offset` on, and return the number of bytes.

        Unbuffered: bytes are read into the caller's memory.

        Raises:
            CheckpointError: The file ends early, or cannot be read.
        """
        position = offset
        for first in range(0, len(views), _MAX_VIEWS):
            batch = views[first : first + _MAX_VIEWS]
            missing = sum(map(_num_bytes, batch))
            while missing:
                with os_errors(f"cannot read at byte {position}", self._path):
                    # One call reads at most 2 GiB and may return early; Python itself retries on EINTR.
                    count = os.preadv(self._descriptor, batch, position)
                if count == 0:
                    asked = sum(map(_num_bytes, views))
                    what = f"ends at byte {position}, but {asked} bytes were asked for at {offset}: the file was cut "
                    what += "short after it was opened; restore it and load again"
                    raise CheckpointError(what, path=self._path)
                position += count
                missing -= count
                if missing:
                    batch = _after(batch, count)
        return position - offset

    def close(self) -> None:
        """Close the file. No read may be in progress."""
        os.close(self._descriptor)


class LocalStorage:
    """Files of this machine. Paths are normal, as `uri.normal_path` returns them. Thread-safe."""

    def find(self, path: str) -> FileStat:
        """Return what exists at `path`; a missing file is not an error."""
        with os_errors("cannot be read", path):
            try:
                return _stat(os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return FileStat("dangling" if os.path.islink(path) else "missing")

    def list_names(self, directory: str) -> list[str]:
        """Return the names of all entries of `directory`, sorted."""
        with os_errors("cannot be listed", directory):
            return sorted(os.listdir(directory))

    def open(self, path: str) -> LocalFile:
        """Open a regular file for reading."""
        return LocalFile(path)

    def identity(self, path: str) -> Hashable:
        """Return a value that changes when another file or directory takes the path; `None` where there is none.

        The inode alone is not enough: of three saves in quick succession, the last may reuse the inode number of the
        first.
        """
        try:
            status = os.stat(path)
        except OSError:
            return None  # the read that follows raises, and names what is wrong
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def check_inside(self, directory: str, name: str) -> None:
        """Refuse a relative path `name` whose target, through symlinks, is outside `directory`.

        The Hugging Face cache of one repository (`models--...`) counts as inside:
        its snapshots are directories of symlinks into `blobs/` beside them.
        """
        root = os.path.realpath(directory)
        target = os.path.realpath(os.path.join(directory, name))
        roots = [root]
        parts = root.split(os.sep)
        for depth in range(len(parts), 0, -1):
            if parts[depth - 1].startswith("models--"):
                roots.append(os.sep.join(parts[:depth]))
                break
        if not any(os.path.commonpath((target, allowed)) == allowed for allowed in roots):
            what = f"is a symlink to {target}, outside the checkpoint: copy or hard-link the file into the directory"
            raise CheckpointError(what, path=os.path.join(directory, name))

    def put(self, path: str, data: bytes) -> None:
        """Write a whole small file."""
        with os_errors("cannot be written", path), open(path, "wb") as file:
            file.write(data)

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is not an error."""
        with os_errors("cannot be removed", path), suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, directory: str) -> None:
        """Remove everything under a directory; a missing one is not an error."""
        with os_errors("cannot be removed", directory), suppress(FileNotFoundError):
            shutil.rmtree(directory)

    def move(self, source: str, target: str) -> None:
        """Rename a file in the same place; one that is there is replaced."""
        with os_errors("cannot be renamed", source):
            os.replace(source, target)

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item, one after the other: the time is spent in parsing, which holds the GIL."""
        return [function(item) for item in items]


def _stat(status: os.stat_result) -> FileStat:
    kind: Kind = "file" if stat.S_ISREG(status.st_mode) else "directory" if stat.S_ISDIR(status.st_mode) else "other"
    return FileStat(kind, status.st_size, status.st_mtime_ns)


def _after(views: Sequence[memoryview], num_bytes: int) -> Sequence[memoryview]:
    """Return the part of `views` after its first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view.cast("B")[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
