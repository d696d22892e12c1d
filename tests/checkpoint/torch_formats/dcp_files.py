"""Directories as torch.distributed.checkpoint writes them, chunk by chunk, so that a test can make any of it wrong."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from raysharding.checkpoint.torch_formats import DcpReader, dcp_reader
from tests.checkpoint.build import bits

FILE = "__0_0.distcp"
Parts = Sequence[tuple[Sequence[int], torch.Tensor]]
"""(offsets, values) of each chunk."""


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata_of(parts: Mapping[str, Parts], directory: Path, shapes: Mapping[str, Sequence[int]] = {}) -> Metadata:
    """Write one file with all chunks, and describe it; shapes are what the chunks reach unless given."""
    entries, storage = {}, {}
    with (directory / FILE).open("wb") as file:
        for key, chunks in parts.items():
            ends = [[o + s for o, s in zip(offsets, part.shape, strict=True)] for offsets, part in chunks]
            shape = shapes.get(key, [max(column) for column in zip(*ends, strict=True)])
            boxes = [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in chunks]
            entries[key] = TensorStorageMetadata(TensorProperties(chunks[0][1].dtype), torch.Size(shape), boxes)
            for number, (offsets, part) in enumerate(chunks):
                data = saved(part)
                index = MetadataIndex(key, torch.Size(offsets), number)
                storage[index] = _StorageInfo(FILE, file.tell(), len(data))
                file.write(data)
    return Metadata(entries, storage_data=storage)  # type: ignore[arg-type]


def write_metadata(directory: Path, metadata: Any) -> Path:
    """Pickle `.metadata`."""
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


def write_dcp(directory: Path, parts: Mapping[str, Parts]) -> Path:
    """Write a directory of these chunks."""
    directory.mkdir(exist_ok=True)
    return write_metadata(directory, metadata_of(parts, directory))


def cut(tensor: torch.Tensor, *cuts: Sequence[int]) -> Parts:
    """All boxes between the cuts of each dimension."""
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((), tensor)]
    for dim, places in enumerate(cuts):
        edges = [0, *places, tensor.shape[dim]]
        boxes = [
            ((*offsets, first), part.narrow(dim, first, end - first).clone())
            for offsets, part in boxes
            for first, end in pairwise(edges)
        ]
    return [((*offsets, *(0,) * (tensor.dim() - len(offsets))), part) for offsets, part in boxes]


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, by our reader."""
    tensors = {}
    reader = DcpReader(directory)
    for key, tensor in reader.metadata.tensors.items():
        data = bytearray()

        def write(offset: int, piece: memoryview, key: str = key, data: bytearray = data) -> None:
            assert offset == len(data), f"{key}: a piece at {offset}, not at {len(data)}"
            assert piece.nbytes <= dcp_reader.PIECE_BYTES
            data += piece

        reader.read_tensor(key, write)
        assert len(data) == tensor.num_bytes, f"{key}: {len(data)} of {tensor.num_bytes} bytes"
        values = torch.frombuffer(data, dtype=tensor.dtype) if data else torch.empty(0, dtype=tensor.dtype)
        tensors[key] = values.reshape(tensor.shape)
    return tensors


def read_with_torch(directory: Path) -> dict[str, Any]:
    """Everything, by torch's own reader, which runs every pickle there is."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def save_with_torch(directory: Path, state: Mapping[str, Any], **options: Any) -> Path:
    """One process's `dcp.save`."""
    writer = FileSystemWriter(directory, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save(dict(state), storage_writer=writer, no_dist=True)
    return directory


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name
