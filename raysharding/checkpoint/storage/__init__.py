"""Where bytes live: files of this machine and objects of a store, behind one interface."""

from __future__ import annotations

from typing import Final

from raysharding.checkpoint.storage.interface import Found, Storage, StoredFile, os_errors, read_bytes, require_file
from raysharding.checkpoint.storage.local import LocalFile, LocalStorage, file_system_type, mount_points_below
from raysharding.checkpoint.storage.output import LocalOutput, Output, disk_error, open_output
from raysharding.checkpoint.storage.remote import RemoteStorage, connect, remote_storage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, RemoteOptions
from raysharding.checkpoint.storage.uri import is_remote, join_path, normal_path, split_path

__all__ = [
    "DEFAULT_REMOTE",
    "Found",
    "LocalFile",
    "LocalOutput",
    "LocalStorage",
    "Output",
    "RemoteOptions",
    "RemoteStorage",
    "Storage",
    "StoredFile",
    "connect",
    "disk_error",
    "file_system_type",
    "is_remote",
    "join_path",
    "mount_points_below",
    "normal_path",
    "open_output",
    "os_errors",
    "read_bytes",
    "remote_storage",
    "require_file",
    "split_path",
    "storage_of",
]

_LOCAL: Final = LocalStorage()


def storage_of(path: str, remote: RemoteOptions = DEFAULT_REMOTE) -> Storage:
    """Return the storage of a normal path, as `uri.normal_path` returns it."""
    return remote_storage(remote) if is_remote(path) else _LOCAL
