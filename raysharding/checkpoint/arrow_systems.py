"""pyarrow's file systems: connecting to one with deadlines of ours, and its answers in words of ours."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from raysharding.checkpoint.remote_options import RemoteOptions
from raysharding.checkpoint.storage import Found


def connect(uri: str, options: RemoteOptions, for_writing: bool = False) -> tuple[Any, str]:
    """Return the `pyarrow.fs.FileSystem` of a URI, and the path inside it.

    Args:
        uri: Of a directory.
        options: Deadlines and tries.
        for_writing: Parts of a stream are tried again by pyarrow, since only it can, and sent one after the other:
            sent in the background, they would wait for the network in memory without bound.

    Raises:
        ValueError: pyarrow knows no such scheme or query.
        NotImplementedError: this pyarrow was built without it.
        OSError: the store cannot be reached, or a library is missing.
    """
    import pyarrow.fs as arrow_fs  # takes half a second

    system, inside = arrow_fs.FileSystem.from_uri(uri)
    # A URI cannot carry these, so the file system is made anew from its own pickled arguments. Tries are counted in
    # `Requests`: pyarrow's own, times ours, would outlast every deadline.
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
    """What a `pyarrow.fs.FileInfo` says."""
    import pyarrow.fs as arrow_fs

    if info.type == arrow_fs.FileType.File:
        return Found("file", info.size, info.mtime_ns)
    if info.type == arrow_fs.FileType.Directory:
        return Found("directory")
    return Found("missing" if info.type == arrow_fs.FileType.NotFound else "other")


def version_in(metadata: Mapping[Any, Any]) -> tuple[str | None, int | None]:
    """Etag and mtime (ns) in what an open object says of itself; `None` for what it does not say."""
    texts = {_text(key).lower(): _text(value) for key, value in metadata.items()}
    changed = texts.get("last-modified")
    try:
        moment = datetime.fromisoformat(changed) if changed else None
    except ValueError:
        moment = None  # the store spells it in another way: `FileInfo` says it too
    if moment is None:
        return texts.get("etag"), None
    return texts.get("etag"), round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()) * 10**9


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
