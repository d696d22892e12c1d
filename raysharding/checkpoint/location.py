"""Which storage holds a path."""

from __future__ import annotations

from typing import Final

from raysharding.checkpoint.local_storage import LocalStorage
from raysharding.checkpoint.remote_options import DEFAULT_REMOTE, RemoteOptions
from raysharding.checkpoint.remote_storage import remote_storage
from raysharding.checkpoint.storage import Storage
from raysharding.checkpoint.uri import is_remote

_LOCAL: Final = LocalStorage()


def storage_of(path: str, remote: RemoteOptions = DEFAULT_REMOTE) -> Storage:
    """Return what reads a normal path, as `uri.normal_path` gives it."""
    return remote_storage(remote) if is_remote(path) else _LOCAL
