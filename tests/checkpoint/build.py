"""Raw safetensors files, written byte by byte so that a test can make any of them wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.checkpoint.format.sidecars import list_sidecar_files
from raysharding.checkpoint.format.tensor_info import DTYPE_OF_NAME
from raysharding.checkpoint.storage import storage_of
from raysharding.checkpoint.writing import FileWriter
from raysharding.errors import CheckpointError

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [32, 32]},
}
GOOD_PAYLOAD = bytes(range(32))


def write_raw(path: Path, header: Mapping[str, Any] | bytes, payload: bytes, length: int | None = None) -> Path:
    """Write length, header and payload as they are; `length` lies about the header where it is given."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(data) if length is None else length).to_bytes(8, "little") + data + payload)
    return path


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def random_tensors() -> dict[str, torch.Tensor]:
    """A tensor of every dtype, of random bits, and the awkward shapes: 0-dim, empty, many dimensions."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPE_OF_NAME.items():
        for shape in ((3, 5), (), (0,), (2, 0, 3), (1, 1, 2, 1)):
            count = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
            tensors[f"{name}.{'x'.join(map(str, shape))}"] = data.view(dtype).reshape(shape)
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat: NaNs and float8 compare by them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write one file through `FileWriter`."""
    parts = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with FileWriter(str(path), parts, metadata or {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.write_at(name, 0, bits(tensor))
    return path


def save_sharded(directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    """Write a directory of several files and their index."""
    directory.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save(directory / name, tensors)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def sidecar_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The small files beside a checkpoint's weights that a save copies."""
    return list_sidecar_files(storage_of(checkpoint.directory), checkpoint.directory)


def refused(path: str | Path, message: str, **options: Any) -> CheckpointError:
    """Open a checkpoint, which must raise an error with this message; return that."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path, **options)
    return caught.value
