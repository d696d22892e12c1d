"""Sharding of a module with FSDP2, and behaviour of its groups in forward, backward and after errors."""

from raysharding.distributed.fully_shard.activation_checkpointing import contexts_of
from raysharding.distributed.fully_shard.execution_order import check_execution_order, forget_execution_order
from raysharding.distributed.fully_shard.gradients import (
    check_norm,
    clip_grad_norm_,
    finish_backward,
    no_sync,
    reduce_replicated_gradients,
    scale_gradients,
    unaveraged_parameters,
)
from raysharding.distributed.fully_shard.internals import (
    bytes_to_keep,
    drop_unreduced_gradients,
    fsdp_modules,
    gradient_sync,
    init_roots,
    is_fsdp_hook,
    is_kept_gathered,
    is_not_gathered,
    is_offloaded,
    kept_whole,
    loadable,
    mark_offloaded,
    parameter_groups,
    refusing_use,
    require_idle,
    reshard,
    roots_before_blocks,
    tell_fsdp,
    training_dtypes,
)
from raysharding.distributed.fully_shard.layout import (
    ShardMap,
    TensorLayout,
    by_mesh,
    compute_device,
    inner_tensor,
    local_tensor,
    mesh_device,
    message_device,
    module_tensors,
    named_submodules,
    num_writes,
    persistent_names,
    shard_index_of,
    tensor_layout,
    unwrapped,
    with_layout,
)
from raysharding.distributed.fully_shard.materialize import materialize, tensor_slots
from raysharding.distributed.fully_shard.module_group import group_of, over_ranks_of
from raysharding.distributed.fully_shard.module_hooks import move_inputs, warn_once
from raysharding.distributed.fully_shard.recovery import (
    fork_rng_of,
    is_recoverable,
    is_torn,
    mark_recovery,
    module_mode,
    recover_after,
    recovering,
    reset,
    without_trace,
)
from raysharding.distributed.fully_shard.same_parameters import weights_fingerprint
from raysharding.distributed.fully_shard.shard import (
    keep_gathered,
    mixed_precision_policy,
    shard_groups,
    shard_module,
    show_shards,
)
from raysharding.distributed.fully_shard.tensor_table import TensorTable, cut, meta_like
