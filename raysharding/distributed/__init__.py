"""The SPMD layer: plain `torch.distributed`, for people with their own launcher and for the group's workers. No ray."""

# ruff: noqa: F403 - a face whose names all belong here, too
from typing import TYPE_CHECKING

import raysharding.distributed.accelerate_compat as accelerate_compat
import raysharding.distributed.fsdp as fsdp
import raysharding.distributed.sharding as sharding
from raysharding.distributed.accelerate_compat import *
from raysharding.distributed.comm import init_mesh, using_group
from raysharding.distributed.fsdp import *
from raysharding.distributed.fully_shard import materialize, reduce_replicated_gradients, reshard, shard_module
from raysharding.distributed.loading import LoadReport, distribute_state_dict, load_checkpoint, load_full_state_dict
from raysharding.distributed.optim import ParamGroups, Scheduled
from raysharding.distributed.saving import SaveReport, load_optimizer_state, merge_fsdp_weights, save_checkpoint
from raysharding.distributed.sharding import *
from raysharding.distributed.training import train_step
from raysharding.distributed.transfer import gather_state_dict
from raysharding.distributed.weights import CopyReport
from raysharding.imports import lazy_names

if TYPE_CHECKING:
    from raysharding.distributed.accelerate_compat import FullyShardedDataParallelPlugin

# This library's own.
__all__ = [
    "CopyReport",
    "LoadReport",
    "ParamGroups",
    "SaveReport",
    "Scheduled",
    "distribute_state_dict",
    "gather_state_dict",
    "init_mesh",
    "load_checkpoint",
    "load_full_state_dict",
    "load_optimizer_state",
    "materialize",
    "merge_fsdp_weights",
    "reduce_replicated_gradients",
    "reshard",
    "save_checkpoint",
    "shard_module",
    "train_step",
    "using_group",
]

__all__ += accelerate_compat.__all__  # accelerate's FSDP utilities
__all__ += fsdp.__all__  # PyTorch's FullyShardedDataParallel
__all__ += sharding.__all__  # sharded modules

__getattr__, __dir__ = lazy_names(__name__, ("FullyShardedDataParallelPlugin",), ("accelerate_compat",))
