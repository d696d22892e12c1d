"""A Hugging Face checkpoint on a Ray cluster as a resident FSDP2 model, with one call.

The public names. Each is imported when it is first used (PEP 562), so that
`import raysharding.distributed` needs no ray and `import raysharding` costs nothing.
"""
# ruff: noqa: F403, F405 - `__all__` says which of the names are this module's; type checkers find them by the stars

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "DataError",
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
    "__version__",
    "current_worker",
]

_HOMES = ("errors", "config", "batch", "distributed", "worker", "group")
"""Modules that hold the names, each before those that import it: no name costs more than the module that holds it."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    value = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
