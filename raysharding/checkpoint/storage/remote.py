"""Files behind a URI that pyarrow.fs takes (S3, Google Cloud Storage, Azure, HDFS), and models of the hub."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from raysharding.checkpoint.storage.hub import HubFileSystem, model_path
from raysharding.checkpoint.storage.interface import Found, Item, Result, Storage
from raysharding.checkpoint.storage.local import LocalStorage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, Job, RemoteOptions, Requests
from raysharding.checkpoint.storage.uri import is_remote, join_path, split_path
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


def found_in(info: Any) -> Found:
    """Convert a `pyarrow.fs.FileInfo`."""
    import pyarrow.fs as arrow_fs

    if info.type == arrow_fs.FileType.File:
        return Found("file", info.size, info.mtime_ns)
    if info.type == arrow_fs.FileType.Directory:
        return Found("directory")
    return Found("missing" if info.type == arrow_fs.FileType.NotFound else "other")


_MIN_PART_BYTES: Final = 1 << 20
"""Smallest part that a longer range is cut into: below this size, latency dominates."""


_WITHOUT_DIRECTORIES: Final = ("s3", "gcs", "abfs", "hf")
"""Type names of the stores in which no directory has to be made."""


class RemoteFile:
    """An object. Bytes pass through the memory of the requests in flight (`RemoteOptions`).

    Args:
        path: URI, for errors.
        handle: A pyarrow `NativeFile`; its `read_at` may be called by several threads.
        found: What the store reported when the object was opened.
        requests: Sends the requests.
    """

    def __init__(self, path: str, handle: Any, found: Found, requests: Requests) -> None:
        self._path = path
        self._handle = handle
        self._found = found
        self._requests = requests

    @property
    def found(self) -> Found:
        """See `StoredFile`."""
        return self._found

    def fill(self, offset: int, views: Sequence[memoryview]) -> int:
        """See `StoredFile`. A long range is cut into parts that are fetched concurrently."""
        num_bytes = sum(view.nbytes for view in views)
        end = offset + num_bytes
        if end > self._found.num_bytes:
            what = f"ends at byte {self._found.num_bytes}, but {num_bytes} bytes were asked for at {offset}"
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
        """See `StoredFile`. Only drops the handle: an abandoned request may still read from it."""
        self._handle = None

    def _job(self, offset: int, length: int, views: Sequence[memoryview]) -> Job:
        handle = self._handle

        def send() -> bytes:
            data: bytes = handle.read_at(length, offset)
            return data

        def take(data: bytes) -> None:
            if len(data) != length:
                raise OSError(f"the answer has {len(data)} bytes instead of {length}")
            memory, start = memoryview(data), 0
            for view in views:
                view.cast("B")[:] = memory[start : start + view.nbytes]
                start += view.nbytes

        return Job(f"reading {length} bytes at {offset}", send, take)


class RemoteStorage:
    """See `Storage`. `remote_storage` makes one for each process and options, so all readers share one limit."""

    def __init__(self, options: RemoteOptions) -> None:
        self._requests = Requests(options)
        self._directories: dict[tuple[str, bool], tuple[Any, str]] = {}

    def find(self, path: str) -> Found:
        """See `Storage`. Without the etag, which only an open file tells."""
        system, inside = self._locate(path)
        info = self._requests.call(path, "looking it up", lambda: system.get_file_info(inside))
        return found_in(info)

    def list_names(self, directory: str) -> list[str]:
        """See `Storage`."""
        import pyarrow.fs as arrow_fs

        system, inside = self._enter(directory, directory)
        selector = arrow_fs.FileSelector(inside)
        infos = self._requests.call(directory, "listing it", lambda: system.get_file_info(selector))
        return sorted(info.base_name for info in infos)

    def open(self, path: str) -> RemoteFile:
        """See `Storage`."""
        system, inside = self._locate(path)

        def send() -> tuple[Any, Found]:
            handle = system.open_input_file(inside)
            metadata = {key.lower(): value for key, value in (handle.metadata() or {}).items()}  # the values are bytes
            etag = metadata.get("etag", b"").decode() or None
            return handle, Found("file", handle.size(), found_in(system.get_file_info(inside)).mtime_ns, etag)

        handle, found = self._requests.call(path, "opening it", send)
        return RemoteFile(path, handle, found, self._requests)

    def identity(self, path: str) -> Hashable:
        """See `Storage`. Object stores have no directories that can be renamed into place."""
        return None

    def check_inside(self, directory: str, name: str) -> None:
        """See `Storage`. Object stores have no symlinks; HDFS has none that pyarrow shows."""
        assert ".." not in name.split("/"), f"{join_path(directory, name)} is not in its directory"

    def put(self, path: str, data: bytes) -> None:
        """See `Storage`."""
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

    def remove_file(self, path: str) -> None:
        """Remove an object; a missing one is not an error."""
        system, inside = self._locate(path)
        self._requests.call(path, "removing it", lambda: _unless_missing(system.delete_file, inside))

    def remove_tree(self, directory: str) -> None:
        """Remove everything under a directory; a missing one is not an error."""
        system, inside = self._enter(directory, directory)
        # Never remove a bucket itself.
        remove = system.delete_dir if "/" in inside.strip("/") else system.delete_dir_contents
        self._requests.call(directory, "removing it", lambda: _unless_missing(remove, inside))

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """See `Storage`. At most `max_in_flight` at once; the first error stops the rest."""
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

    def _locate(self, path: str, *, for_writing: bool = False) -> tuple[Any, str]:
        """Return the file system of a path, and the path inside the file system."""
        directory, name = split_path(path)
        system, inside = self._enter(directory, path, for_writing=for_writing)
        return system, f"{inside.rstrip('/')}/{name}" if name else inside

    def _enter(self, directory: str, path: str, *, for_writing: bool = False) -> tuple[Any, str]:
        """As `_locate`, of a directory, whose files share the connections; errors name `path`."""
        entered = self._directories.get((directory, for_writing))
        if entered is None:
            options = self._requests.options
            if (in_hub := model_path(directory)) is not None:
                return HubFileSystem(options.request_s), in_hub
            # Sends a request: where the URI names no region, S3 is asked for the region of the bucket.
            entered = self._requests.call(path, "connecting", lambda: connect(directory, options, for_writing))
            self._directories[directory, for_writing] = entered
        return entered


def _unless_missing(remove: Callable[[str], None], inside: str) -> None:
    with suppress(FileNotFoundError):
        remove(inside)


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
