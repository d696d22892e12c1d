"""Check that all ranks ran the FSDP groups of a module in the same order, and so gathered the same parameters.

Note: what the check detects.
    FSDP2 gathers a group when one of its modules runs. If ranks run different groups (experts that depend on each
    rank's rows), their all-gathers still match, and with equal sizes every rank continues with a mixture of parameters
    of two groups. The check after the forward raises an error. If the number of gathers differs, a rank waits in the
    check while another waits in a gather: both end by the timeout of the process group, with a note about the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm import all_gather_json, current_group, get_rank, metadata_device, rank_name, to_host
from raysharding.distributed.fully_shard.internals import is_kept_gathered
from raysharding.distributed.fully_shard.module_group import over_ranks_of
from raysharding.errors import PlanError
from raysharding.torch_internals import current_graph_task_id

_MODULUS = (1 << 61) - 1
_FACTOR = 1_000_003
_CURE = (
    "pass Sharding(wrap='none'), or wrap=[class names] of modules that run on every rank in the same order (the layer "
    "around the experts, not each expert)"
)


class _ExecutionOrder:
    """Groups that ran on this rank since the last check.

    Args:
        labels: Name of each group, for messages; the root is last.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.restart()

    def restart(self) -> None:
        """Drop the record."""
        self.digest = 0
        self.last: list[int] = []
        self._in_forward = False

    def add(self, index: int, *_: object) -> None:
        """Forward pre-hook of the modules of group `index`: record the start of the forward."""
        # Activation checkpointing runs forwards again in backward, possibly after the check.
        if current_graph_task_id() != -1:
            return
        if index == len(self.labels) - 1:
            # A forward that did not end has raised: its record is irrelevant to the next.
            if self._in_forward:
                self.restart()
            self.last = []
            self._in_forward = True
        self.digest = (self.digest * _FACTOR + index + 1) % _MODULUS
        self.last.append(index)

    def end(self, *_: object) -> None:
        """Forward hook of the root: record the end of the forward."""
        self._in_forward = False


_orders: WeakKeyDictionary[nn.Module, _ExecutionOrder] = WeakKeyDictionary()


def record_execution_order(module: nn.Module, groups: Sequence[tuple[str, ...]]) -> None:
    """Install hooks that record the order in which FSDP groups run. Not collective.

    Args:
        module: The root, after `fully_shard`.
        groups: Result of `wrap_groups`: FQNs of the modules of each group, without the root.
    """
    order = _orders[module] = _ExecutionOrder([*(", ".join(names) for names in groups), "the root"])
    for index, names in enumerate(groups):
        for name in names:
            module.get_submodule(name).register_forward_pre_hook(partial(order.add, index), prepend=True)
    if groups:
        module.register_forward_pre_hook(partial(order.add, len(groups)), prepend=True)
        module.register_forward_hook(order.end)


def forget_execution_order(module: nn.Module) -> None:
    """Drop the record since the last check, after ranks stopped at different places. Not collective."""
    if module in _orders:
        _orders[module].restart()


def last_execution_order(module: nn.Module) -> tuple[int, ...]:
    """Return indices of the groups that the last forward of a root ran, with repeats; the root has the last index.

    Args:
        module: A root whose order is recorded, before `check_execution_order` drops the record.
    """
    return tuple(_orders[module].last)


@over_ranks_of("module")
def check_execution_order(module: nn.Module) -> None:
    """Check that all ranks ran the same FSDP groups in the same order since the last check; collective.

    Every rank of the current group calls this after the same forwards, before their results are used. A module without
    recorded groups (`wrap="none"`, or not from `shard_module`), or whose parameters are kept gathered, needs no check
    and no messages.

    Args:
        module: The root module.

    Raises:
        PlanError: On every rank, if the orders differ; names groups that differ on this rank, and a cure.
        RuntimeError: From the process group, if a rank times out.
    """
    order = _orders.get(module)
    if order is None or len(order.labels) < 2 or dist.get_world_size(current_group()) == 1 or is_kept_gathered(module):
        return
    digest, last = order.digest, list(order.last)
    order.restart()
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=metadata_device())
    try:
        # All ranks must detect a difference, or some would go on to their next collective while the others raise.
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=current_group())
    except RuntimeError as error:
        error.add_note(f"raysharding: a rank that runs other FSDP groups than this one never arrives here: {_CURE}")
        raise
    highest, lowest = to_host(bounds).tolist()
    if highest == -lowest:
        return
    every: list[list[int]] = all_gather_json(last)
    text = "the ranks ran FSDP groups in different orders, so each went on with parts of other groups' parameters"
    where = "in a forward before the last"
    if (other := next((rank for rank, ran in enumerate(every) if ran != last), None)) is not None:
        here, there = next(pair for pair in zip_longest(last, every[other]) if pair[0] != pair[1])
        names = ["nothing" if index is None else order.labels[index] for index in (here, there)]
        where = f"rank {rank_name(get_rank())} (this one) ran {names[0]} and rank {rank_name(other)} ran {names[1]}"
    raise PlanError(f"{text}: {where}; {_CURE}")
