"""Which tensors go into which file of a save, what the files are called, and the index that says so."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Mapping

from raysharding.checkpoint.index import INDEX_NAME, SINGLE_NAME
from raysharding.errors import CheckpointError


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


def file_names(num_files: int) -> tuple[str, ...]:
    """Standard names: `model.safetensors` alone, or `model-00001-of-00004.safetensors` and so on."""
    if num_files == 1:
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


def write_file(directory: str, name: str, data: bytes) -> None:
    """Write one small file, such as config.json, into a staging directory.

    Raises:
        CheckpointError: the disk is full or failed.
    """
    path = os.path.join(directory, name)
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from error
