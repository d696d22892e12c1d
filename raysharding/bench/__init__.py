"""Times loads of one checkpoint on this machine, beside floors that say how fast a load could be. Without Ray."""

from raysharding.bench.command import bench, verdict
from raysharding.bench.load import Load, Operations
from raysharding.bench.rank_set import ArmError, BenchError, RankSet, Setup
from raysharding.bench.rounds import Results, Rounds

__all__ = [
    "ArmError",
    "BenchError",
    "Load",
    "Operations",
    "RankSet",
    "Results",
    "Rounds",
    "Setup",
    "bench",
    "verdict",
]
