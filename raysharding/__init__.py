"""Load a Hugging Face checkpoint onto a Ray cluster as a resident FSDP2 model, with one call.

The package holds the public names and imports each of them on first use (PEP 562), so
`import raysharding.distributed` needs no ray and `import raysharding` costs nothing.
"""
# ruff: noqa: F403, F405 - `__all__` lists the names that belong to this module; type checkers resolve the star imports

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raysharding.gc_pause import paused_gc

if TYPE_CHECKING:
    from raysharding.batch import *
    from raysharding.config import *
    from raysharding.distributed import *
    from raysharding.errors import *
    from raysharding.group import *
    from raysharding.worker import *

__version__ = "0.1.0"

__all__ = [
    "Call",
    "CallCancelledError",
    "CallTimeoutError",
    "CheckpointError",
    "CopyReport",
    "DataError",
    "EarlyStop",
    "EmptyBatchError",
    "FitReport",
    "FitStep",
    "GroupBrokenError",
    "GroupError",
    "GroupTakenOverError",
    "LoadReport",
    "Loading",
    "Out",
    "OutputTooLargeError",
    "ParamGroups",
    "PerRank",
    "Placement",
    "PlacementError",
    "PlanError",
    "PredictReport",
    "PreflightError",
    "RankFailure",
    "RayshardingError",
    "RendezvousError",
    "Same",
    "SaveReport",
    "Scheduled",
    "ShardedModelGroup",
    "Sharding",
    "Split",
    "Timeouts",
    "UnreadableLossError",
    "__version__",
    "current_worker",
]

_HOMES = ("errors", "config", "batch", "distributed", "worker", "group")
"""Modules that hold the names, each before its importers: a name costs no more than the import of its own module."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    with paused_gc():
        value = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
