"""Timing of loads of one checkpoint on this machine, beside floors that bound a load's time from below. No Ray."""

from raysharding.bench.command import DEFAULT_TRANSPORTS, TRANSPORTS, bench, verdict
from raysharding.bench.plot import require_matplotlib, save_plot
from raysharding.bench.ratios import json_lines, progress_line, table
from raysharding.bench.rounds import Load, load_line
