"""Weights of a sharded module, given to other groups and to engines, bucket by bucket."""

from raysharding.distributed.weights.copy import CopySpec, WeightCopy
from raysharding.distributed.weights.copy_report import CopyReport
from raysharding.distributed.weights.export import WeightStream
