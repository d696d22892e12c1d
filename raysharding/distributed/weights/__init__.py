"""Weights of a sharded module, given to other models and engines."""

from raysharding.distributed.weights.export import WeightStream
