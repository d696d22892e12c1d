"""`Case`: a checkpoint to load and its module; `Arm`: one way to load the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysharding.config import Sharding
from raysharding.distributed import LoadReport


@dataclass(frozen=True)
class Case:
    """The checkpoint and module that every arm of a benchmark loads. Each rank creates its own `Case`."""

    checkpoint: str
    """Path of the checkpoint."""
    build: Callable[[], nn.Module]
    """Builds the module on meta, not yet sharded; no collective."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Loading` for all of raysharding's transports."""
    sharding: Sharding = field(default_factory=Sharding)
    """Sharding of the module."""
    device_type: str = "cpu"
    """`"cpu"` or `"cuda"`."""

    @property
    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        path = Path(self.checkpoint)
        return [path] if path.suffix == ".safetensors" else sorted(path.glob("*.safetensors"))


Run = Callable[[], LoadReport | nn.Module | None]
"""The timed function: loads, and returns a `LoadReport`, a module of its own, or `None`."""


@dataclass(frozen=True)
class Arm:
    """One way to load, or one floor."""

    name: str
    """Name on the command line and in the table."""
    prepare: Callable[[Case, nn.Module], Run]
    """Untimed preparation, such as imports or a floor's plans. Called on every rank with a new, sharded module on meta.
    Raises `ValueError`, `ImportError` or `NotImplementedError` on every rank if the arm cannot load the case."""
    is_floor: bool = False
    """True if the arm only moves bytes, without a load: its module is not compared with the others'."""
    device_type: str | None = None
    """The only device type that the arm supports. Default: any."""


def shard_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers on this rank."""
    from raysharding.distributed.fully_shard import local_tensor, module_tensors

    return sum(local_tensor(tensor).nbytes for tensor in module_tensors(module).values())


def host_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
