"""The SPMD layer: plain `torch.distributed`, for people with their own launcher and for the group's workers. No ray."""

from raysharding.distributed.accelerate_compat import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fsdp2_apply_ac,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
)
from raysharding.distributed.comm import init_mesh
from raysharding.distributed.fsdp import (
    apply,
    apply_fsdp2,
    clip_grad_norm_,
    fsdp_modules,
    full_optim_state_dict,
    get_state_dict_type,
    named_buffers,
    named_parameters,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    params_with_grad,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    set_state_dict_type,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
    state_dict_type,
    summon_full_params,
)
from raysharding.distributed.fully_shard import materialize, reduce_replicated_gradients, reshard, shard_module
from raysharding.distributed.loading import LoadReport, distribute_state_dict, load_checkpoint, load_full_state_dict
from raysharding.distributed.optim import ParamGroups, Scheduled
from raysharding.distributed.saving import SaveReport, load_optimizer_state, merge_fsdp_weights, save_checkpoint
from raysharding.distributed.sharding import (
    DistModule,
    broadcast_and_shard_state_dict,
    load_state_dict,
    patch_accelerate,
    shard_broadcasted_state_dict,
)
from raysharding.distributed.training import train_step
from raysharding.distributed.transfer import gather_state_dict
from raysharding.distributed.weights import CopyReport

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
    "reduce_replicated_gradients",
    "reshard",
    "save_checkpoint",
    "shard_module",
    "train_step",
]

# Sharded modules: `sharding.py`.
__all__ += [
    "DistModule",
    "broadcast_and_shard_state_dict",
    "load_state_dict",
    "patch_accelerate",
    "shard_broadcasted_state_dict",
]

# PyTorch's FullyShardedDataParallel: `fsdp/`.
__all__ += [
    "apply",
    "apply_fsdp2",
    "clip_grad_norm_",
    "fsdp_modules",
    "full_optim_state_dict",
    "get_state_dict_type",
    "named_buffers",
    "named_parameters",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "params_with_grad",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_state_dict_type",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
    "summon_full_params",
]

# accelerate's FSDP utilities: `accelerate_compat/`, `saving/merge_dcp.py`.
__all__ += [
    "FullyShardedDataParallelPlugin",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fsdp2_apply_ac",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "merge_fsdp_weights",
]
