"""Assign tensors to the files of a save, name the files, and write the index."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath

import torch

from raysharding.checkpoint.format import INDEX_NAME, SINGLE_NAME
from raysharding.checkpoint.storage import is_remote, join_path, os_errors, storage_of


def plan_files(sizes: Mapping[str, int], num_files: int) -> tuple[tuple[str, ...], ...]:
    """Distribute whole tensors over files of about equal size: the largest first, each to the smallest file so far.

    The largest file is at most 4/3 of the best possible. The same input gives the same plan on every rank.

    Args:
        sizes: Name → bytes.
        num_files: Number of files.

    Returns:
        The names in each file, in the order of `sizes`. No file is empty, so fewer tensors than `num_files` make fewer
        files; no tensor at all makes one empty file.
    """
    assert num_files >= 1, f"num_files={num_files}"
    num_files = max(1, min(num_files, len(sizes)))
    order = {name: position for position, name in enumerate(sizes)}
    files: list[list[str]] = [[] for _ in range(num_files)]
    # The number of tensors breaks ties, so that tensors of 0 bytes are distributed too and no file is empty.
    heap = [(0, 0, file) for file in range(num_files)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], order[name])):
        num_bytes, num_tensors, file = heap[0]
        files[file].append(name)
        heapq.heapreplace(heap, (num_bytes + sizes[name], num_tensors + 1, file))
    return tuple(tuple(sorted(names, key=order.__getitem__)) for names in files)


def file_order(names: Iterable[str], dtype_of: Callable[[str], torch.dtype]) -> list[str]:
    """Return the order of tensors in a file: wider dtypes first, so that each tensor is aligned to its element size."""
    return sorted(names, key=lambda name: -dtype_of(name).itemsize)


def file_names(num_files: int, token: str = "") -> tuple[str, ...]:
    """Return the standard names: `model.safetensors` alone, or `model-00001-of-00004.safetensors` and so on.

    Args:
        num_files: Number of files.
        token: Of a save whose index lists all files, even a single one; the names have it at their end.
    """
    if num_files == 1 and not token:
        return (SINGLE_NAME,)
    end = f"of-{num_files:05d}{token and '-'}{token}.safetensors"
    return tuple(f"model-{file:05d}-{end}" for file in range(1, num_files + 1))


def write_index(directory: str, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `model.safetensors.index.json` as transformers does. `commit_staging` syncs it to disk.

    Args:
        directory: The staging directory.
        weight_map: Tensor → file name.
        total_size: Payload bytes of all files together.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(directory, INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode("ascii"))


def make_folder(directory: str, name: str) -> str:
    """Create a folder and its missing parents in a directory, which must exist; an object store needs none.

    Returns:
        The path of the folder.

    Raises:
        CheckpointError: A folder cannot be created.
    """
    for folder in [] if is_remote(directory) else [*folders_of([name]), name]:
        path = join_path(directory, folder)
        # Not `makedirs`: of a staging directory that another process removes, no part may come back.
        with os_errors("cannot make a directory", path), suppress(FileExistsError):
            os.mkdir(path)
    return join_path(directory, name)


def folders_of(names: Iterable[str]) -> list[str]:
    """Return the folders on the way to these relative paths, each after the one that it is in."""
    return sorted({str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."})


def write_file(directory: str, name: str, data: bytes) -> None:
    """Write one small file, such as config.json, into a staging directory or an object store.

    Args:
        directory: A path or a normal URI.
        name: A relative path; missing folders are made.
        data: The contents.

    Raises:
        CheckpointError: The disk is full or failed, or the store cannot be reached.
    """
    if parent := name.rpartition("/")[0]:
        make_folder(directory, parent)
    storage_of(directory).put(join_path(directory, name), data)
