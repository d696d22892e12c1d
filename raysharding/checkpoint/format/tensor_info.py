"""The entry of one tensor in a checkpoint, and the safetensors names of the dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

DTYPE_OF_NAME: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""safetensors dtype name → torch dtype, for every dtype that fills whole bytes."""

NAME_OF_DTYPE: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}
"""torch dtype → safetensors dtype name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype, shape and place in the files of one tensor, whose bytes are row-major and contiguous."""

    name: str
    """Key in the checkpoint file."""
    dtype: torch.dtype
    """dtype in the file."""
    shape: tuple[int, ...]
    """Full shape; `()` for a 0-dim tensor."""
    file: int
    """Index into `Checkpoint.files`."""
    offset: int
    """Byte offset of the first element, from the start of the file."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize
