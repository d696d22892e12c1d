"""`SaveRecord`: which save wrote a directory, and which small files it copied there.

Format of `raysharding.save.json`: {"format_version": 1, "token": hex digits, "sidecars": {name: SHA-256, hex}}.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from raysharding.checkpoint.format import (
    MAX_JSON_BYTES,
    SAVE_RECORD_NAME,
    is_sidecar_name,
    parse_object,
    read_beside,
    read_sidecar,
)
from raysharding.checkpoint.storage import join_path, storage_of
from raysharding.checkpoint.writing.file_plan import folders_of, write_file
from raysharding.checkpoint.writing.save_files import SAVE_FOLDERS, is_save_name

_FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class SaveRecord:
    """Identity of one save, and the small files that it copied."""

    token: str = ""
    """Unique for each save; empty where there is no record."""
    sidecars: Mapping[str, str] = field(default_factory=dict)
    """Name of a small file that the save copied → SHA-256 of its contents."""

    @classmethod
    def of(cls, token: str, sidecars: Mapping[str, bytes]) -> SaveRecord:
        """Describe a save that copies these files."""
        copied = {name: data for name, data in sidecars.items() if not is_save_name(name)}
        return cls(token, {name: hashlib.sha256(data).hexdigest() for name, data in copied.items()})

    def write(self, directory: str) -> None:
        """Write the record into the directory of an uncommitted save.

        Raises:
            CheckpointError: The disk is full or failed, or the store cannot be reached.
        """
        fields = {"format_version": _FORMAT_VERSION, **asdict(self)}
        write_file(directory, SAVE_RECORD_NAME, json.dumps(fields).encode("ascii") + b"\n")


def read_save_record(directory: str) -> SaveRecord:
    """Read the record of the save in a directory, a normal path or URI; an empty one where none is valid.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    data = read_beside(storage_of(directory), directory, SAVE_RECORD_NAME, MAX_JSON_BYTES)
    try:
        fields = {} if data is None else parse_object(data)
    except ValueError:
        return SaveRecord()
    token, sidecars = fields.get("token"), fields.get("sidecars")
    if fields.get("format_version") != _FORMAT_VERSION or not isinstance(token, str) or not isinstance(sidecars, dict):
        return SaveRecord()
    return SaveRecord(token, sidecars)


def own_sidecars(directory: str) -> frozenset[str]:
    """Return the small files that the save in a directory copied there and that are unchanged since.

    Raises:
        CheckpointError: The store cannot be reached.
    """
    storage, listed = storage_of(directory), read_save_record(directory).sidecars

    def is_unchanged(name: str) -> bool:
        path = join_path(directory, name)
        if not is_sidecar_name(name) or storage.find(path).kind != "file":
            return False
        return hashlib.sha256(read_sidecar(storage, directory, name)).hexdigest() == listed[name]

    # By name, not by `list_sidecar_files`: an interrupted save may lack the modules.json that names a folder.
    return frozenset(filter(is_unchanged, listed))


def other_entries(directory: str) -> list[str]:
    """Return the entries of a directory that no save wrote or copied, as sorted relative paths; a directory is one.

    Args:
        directory: A normal path or URI.

    Raises:
        CheckpointError: The directory cannot be listed.
    """
    storage, copied = storage_of(directory), own_sidecars(directory)
    folders = {*SAVE_FOLDERS, *folders_of(copied)}
    others = []
    for folder in folders:
        where = join_path(directory, folder) if folder else directory
        if storage.find(where).kind != "directory":
            continue
        for name in storage.list_names(where):
            entry, path = f"{folder}/{name}".lstrip("/"), join_path(where, name)
            if entry in folders:
                is_own = storage.find(path).kind == "directory"
            else:  # a store has no directories in the place of files
                is_own = entry in copied or (is_save_name(name, folder) and not os.path.isdir(path))
            if not is_own:
                others.append(entry)
    return sorted(others)
