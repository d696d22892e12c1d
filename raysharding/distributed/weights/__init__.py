"""Weights on the move: from a group into another, bucket by bucket."""

from raysharding.distributed.weights.copy import WeightCopy
from raysharding.distributed.weights.copy_report import CopyReport
from raysharding.distributed.weights.copy_spec import CopySpec
