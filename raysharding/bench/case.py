"""`Case`: what is loaded, and how its module is made; `Arm`: one way to load it."""

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
    """What every arm of a benchmark loads. Each rank makes its own."""

    checkpoint: str
    """Path of the checkpoint."""
    build: Callable[[], nn.Module]
    """Makes the module on meta, not yet sharded; no collective."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Loading` that all of our transports get."""
    sharding: Sharding = field(default_factory=Sharding)
    """How the module is cut."""
    device_type: str = "cpu"
    """`"cpu"` or `"cuda"`."""

    @property
    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        path = Path(self.checkpoint)
        return [path] if path.suffix == ".safetensors" else sorted(path.glob("*.safetensors"))


Run = Callable[[], LoadReport | nn.Module | None]
"""What the clock sees: loads, and returns our report, or a module of its own, or nothing."""


@dataclass(frozen=True)
class Arm:
    """One way to load, or one floor."""

    name: str
    """As on the command line and in the table."""
    prepare: Callable[[Case, nn.Module], Run]
    """Called by every rank outside of the clock with a module that is new, on meta and sharded: imports, plans of a
    floor. Raises `ValueError`, `ImportError` or `NotImplementedError` on every rank where the arm cannot do the case.
    """
    is_floor: bool = False
    """Moves bytes without a load around them: its module is not compared with the others'."""
    is_peer: bool = False
    """Another library's."""
    device_type: str | None = None
    """The only kind of device it is for. Default: any."""


def shard_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers on this rank."""
    from raysharding.distributed.fully_shard import local_tensor, module_tensors

    return sum(local_tensor(tensor).nbytes for tensor in module_tensors(module).values())


def host_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, writable."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
