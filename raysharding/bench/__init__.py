"""Timing of loads of one checkpoint on this machine, beside floors that bound a load's time from below. No Ray."""

from raysharding.bench.command import DEFAULT_TRANSPORTS, TRANSPORTS, bench, verdict
from raysharding.bench.load import Load, Operations, load_line
from raysharding.bench.plot import require_matplotlib, save_plot
from raysharding.bench.rank_set import ArmError, BenchError, RankSet, Setup
from raysharding.bench.ratios import json_lines, progress_line, table
from raysharding.bench.rounds import Results, Rounds

__all__ = [
    "DEFAULT_TRANSPORTS",
    "TRANSPORTS",
    "ArmError",
    "BenchError",
    "Load",
    "Operations",
    "RankSet",
    "Results",
    "Rounds",
    "Setup",
    "bench",
    "json_lines",
    "load_line",
    "progress_line",
    "require_matplotlib",
    "save_plot",
    "table",
    "verdict",
]
