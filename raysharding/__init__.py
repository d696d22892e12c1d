"""A Hugging Face checkpoint on a Ray cluster as a resident FSDP2 model, with one call.

The public names, and where they live. Each is imported when it is first used (PEP 562), so that
`import raysharding.distributed` needs no ray and `import raysharding` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysharding.batch import Out, PerRank, Same, Split
    from raysharding.config import Loading, Placement, Sharding, Timeouts
    from raysharding.distributed import LoadReport, ParamGroups, SaveReport, Scheduled
    from raysharding.errors import (
        CallCancelledError,
        CallTimeoutError,
        CheckpointError,
        DataError,
        EmptyBatchError,
        GroupBrokenError,
        GroupError,
        GroupTakenOverError,
        OutputTooLargeError,
        PlacementError,
        PlanError,
        PreflightError,
        RankFailure,
        RayshardingError,
        RendezvousError,
    )
    from raysharding.group import Call, FitReport, FitStep, ShardedModelGroup
    from raysharding.worker import current_worker

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

_HOMES = {
    "batch": ("Out", "PerRank", "Same", "Split"),
    "config": ("Loading", "Placement", "Sharding", "Timeouts"),
    "distributed": ("LoadReport", "ParamGroups", "SaveReport", "Scheduled"),
    "errors": (
        "CallCancelledError",
        "CallTimeoutError",
        "CheckpointError",
        "DataError",
        "EmptyBatchError",
        "GroupBrokenError",
        "GroupError",
        "GroupTakenOverError",
        "OutputTooLargeError",
        "PlacementError",
        "PlanError",
        "PreflightError",
        "RankFailure",
        "RayshardingError",
        "RendezvousError",
    ),
    "group": ("Call", "FitReport", "FitStep", "ShardedModelGroup"),
    "worker": ("current_worker",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
