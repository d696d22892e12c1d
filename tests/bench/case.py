"""`Case`: a checkpoint to load and its module; `Arm`: one way to load the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from raysharding.config import Sharding
from raysharding.distributed import LoadReport


@dataclass(frozen=True)
class Case:
    """The checkpoint and module that every arm loads. Each rank creates its own `Case`."""

    checkpoint: Path
    """The directory of the checkpoint."""
    build: Callable[[], nn.Module]
    """Builds the module on meta, not yet sharded; no collective."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Loading` for all of raysharding's transports."""
    sharding: Sharding = field(default_factory=Sharding)
    """Sharding of the module."""
    device_type: str = "cpu"
    """`"cpu"`, `"cuda"`, or `"sim"`, the simulated device, which shows that arms run, not their speed."""


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
