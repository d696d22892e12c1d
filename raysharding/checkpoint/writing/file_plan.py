"""Which tensors go into which file of a save, what the files are called, and the index that says so."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterable, Mapping

import torch

from raysharding.checkpoint.format import INDEX_NAME, SINGLE_NAME
from raysharding.checkpoint.storage import is_remote, join_path, os_errors, storage_of


def plan_files(sizes: Mapping[str, int], num_files: int) -> tuple[tuple[str, ...], ...]:
    """Deal whole tensors out over files of about the same size: the largest first, each to the smallest file so far.

    The largest file is at most 4/3 of the best possible. The same input gives the same plan on every rank.

    Args:
        sizes: Name → bytes.
        num_files: Files wanted.

    Returns:
        The names in each file, in the order of `sizes`. No file is empty, so there are fewer than `num_files` where
        there are fewer tensors; no tensor at all makes one empty file.
    """
    assert num_files >= 1, f"num_files={num_files}"
    num_files = max(1, min(num_files, len(sizes)))
    order = {name: position for position, name in enumerate(sizes)}
    files: list[list[str]] = [[] for _ in range(num_files)]
    # The number of tensors breaks ties, so that tensors of 0 bytes spread out too and leave no file empty.
    heap = [(0, 0, file) for file in range(num_files)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], order[name])):
        num_bytes, num_tensors, file = heap[0]
        files[file].append(name)
        heapq.heapreplace(heap, (num_bytes + sizes[name], num_tensors + 1, file))
    return tuple(tuple(sorted(names, key=order.__getitem__)) for names in files)


def file_order(names: Iterable[str], dtype_of: Callable[[str], torch.dtype]) -> list[str]:
    """The order in which a file holds tensors: wider dtypes first, so that each is aligned to its element."""
    return sorted(names, key=lambda name: -dtype_of(name).itemsize)


def file_names(num_files: int, *, is_listed: bool = False) -> tuple[str, ...]:
    """Standard names: `model.safetensors` alone, or `model-00001-of-00004.safetensors` and so on.

    Args:
        num_files: How many.
        is_listed: Whether an index lists even one file alone.
    """
    if num_files == 1 and not is_listed:
        return (SINGLE_NAME,)
    return tuple(f"model-{file:05d}-of-{num_files:05d}.safetensors" for file in range(1, num_files + 1))


def write_index(directory: str, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `model.safetensors.index.json` as transformers does. `commit_staging` puts it on the disk.

    Args:
        directory: The staging directory.
        weight_map: Tensor → file name.
        total_size: Payload bytes of all files together.

    Raises:
        CheckpointError: the disk is full or failed.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(directory, INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode("ascii"))


def make_folder(directory: str, name: str) -> str:
    """Make a folder in a staging directory and return its path; an object store needs none.

    Raises:
        CheckpointError: it cannot be made.
    """
    path = join_path(directory, name)
    if not is_remote(directory):
        with os_errors("cannot make a directory", path):
            os.mkdir(path)
    return path


def write_file(directory: str, name: str, data: bytes) -> None:
    """Write one small file, such as config.json, into a staging directory, or an object, in an object store.

    Raises:
        CheckpointError: the disk is full or failed, or the store is out of reach.
    """
    storage_of(directory).put(join_path(directory, name), data)
