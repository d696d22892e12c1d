"""Gradients of parameters that are not sharded: averaged over the ranks at the end of every backward.

Note: why this is automatic.
    FSDP does not touch 0-dim parameters and those of ignored modules. Left alone, each rank's optimizer would move its
    copy by its own rows' gradient, and the copies would drift apart without any error. So the root's outputs carry a
    hook, as FSDP2's own do, which asks autograd to call back when the backward is over. Every rank comes there: they
    run the root's backward together, because FSDP's reductions are collective.
    The gradient is linear: a backward that adds a rank's own gradient to an average, and averages again, comes to the
    average of the sum. Inside `no_sync` nothing is averaged, and the backward after it averages the sums.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from raysharding.distributed.gradient_sync import fsdp_groups, syncs_gradients
from raysharding.distributed.metadata import metadata_device
from raysharding.tree import leaves

MESSAGE_BYTES = 64 << 20
"""Gradients in one all-reduce; a larger one goes alone."""


_left_alone: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters' gradients are each rank's own: `Sharding(average_ignored_gradients=False)`."""


def leave_gradients_alone(modules: Iterable[nn.Module]) -> None:
    """Say that the gradients of parameters that these modules hold themselves are not averaged."""
    _left_alone.update(modules)


def reduce_replicated_gradients(module: nn.Module) -> None:
    """Average the gradients of parameters that are not sharded (0-dim, ignored) over all ranks; collective.

    A module from `shard_module` does this at the end of every backward that its outputs lead to: call it after one
    that they do not (a `UserWarning` says so). A rank on which such a parameter got no gradient counts as zeros; where
    no rank has one, it stays `None`, so that an optimizer skips it as it would in one process. Twice is as good as
    once. `Sharding(average_ignored_gradients=False)` leaves those of ignored modules alone. Wire: the parameters' own
    bytes, in fp32 or wider, once around.

    Args:
        module: The sharded root module, after backward.
    """
    for parameters in _messages(replicated_parameters(module)):
        _average(parameters)


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters that FSDP does not manage, and whose gradients are averaged, in module order."""
    alone = {id(parameter) for parameter in parameters_left_alone(module)}
    return [item for item in plain_parameters(module) if item.requires_grad and id(item) not in alone]


def parameters_left_alone(module: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are each rank's own; no collective."""
    holders = [submodule for submodule in module.modules() if submodule in _left_alone]
    return [parameter for holder in holders for parameter in holder.parameters(recurse=False)]


def plain_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that FSDP does not manage, in module order; no collective."""
    # After a forward without a backward, full parameters stand in the place of shards: they are no replicas.
    full = {id(item._unsharded_param) for item in _managed(module) if hasattr(item, "_unsharded_param")}
    return [item for item in module.parameters() if not isinstance(item, DTensor) and id(item) not in full]


def _managed(module: nn.Module) -> Iterator[Any]:
    for group in fsdp_groups(module):
        yield from group.fsdp_params


def _messages(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one device and dtype, up to `MESSAGE_BYTES` together; the same on every rank."""
    buckets: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        buckets[parameter.device, parameter.dtype].append(parameter)
    for bucket in buckets.values():
        message: list[nn.Parameter] = []
        for parameter in bucket:
            if message and sum(item.nbytes for item in message) + parameter.nbytes > MESSAGE_BYTES:
                yield message
                message = []
            message.append(parameter)
        yield message


def _average(parameters: list[nn.Parameter]) -> None:
    """Average the gradients of parameters of one dtype, in one flat message that also carries who has one."""
    present = [float(parameter.grad is not None) for parameter in parameters]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # Half precision would lose the last bits of a sum over many ranks.
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    flat = torch.cat([grad.detach().reshape(-1).to(dtype) for grad in grads] + [grads[0].new_tensor(present).to(dtype)])
    flat = flat.to(group_device(flat.device))
    # Every rank sends a bucket of the same size, with zeros for what it lacks: else the others would wait here.
    dist.all_reduce(flat)
    start = 0
    for parameter, count in zip(parameters, flat[-len(parameters) :].tolist(), strict=True):
        piece = flat[start : start + parameter.numel()] / dist.get_world_size()
        start += parameter.numel()
        if count:
            parameter.grad = piece.reshape(parameter.shape).to(parameter)


def group_device(device: torch.device) -> torch.device:
    """Where a tensor that lives on `device` can be reduced: there, or on the group's own device (CPU-offloaded shards
    under NCCL alone).
    """  # noqa: D205
    return device if device.type == "cuda" else metadata_device()


class _Reduction:
    """Asks autograd, once in each backward through the root's outputs, to reduce when that backward is over."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # An aborted backward never calls back; the next one has another number, so nothing is left to reset.
        self._graph_task = -1
        self._warned = False

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the root: hook on every output that backward may come through."""
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._queue)
        if not tensors and output is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"no tensor is found in the output, a {type(output).__name__}: call "
                "raysharding.distributed.reduce_replicated_gradients(module) after each backward, or return a dict, "
                "tuple or dataclass",
                UserWarning,
                stacklevel=2,
            )

    def _queue(self, grad: torch.Tensor) -> None:
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            # After FSDP2's own callback, whose hook was there first: the shards are registered again by then.
            Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        # Every rank of the group comes here at the end of the same backward, whether its rows used the parameters or
        # not; and all of them are inside no_sync or none is.
        if syncs_gradients(self._module):
            reduce_replicated_gradients(self._module)


def reduce_after_backward(module: nn.Module) -> None:
    """Make every backward of the root average the gradients of replicated parameters, if there are any now.

    Args:
        module: The root, after `fully_shard`. Parameters that are added later are left to the caller of
            `reduce_replicated_gradients`, unless there were others.
    """
    # Frozen ones too: they may be trained later.
    if any(not isinstance(parameter, DTensor) for parameter in module.parameters()):
        module.register_forward_hook(_Reduction(module).watch)
