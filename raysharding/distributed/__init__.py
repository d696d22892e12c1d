"""The SPMD layer: plain `torch.distributed`, for people with their own launcher and for the group's workers. No ray."""

from raysharding.distributed.gathering import gather_state_dict
from raysharding.distributed.gradients import clip_grad_norm_
from raysharding.distributed.loading import load_checkpoint
from raysharding.distributed.materializing import materialize
from raysharding.distributed.mesh import init_mesh
from raysharding.distributed.report import LoadReport, SaveReport
from raysharding.distributed.saving import save_checkpoint
from raysharding.distributed.sharded_module import reshard, shard_module
from raysharding.distributed.training import train_step

__all__ = [
    "LoadReport",
    "SaveReport",
    "clip_grad_norm_",
    "gather_state_dict",
    "init_mesh",
    "load_checkpoint",
    "materialize",
    "reshard",
    "save_checkpoint",
    "shard_module",
    "train_step",
]
