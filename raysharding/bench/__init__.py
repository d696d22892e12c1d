"""Timing of loads of one checkpoint on this machine, beside floors that bound a load's time from below. No Ray."""

from raysharding.bench.command import DEFAULT_TRANSPORTS as DEFAULT_TRANSPORTS
from raysharding.bench.command import TRANSPORTS as TRANSPORTS
from raysharding.bench.command import bench as bench
from raysharding.bench.command import verdict as verdict
from raysharding.bench.load import Load as Load
from raysharding.bench.load import Operations as Operations
from raysharding.bench.load import load_line as load_line
from raysharding.bench.plot import require_matplotlib as require_matplotlib
from raysharding.bench.plot import save_plot as save_plot
from raysharding.bench.rank_set import ArmError as ArmError
from raysharding.bench.rank_set import BenchError as BenchError
from raysharding.bench.rank_set import RankSet as RankSet
from raysharding.bench.rank_set import Setup as Setup
from raysharding.bench.ratios import json_lines as json_lines
from raysharding.bench.ratios import progress_line as progress_line
from raysharding.bench.ratios import table as table
from raysharding.bench.rounds import Results as Results
from raysharding.bench.rounds import Rounds as Rounds
