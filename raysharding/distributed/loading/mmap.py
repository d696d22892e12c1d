"""`Loading(mmap=True)`: shards that are mapped pages of the checkpoint files instead of copies."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence

import torch

from raysharding.checkpoint import CheckpointFile
from raysharding.distributed.fully_shard import TensorLayout
from raysharding.distributed.transfer import Extent, Extents, PlannedTensor
from raysharding.errors import CheckpointError


def mappable(
    planned: Sequence[PlannedTensor], extents: Mapping[str, Extents], on_meta: Collection[str]
) -> list[tuple[TensorLayout, Extent]]:
    """Return the tensors without memory whose shards are all parts of one range of a file; the same on every rank.

    The shard must be contiguous in the file, in the module's dtype and aligned to it; and all shards must have the same
    length, because FSDP2 pads shorter ones in memory of its own. Each range is mapped for one tensor, as writes are
    separate.
    """
    mapped: dict[tuple[int, int], tuple[TensorLayout, Extent]] = {}
    for item in planned:
        layout, ranges = item.layout, extents[item.layout.fqn]
        if layout.fqn not in on_meta or ranges is None or len(ranges) != 1:
            continue
        (extent,) = ranges
        same = item.wire_dtype == layout.dtype == extent.dtype
        even = layout.num_shards == 0 or layout.shape[0] % layout.num_shards == 0
        if same and even and extent.offset % layout.dtype.itemsize == 0 and layout.num_elements > 0:
            mapped.setdefault((extent.file, extent.offset), (layout, extent))
    return list(mapped.values())


def map_tensors(
    files: Sequence[CheckpointFile], found: Sequence[tuple[TensorLayout, Extent]], shard_index: int
) -> dict[str, torch.Tensor]:
    """Map this rank's shards copy-on-write: writes stay in this process.

    Returns:
        FQN → local tensor. Pages are read on first access. A mapping exists as long as its tensors.

    Raises:
        CheckpointError: A file cannot be mapped.
    """
    maps: dict[int, mmap.mmap] = {}
    mapped = {}
    for layout, extent in found:
        if extent.file not in maps:
            maps[extent.file] = _map(files[extent.file])
        start, stop = layout.local_range(shard_index)
        offset = extent.offset + (start - extent.start) * layout.dtype.itemsize
        try:
            flat = torch.frombuffer(maps[extent.file], dtype=layout.dtype, count=stop - start, offset=offset)
        except ValueError as error:
            what = f"ends before byte {offset + (stop - start) * layout.dtype.itemsize}: it was truncated meanwhile"
            raise CheckpointError(what, path=files[extent.file].path, tensor=extent.key) from error
        shape = layout.shape
        if layout.num_shards:
            shape = (shape[0] // layout.num_shards, *shape[1:])
        mapped[layout.fqn] = flat.view(shape)
    return mapped


def _map(file: CheckpointFile) -> mmap.mmap:
    try:
        with open(file.path, "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be mapped: {error}; load without mmap=True", path=file.path) from error
