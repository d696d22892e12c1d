"""`Sharding.compile`: `torch.compile` of the blocks, one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from raysharding.config import Sharding


def compile_blocks(module: nn.Module, groups: Sequence[tuple[str, ...]], sharding: Sharding) -> None:
    """Compile the forwards of the FSDP groups that have modules inside; each rank alone, no collective.

    Only `forward` is compiled: the hooks around it, which gather and free the parameters, run as they are. Alike
    blocks share what was compiled for the first of them.

    Args:
        module: The root, before activations are checkpointed: what is computed again is compiled, too.
        groups: What `wrap_groups` chose.
        sharding: Its `compile` is read.
    """
    if sharding.compile is False:
        return
    backend = "inductor" if sharding.compile is True else sharding.compile
    for names in groups:
        for block in map(module.get_submodule, names):
            if any(True for _ in block.children()):
                # The signature stays: callers look at it to find out which arguments a module takes.
                compiled = torch.compile(block.forward, backend=backend)
                block.forward = functools.update_wrapper(compiled, block.forward)
