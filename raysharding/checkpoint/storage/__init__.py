"""Storage of bytes: files of this machine and objects of a store, behind one interface."""

from raysharding.checkpoint.storage.hub import HubAccess, HubPath, access_to, adopt_access, hub_is_offline
from raysharding.checkpoint.storage.interface import FileStat, os_errors, require_file
from raysharding.checkpoint.storage.local import LocalFile, LocalStorage, file_system_type, is_mount_point
from raysharding.checkpoint.storage.output import LocalOutput, Output, open_output
from raysharding.checkpoint.storage.remote import (
    RemoteStorage,
    Storage,
    StoredFile,
    connect,
    read_bytes,
    remote_storage,
    storage_of,
)
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, RemoteOptions, Requests
from raysharding.checkpoint.storage.uri import is_remote, join_path, normal_path, root_of, split_path
