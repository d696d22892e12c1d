"""`FullyShardedDataParallelPlugin`: accelerate's FSDP settings, for users who have them already.

Its importers import it on first use: it needs accelerate, which is optional.
"""

from __future__ import annotations

from accelerate.utils import FullyShardedDataParallelPlugin as AcceleratePlugin
from torch import nn

from raysharding.config import Sharding
from raysharding.distributed.accelerate_compat.sharding import sharding_of


class FullyShardedDataParallelPlugin(AcceleratePlugin):  # type: ignore[misc] # accelerate is untyped
    """accelerate's plugin of this name, with `to_sharding`; needs accelerate.

    Fields, defaults, environment variables, methods and errors are accelerate's, and an `Accelerator` takes it. The
    model is sharded with FSDP2 for both values of `fsdp_version`.
    """

    def to_sharding(
        self, model: nn.Module | None = None, *, world_size: int | None = None, ranks_per_node: int | None = None
    ) -> Sharding:
        """Return the same settings for `shard_module`. Not collective.

        FSDP1's strategies, prefetches and `MixedPrecision` become what FSDP2 has for them. What it has not is a
        UserWarning, once a process: `limit_all_gathers=False`, `buffer_dtype` (buffers keep their dtype).
        `state_dict_type`, its configurations and `use_orig_params` say nothing about sharding.

        Args:
            model: The root that will be sharded. Needed for policies that are functions; without it
                `transformer_based_wrap` without class names is `wrap="auto"`.
            world_size: Ranks, for NO_SHARD and the hybrid strategies. Default: the process group's, else `WORLD_SIZE`.
            ranks_per_node: Ranks of a replica of the hybrid strategies. Default: `LOCAL_WORLD_SIZE`.

        Raises:
            ValueError: A policy needs the model, a class name is not in it, or a hybrid strategy needs
                `ranks_per_node`.
        """
        return sharding_of(self, model, world_size=world_size, ranks_per_node=ranks_per_node)
