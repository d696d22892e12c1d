"""A model as a group of Ray actors: placement, a controller, calls. Only this package imports Ray.

The package imports each of its names on first use: the controller's process must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysharding.imports import lazy_names

if TYPE_CHECKING:
    from raysharding.group.calls import Call, Handle, LiveView
    from raysharding.group.cluster import NodeCapacity
    from raysharding.group.fit import EarlyStop, FitReport, FitStep, PredictReport
    from raysharding.group.group import ShardedModelGroup
    from raysharding.group.messages import GroupState
    from raysharding.group.ranks import RankInfo

__all__ = [
    "Call",
    "EarlyStop",
    "FitReport",
    "FitStep",
    "GroupState",
    "Handle",
    "LiveView",
    "NodeCapacity",
    "PredictReport",
    "RankInfo",
    "ShardedModelGroup",
]

__getattr__, __dir__ = lazy_names(__name__, __all__, ("ranks", "cluster", "messages", "calls", "fit", "group"))
