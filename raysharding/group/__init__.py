"""A model as a group of Ray actors: placement, rendezvous, supervision, calls. Only this package imports Ray."""

from raysharding.gc_pause import paused_gc

with paused_gc():  # every rank's process begins with these imports
    from raysharding.group.calls import Call, Handle
    from raysharding.group.cluster import NodeCapacity
    from raysharding.group.fit import EarlyStop, FitReport, FitStep, PredictReport
    from raysharding.group.group import ShardedModelGroup
    from raysharding.group.ranks import RankInfo
    from raysharding.group.supervision import GroupState, LiveView

NodeRoom = NodeCapacity
"""The old name of `NodeCapacity`."""

__all__ = [
    "Call",
    "EarlyStop",
    "FitReport",
    "FitStep",
    "GroupState",
    "Handle",
    "LiveView",
    "NodeCapacity",
    "NodeRoom",
    "PredictReport",
    "RankInfo",
    "ShardedModelGroup",
]
