"""Files, a state dict or a replica into a module."""

from raysharding.distributed.loading.context import Progress, silent
from raysharding.distributed.loading.extra_state import extra_state_owners
from raysharding.distributed.loading.from_replica import copy_replicas
from raysharding.distributed.loading.full_state_dict import (
    distribute_state_dict,
    load_full_state_dict,
    load_full_tensors,
)
from raysharding.distributed.loading.load import load_checkpoint
from raysharding.distributed.loading.report import LoadReport

__all__ = [
    "LoadReport",
    "Progress",
    "copy_replicas",
    "distribute_state_dict",
    "extra_state_owners",
    "load_checkpoint",
    "load_full_state_dict",
    "load_full_tensors",
    "silent",
]
