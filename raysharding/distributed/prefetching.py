"""Which group's all-gather is issued ahead of time: FSDP1's `forward_prefetch` and `backward_prefetch` on FSDP2.

Note: what is left of the two knobs.
    FSDP2 issues each all-gather on a stream of its own and, in backward, one group ahead (`BACKWARD_PRE`). Explicit
    prefetching issues it earlier from the CPU, or further ahead. On CPUs an all-gather is waited for where it is
    issued, so that prefetching only moves it, and holds more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharding.config import Sharding
from raysharding.distributed.execution import last_execution_order
from raysharding.distributed.once import warn_once


def set_prefetching(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> None:
    """Apply `forward_prefetch` and `backward_prefetch`; each rank alone, no collective.

    Args:
        module: The root, after `fully_shard` and `record_execution_order`.
        groups: What `wrap_groups` chose.
        sharding: Its two fields are read.
    """
    heads = [_fsdp_module(module.get_submodule(names[0])) for names in groups] + [_fsdp_module(module)]
    when = sharding.backward_prefetch
    name = (when.name if isinstance(when, Enum) else when or "").lower()
    if name == "backward_post":
        warn_once(
            "backward_prefetch='backward_post': FSDP2 gathers the next group before this one's gradients are computed, "
            "or when it is needed; it is taken as None, which needs as little memory"
        )
    if name != "backward_pre":
        for head in heads:
            # An empty list means FSDP2's own choice; a group that is gathered already costs nothing.
            head.set_modules_to_backward_prefetch([head])
    if sharding.forward_prefetch and groups:
        _Ahead(module, heads, int(sharding.forward_prefetch)).install()


def _fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), "fully_shard made it one"
    return module


class _Ahead:
    """Sets what each group prefetches in forward once the first forward has shown the order."""

    def __init__(self, module: nn.Module, heads: Sequence[FSDPModule], num_ahead: int) -> None:
        self._module = module
        self._heads = heads
        self._num_ahead = num_ahead

    def install(self) -> None:
        """Wait for the first forward of the root to end."""
        self._handle = self._module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._handle.remove()
        order = list(dict.fromkeys(last_execution_order(module)))
        for place, index in enumerate(order):
            ahead = order[place + 1 : place + 1 + self._num_ahead]
            self._heads[index].set_modules_to_forward_prefetch([self._heads[other] for other in ahead])
