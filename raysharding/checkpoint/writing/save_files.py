"""Which entries of a directory a save writes. All others are the user's; no save and no removal touches them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from raysharding.checkpoint.format import (
    MANIFEST_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    TRAINING_FOLDER,
    TRAINING_NAME,
)
from raysharding.checkpoint.storage import Storage, join_path

_WEIGHTS: Final = (
    r"model(-\d{5,}-of-\d{5,}(-[0-9a-f]+)?)?\.safetensors|model\.safetensors\.index\.json|raysharding\.manifest\.json"
)
_MODEL: Final = r"adapter_model\.safetensors|(adapter_|generation_)?config\.json|raysharding\.save\.json"
_FILES: Final[Mapping[str, re.Pattern[str]]] = {
    "": re.compile(f"{_WEIGHTS}|{_MODEL}"),
    OPTIMIZER_FOLDER: re.compile(rf"{_WEIGHTS}|raysharding\.optimizer\.json"),
    TRAINING_FOLDER: re.compile(r"raysharding\.training\.json"),
}
"""Folder of a save → names of the files that a save writes there."""
_MARKS: Final = {OPTIMIZER_FOLDER: OPTIMIZER_NAME, TRAINING_FOLDER: TRAINING_NAME}
"""Folder of a save → the file without which a folder of that name is the user's."""


def is_save_name(name: str, folder: str = "") -> bool:
    """Return True if a save writes a file of this name into this folder of its directory."""
    return folder in _FILES and _FILES[folder].fullmatch(name) is not None


def is_weight_name(name: str) -> bool:
    """Return True if a save writes the model's weights, or their index, into a file of this name."""
    return name != MANIFEST_NAME and re.fullmatch(_WEIGHTS, name) is not None


def save_files(storage: Storage, directory: str) -> list[str]:
    """Return the paths of the files in a directory that have the name of a file of a save.

    Args:
        storage: The storage of the directory.
        directory: A normal path or URI of a directory.
    """
    found = []
    for folder in _FILES:
        where = join_path(directory, folder) if folder else directory
        if not folder or storage.find(where).kind == "directory":
            found += [join_path(where, name) for name in storage.list_names(where) if is_save_name(name, folder)]
    return found


def other_entries(directory: str, opened: Collection[str] = ()) -> list[str]:
    """Return the entries of a local directory that no save writes, as sorted relative paths; a directory is one entry.

    That includes an entry with the name of a save's file and another kind (a directory `config.json`). Symlinks are
    not followed.

    Args:
        directory: A local path.
        opened: Relative paths of folders that also hold files of a save: their entries are listed one by one.
    """
    return sorted(_other_entries(directory, "", opened))


def _other_entries(directory: str, folder: str, opened: Collection[str]) -> Iterator[str]:
    is_ours = not folder or (folder in _MARKS and os.path.lexists(os.path.join(directory, folder, _MARKS[folder])))
    with os.scandir(os.path.join(directory, folder)) as entries:
        for entry in entries:
            path, is_directory = os.path.join(folder, entry.name), entry.is_dir(follow_symlinks=False)
            if is_directory and (path in _FILES or path in opened):
                yield from _other_entries(directory, path, opened)
            elif is_directory or not (is_ours and is_save_name(entry.name, folder)):
                yield path


def has_save_name(entry: str) -> bool:
    """Return True if an entry of `other_entries` is at a path where a save writes a file or a folder."""
    folder, name = os.path.split(entry)
    return is_save_name(name, folder) or (not folder and name in _FILES)
