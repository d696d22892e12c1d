"""Files behind a URI that pyarrow.fs takes (S3, Google Cloud Storage, Azure, HDFS), and models of the hub."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from raysharding.checkpoint.storage.hub import HubFile, HubFileSystem, model_path
from raysharding.checkpoint.storage.interface import FileStat, Item, Result
from raysharding.checkpoint.storage.local import LocalFile, LocalStorage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, Job, RemoteOptions, Requests
from raysharding.checkpoint.storage.uri import is_remote, join_path, root_of, scheme_of
from raysharding.errors import CheckpointError


def connect(uri: str, options: RemoteOptions, for_writing: bool = False) -> tuple[Any, str]:
    """Return the `pyarrow.fs.FileSystem` of a URI, and the path inside the file system.

    Args:
        uri: Of a directory.
        options: Deadlines and tries.
        for_writing: For output streams. pyarrow retries their parts (Note [Retries]) and sends them one after the
            other: parts sent in the background would wait for the network in memory without bound.

    Raises:
        ValueError: Pyarrow does not know the scheme or the query.
        NotImplementedError: This pyarrow was built without the store.
        OSError: The store cannot be reached, or a library is missing.
    """
    import pyarrow.fs as arrow_fs  # takes half a second

    system, inside = arrow_fs.FileSystem.from_uri(uri)
    # A URI cannot hold these options, so the file system is constructed again from its own pickled arguments.
    num_tries = options.num_tries if for_writing else 1
    if system.type_name == "s3":
        arguments = system.__reduce__()[1][0] | {
            "connect_timeout": options.request_s / 2,
            "request_timeout": options.request_s / 2,
            "retry_strategy": arrow_fs.AwsStandardS3RetryStrategy(max_attempts=num_tries),
            "background_writes": not for_writing,
        }
        system = arrow_fs.S3FileSystem(**arguments)
    elif system.type_name == "gcs":
        limit_s = max(1.0, options.request_s / 2) * num_tries
        arguments = system.__reduce__()[1][0] | {"retry_time_limit": timedelta(seconds=limit_s)}
        system = arrow_fs.GcsFileSystem(**arguments)
    return system, inside


def stat_of(info: Any) -> FileStat:
    """Convert a `pyarrow.fs.FileInfo`."""
    import pyarrow.fs as arrow_fs

    if info.type == arrow_fs.FileType.File:
        return FileStat("file", info.size, info.mtime_ns)
    if info.type == arrow_fs.FileType.Directory:
        return FileStat("directory")
    return FileStat("missing" if info.type == arrow_fs.FileType.NotFound else "other")


_MIN_PART_BYTES: Final = 1 << 20
"""Smallest part that a longer range is cut into: below this size, latency dominates."""


_WITHOUT_DIRECTORIES: Final = ("s3", "gcs", "abfs", "hf")
"""Type names of the stores in which no directory has to be made."""


_MARKS: Final = (0xA7, 0x58)
"""Last bytes of the memory of an answer, before it comes; few files have them at the end of a part."""


_ERROR_BYTES: Final = 4096
"""Size of the memory that any error of a store fits into."""


def _read_range(handle: Any, offset: int, length: int) -> bytes | bytearray:
    """Read a range of an open file by one request.

    pyarrow 26 says that it has read what was asked for even where S3's answer is shorter, with a `Content-Length` that
    fits it; the rest of the memory is as it was before. A last byte that is still the mark is such a rest, or the
    file's own: a second request, with another mark, tells.

    Raises:
        OSError: The answer is shorter than the range, or none.
    """
    if isinstance(handle, HubFile):
        return handle.read_at(length, offset)
    data = bytearray(length)
    for mark in _MARKS:
        data[-1] = mark
        try:
            count = handle.get_stream(offset, length).readinto(data)
        except OSError as error:
            if "response stream" in str(error):  # S3's error did not fit into the memory of a short range
                handle.read_at(_ERROR_BYTES, offset)  # raises it whole
            raise
        if count != length:
            raise OSError(f"the answer has {count} bytes instead of {length}")
        if data[-1] != mark:
            return data
    raise OSError(f"the answer has fewer bytes than {length}")


class RemoteFile:
    """An object. Bytes pass through the memory of the requests in flight (`RemoteOptions`).

    Args:
        path: URI, for errors.
        handle: A pyarrow `NativeFile`; its `read_at` may be called by several threads.
        stat: What the store reported when the object was opened.
        requests: Sends the requests.
    """

    def __init__(self, path: str, handle: Any, stat: FileStat, requests: Requests) -> None:
        self._path = path
        self._handle = handle
        self._stat = stat
        self._requests = requests

    @property
    def stat(self) -> FileStat:
        """What the store reported when the object was opened."""
        return self._stat

    def fill(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views` in turn with the bytes from `offset` on, and return the number of bytes.

        A long range is cut into parts that are fetched concurrently.

        Raises:
            CheckpointError: The object ends early, or cannot be read.
        """
        num_bytes = sum(view.nbytes for view in views)
        end = offset + num_bytes
        if end > self._stat.num_bytes:
            what = f"ends at byte {self._stat.num_bytes}, but {num_bytes} bytes were asked for at {offset}"
            raise CheckpointError(f"{what}: it is another file than the one whose header was read", path=self._path)
        options = self._requests.options
        part_bytes = min(options.part_bytes, max(_MIN_PART_BYTES, -(-num_bytes // options.max_in_flight)))
        jobs, position = [], offset
        for part in cut_views(views, part_bytes):
            length = sum(view.nbytes for view in part)
            jobs.append(self._job(position, length, part))
            position += length
        self._requests.run(self._path, jobs)
        return num_bytes

    def close(self) -> None:
        """Drop the handle, without closing it: an abandoned request may still read from it."""
        self._handle = None

    def _job(self, offset: int, length: int, views: Sequence[memoryview]) -> Job:
        handle = self._handle

        def take(data: bytes | bytearray) -> None:
            if len(data) != length:
                raise OSError(f"the answer has {len(data)} bytes instead of {length}")
            memory, start = memoryview(data), 0
            for view in views:
                view.cast("B")[:] = memory[start : start + view.nbytes]
                start += view.nbytes

        return Job(f"reading {length} bytes at {offset}", lambda: _read_range(handle, offset, length), take)


class InputFile(io.RawIOBase):
    """A file for `pyarrow.PythonFile` whose reads are those of a `RemoteFile`. A read ends at the end of the file."""

    def __init__(self, file: RemoteFile) -> None:
        """Stand at the first byte."""
        super().__init__()
        self._file = file
        self._num_bytes = file.stat.num_bytes
        self._next = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._next

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read, and return it."""
        self._next = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._next, os.SEEK_END: self._num_bytes}[whence]
        return self._next

    def readinto(self, memory: Any) -> int:
        """Fill memory, and return the number of bytes."""
        view = memoryview(memory)[: max(0, self._num_bytes - self._next)]
        if view.nbytes:
            self._next += self._file.fill(self._next, (view,))
        return view.nbytes


class RemoteFileSystem:
    """The methods of a `pyarrow.fs.FileSystem` that readers of rows use; requests are sent as those for weights.

    Args:
        directory: URI, for errors.
        system: A `pyarrow.fs.FileSystem`, or a `HubFileSystem`.
        requests: Sends the requests.
    """

    def __init__(self, directory: str, system: Any, requests: Requests) -> None:
        self._directory = directory
        self._system = system
        self._requests = requests

    def get_file_info(self, wanted: Any) -> Any:
        """Return what is at a path, or what a `FileSelector` selects."""
        return self._requests.call(self._directory, "listing it", lambda: self._system.get_file_info(wanted))

    def open_input_file(self, inside: str) -> Any:
        """Open a file as a pyarrow `NativeFile`.

        Raises:
            CheckpointError: The file is missing, or the store cannot be reached; so do the file's reads.
        """
        import pyarrow as arrow

        def send() -> tuple[Any, int]:
            handle = self._system.open_input_file(inside)
            return handle, handle.size()

        uri = f"{scheme_of(self._directory)}://{inside}"
        handle, num_bytes = self._requests.call(uri, "opening it", send)
        return arrow.PythonFile(InputFile(RemoteFile(uri, handle, FileStat("file", num_bytes), self._requests)), "r")


class RemoteStorage:
    """Objects behind URIs, by the methods of `LocalStorage`.

    `remote_storage` makes one for each process and options, so all readers share one limit.
    """

    def __init__(self, options: RemoteOptions) -> None:
        self._requests = Requests(options)
        self._roots: dict[tuple[str, bool], tuple[Any, str]] = {}

    def find(self, path: str) -> FileStat:
        """Return what exists at `path`, without its etag, which only an open file has; a missing one is no error."""
        system, inside = self._locate(path)
        info = self._requests.call(path, "looking it up", lambda: system.get_file_info(inside))
        return stat_of(info)

    def list_names(self, directory: str) -> list[str]:
        """Return the names of all entries of `directory`, sorted."""
        import pyarrow.fs as arrow_fs

        system, inside = self._locate(directory)
        selector = arrow_fs.FileSelector(inside)
        infos = self._requests.call(directory, "listing it", lambda: system.get_file_info(selector))
        return sorted(info.base_name for info in infos)

    def open(self, path: str) -> RemoteFile:
        """Open an object for reading."""
        system, inside = self._locate(path)

        def send() -> tuple[Any, FileStat]:
            handle = system.open_input_file(inside)
            metadata = {key.lower(): value for key, value in (handle.metadata() or {}).items()}  # the values are bytes
            etag = metadata.get("etag", b"").decode() or None
            return handle, FileStat("file", handle.size(), stat_of(system.get_file_info(inside)).mtime_ns, etag)

        handle, stat = self._requests.call(path, "opening it", send)
        return RemoteFile(path, handle, stat, self._requests)

    def identity(self, path: str) -> Hashable:
        """Return `None`: object stores have no directories that can be renamed into place."""
        return None

    def check_inside(self, directory: str, name: str) -> None:
        """Do nothing: object stores have no symlinks, and HDFS none that pyarrow shows."""
        assert ".." not in name.split("/"), f"{join_path(directory, name)} is not in its directory"

    def put(self, path: str, data: bytes) -> None:
        """Write a whole small object."""
        system, inside = self._locate(path)
        self._make_parent(path, system, inside)

        def send() -> None:
            with system.open_output_stream(inside) as stream:
                stream.write(data)

        self._requests.call(path, f"writing {len(data)} bytes", send)

    def open_output(self, path: str) -> Any:
        """Open a pyarrow stream; readers see the object once the stream is closed."""
        system, inside = self._locate(path, for_writing=True)
        self._make_parent(path, system, inside)
        return self._requests.call(path, "making it", lambda: system.open_output_stream(inside))

    def remove(self, path: str) -> None:
        """Remove an object; a missing one is not an error."""
        system, inside = self._locate(path)
        self._requests.call(path, "removing it", lambda: _unless_missing(system.delete_file, inside))

    def move(self, source: str, target: str) -> None:
        """Rename an object, by a copy within the store, which S3 makes of objects up to 5 GiB, and a removal."""
        system, inside = self._locate(source)
        to = self._locate(target)[1]
        if system.type_name not in _WITHOUT_DIRECTORIES:  # HDFS has renames, and pyarrow no copy there
            self.remove(target)
            self._requests.call(source, f"renaming it to {target}", lambda: system.move(inside, to))
            return
        self._requests.call(source, f"copying it to {target}", lambda: system.copy_file(inside, to))
        self.remove(source)

    def remove_tree(self, directory: str) -> None:
        """Remove everything under a directory; a missing one is not an error."""
        system, inside = self._locate(directory)
        # Never remove a bucket itself.
        remove = system.delete_dir if "/" in inside.strip("/") else system.delete_dir_contents
        self._requests.call(directory, "removing it", lambda: _unless_missing(remove, inside))

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item, at most `max_in_flight` at once; the first error stops the rest."""
        pool = ThreadPoolExecutor(self._requests.options.max_in_flight, thread_name_prefix="raysharding-remote")
        try:
            return list(pool.map(function, items))
        finally:
            pool.shutdown(cancel_futures=True)

    def _make_parent(self, path: str, system: Any, inside: str) -> None:
        """Make the directory of a file, where the store has directories."""
        if system.type_name not in _WITHOUT_DIRECTORIES:
            parent = inside.rpartition("/")[0]
            self._requests.call(path, "making its directory", lambda: system.create_dir(parent, recursive=True))

    def file_system(self, directory: str) -> tuple[RemoteFileSystem, str]:
        """Return the file system of a directory for readers of rows, and the path inside the file system."""
        system, inside = self._locate(directory)
        return RemoteFileSystem(directory, system, self._requests), inside

    def _locate(self, path: str, *, for_writing: bool = False) -> tuple[Any, str]:
        """Return the file system of a path, one for all of a bucket, and the path inside the file system."""
        options = self._requests.options
        if (in_hub := model_path(path)) is not None:
            return HubFileSystem(options.request_s), in_hub
        key = root_of(path), for_writing
        if key not in self._roots:
            # Sends a request: where the URI names no region, S3 is asked for the region of the bucket.
            self._roots[key] = self._requests.call(path, "connecting", lambda: connect(key[0], options, for_writing))
        system, root = self._roots[key]
        return system, root.rstrip("/") + unquote(urlsplit(path).path)


def _unless_missing(remove: Callable[[str], None], inside: str) -> None:
    with suppress(FileNotFoundError):
        remove(inside)


Storage = LocalStorage | RemoteStorage
"""Files of one kind."""
StoredFile = LocalFile | RemoteFile
"""An open file. Every method but `close` is thread-safe."""


def read_bytes(file: StoredFile, offset: int, num_bytes: int) -> bytes:
    """Read `num_bytes` at `offset` into new memory."""
    data = bytearray(num_bytes)
    file.fill(offset, (memoryview(data),))
    return bytes(data)


@lru_cache(maxsize=8)
def remote_storage(options: RemoteOptions) -> RemoteStorage:
    """Return this process's storage of URIs with these options."""
    return RemoteStorage(options)


def storage_of(path: str, remote: RemoteOptions = DEFAULT_REMOTE) -> Storage:
    """Return the storage of a normal path, as `uri.normal_path` returns it."""
    return remote_storage(remote) if is_remote(path) else LocalStorage()


def cut_views(views: Sequence[memoryview], part_bytes: int) -> list[list[memoryview]]:
    """Split views into parts of `part_bytes`, the last one shorter; a view that spans parts is cut."""
    parts: list[list[memoryview]] = []
    room = 0
    for view in views:
        rest = view.cast("B") if view.nbytes else view
        while rest.nbytes:
            if room == 0:
                parts.append([])
                room = part_bytes
            parts[-1].append(rest[:room])
            rest, room = rest[room:], room - min(room, rest.nbytes)
    return parts
