"""Names of the entries that a save writes. All others are the user's, but for small files that a save copied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from raysharding.checkpoint.format import MANIFEST_NAME, OPTIMIZER_FOLDER, TRAINING_FOLDER
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
SAVE_FOLDERS: Final = tuple(_FILES)
"""Folders of a save, relative to it."""


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
    paths = []
    for folder in _FILES:
        where = join_path(directory, folder) if folder else directory
        if not folder or storage.find(where).kind == "directory":
            paths += [join_path(where, name) for name in storage.list_names(where) if is_save_name(name, folder)]
    return paths
