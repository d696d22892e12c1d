"""Load a Hugging Face checkpoint onto a Ray cluster as a resident FSDP2 model, with one call.

The package holds the public names and imports each of them on first use (PEP 562), so
`import raysharding.distributed` needs no ray and `import raysharding` costs nothing.
"""
# ruff: noqa: F403, F405 - `__all__` lists the names that belong to this module; type checkers resolve the star imports

from __future__ import annotations

from typing import TYPE_CHECKING

from raysharding.imports import lazy_names

if TYPE_CHECKING:
    from raysharding.batch import *
    from raysharding.config import *
    from raysharding.distributed import *
    from raysharding.errors import *
    from raysharding.group import Call, EarlyStop, FitReport, FitStep, PredictReport, ShardedModelGroup
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

__getattr__, __dir__ = lazy_names(__name__, __all__, ("errors", "config", "batch", "distributed", "worker", "group"))
