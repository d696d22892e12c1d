"""Gradients: `clip_grad_norm_` over all shards, `no_sync`, `keep_low_precision_grads`, and replicated parameters.

Gradients of parameters that are not sharded are averaged over the ranks at the end of every backward.

Note: why the average is automatic.
    FSDP does not manage 0-dim parameters and those of ignored modules. Each rank's optimizer would update its copy by
    the gradient of its own rows, and the copies would diverge without an error. Therefore the root's outputs have a
    hook, like FSDP2's own, that queues a callback of autograd for the end of the backward. Every rank runs it, because
    FSDP's reductions make the backward of the root collective.
    Gradients are linear: a backward that adds a rank's own gradient to an average, and averages again, gives the
    average of the sum. Inside `no_sync` nothing is averaged; the backward after it averages the sums.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Replicate

from raysharding.distributed.comm import current_group, global_ranks, is_accelerator, metadata_device, to_host
from raysharding.distributed.fully_shard.internals import (
    bases_of,
    fsdp_modules,
    gradient_sync,
    is_sharded,
    outer_root,
    reduce_accumulated,
    reshard,
    sharded_parameters,
    syncs_gradients,
)
from raysharding.distributed.fully_shard.module_group import over_ranks_of
from raysharding.models import class_name
from raysharding.torch_internals import current_graph_task_id
from raysharding.tree import leaves
from raysharding.units import split_by_bytes

T = TypeVar("T", bound=torch.Tensor)


def keep_low_precision_grads(module: nn.Module) -> None:
    """Cast the gradient of each shard when it has been reduced. Not collective.

    Args:
        module: The root, after `fully_shard`.
    """
    module.register_forward_pre_hook(_watch_dtypes)


def _watch_dtypes(module: nn.Module, args: Any) -> None:
    # In every forward: a load may replace parameters, and frozen parameters may be trained later.
    for item in sharded_parameters(module):
        parameter = item.shard
        if item.compute_dtype is not None and parameter.requires_grad and parameter.grad_dtype is not None:
            parameter.grad_dtype = None  # any: FSDP2 sets it in the stored dtype first
            parameter.register_post_accumulate_grad_hook(partial(_cast, item.compute_dtype))


def _cast(dtype: torch.dtype, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "it was accumulated"
    parameter.grad = parameter.grad.to(dtype)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication, for all backward passes but the last; on all ranks alike.

    As FSDP1's `no_sync()`. Backward passes inside accumulate full gradients on each rank; the first backward outside
    reduces the sum, once per FSDP group, including replicated parameters. The gradient is then that of the mean over
    ranks, summed over the passes: equal to that of one large batch if each loss is divided by the number of passes.

    Wire: nothing for gradients inside; parameters are gathered as always. Memory: each rank holds full, unsharded
    gradients between the passes, where accumulating without `no_sync` holds shards and reduces every time.

    Inside, and until a backward outside, the shards have no gradients for an optimizer step or `clip_grad_norm_`. To
    discard the sum, call `drop_unreduced_gradients`, as `train_step` does; `zero_grad` does not find it.

    Args:
        module: The sharded root module.

    Raises:
        ValueError: On every rank, if nothing in `module` is sharded.
    """
    if not is_sharded(module):
        raise ValueError(f"no_sync: nothing in this {type(module).__name__} is sharded; call shard_module first")
    with gradient_sync(module, False):
        yield


MESSAGE_BYTES = 64 << 20
"""Bytes of gradients in one all-reduce; a larger gradient has its own."""


_unaveraged: WeakSet[nn.Module] = WeakSet()
"""Modules whose gradients are not averaged: `Sharding(average_ignored_gradients=False)`."""


@over_ranks_of("module")
def reduce_replicated_gradients(module: nn.Module) -> None:
    """Average the gradients of parameters that are not sharded (0-dim, ignored) over all ranks; collective.

    A module from `shard_module` does this at the end of every backward from its outputs; call it after other backward
    passes (a `UserWarning` says when). A missing gradient on a rank counts as zeros; a gradient that no rank has stays
    `None`, so that an optimizer skips the parameter as in one process. Idempotent. With
    `Sharding(average_ignored_gradients=False)` parameters of ignored modules are excluded. Wire: one all-reduce of the
    parameters' bytes, in fp32 or wider.

    Args:
        module: The sharded root module, after backward.
    """
    for parameters in _messages(replicated_parameters(module)):
        _average(parameters)


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters outside FSDP whose gradients are averaged, in module order."""
    alone = {id(parameter) for parameter in unaveraged_parameters(module)}
    return [item for item in plain_parameters(module) if item.requires_grad and id(item) not in alone]


def unaveraged_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients are not averaged. Not collective."""
    holders = [submodule for submodule in module.modules() if submodule in _unaveraged]
    return [parameter for holder in holders for parameter in holder.parameters(recurse=False)]


def plain_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP does not manage, in module order. Not collective."""
    # After a forward without a backward, full parameters are registered in place of shards: these are no replicas.
    full = {id(item.full) for item in sharded_parameters(module)}
    return [item for item in module.parameters() if not isinstance(item, DTensor) and id(item) not in full]


def _messages(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one device and dtype, of up to `MESSAGE_BYTES`; the same on every rank."""
    for alike in _alike(parameters):
        yield from split_by_bytes(alike, lambda parameter: parameter.nbytes, MESSAGE_BYTES)


def _alike(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[T]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())


def _average(parameters: list[nn.Parameter]) -> None:
    """Average gradients of one dtype, in one flat all-reduce that also counts the ranks with a gradient."""
    present = [float(parameter.grad is not None) for parameter in parameters]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # Half precision would lose the last bits of a sum over many ranks.
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    held = grads[0].new_ones(len(present)) if all(present) else grads[0].new_tensor(present)  # a copy from the host
    flat = torch.cat([grad.detach().reshape(-1).to(dtype) for grad in grads] + [held.to(dtype)])
    flat = flat.to(group_device(flat.device))
    # Every rank calls this with the same size, with zeros for missing gradients: the others would wait here.
    dist.all_reduce(flat, group=current_group())
    # Where this rank has all gradients there is nothing to ask the device for.
    counts = present if all(present) else to_host(flat[-len(parameters) :]).tolist()
    start = 0
    for parameter, count in zip(parameters, counts, strict=True):
        piece = flat[start : start + parameter.numel()] / len(global_ranks())
        start += parameter.numel()
        if count:
            parameter.grad = piece.reshape(parameter.shape).to(parameter)


def group_device(device: torch.device) -> torch.device:
    """Where a tensor that lives on `device` can be reduced: there, or on the group's own device (CPU-offloaded shards
    without gloo).
    """  # noqa: D205
    return device if is_accelerator(device) else metadata_device()


@over_ranks_of("module")
def finish_backward(module: nn.Module) -> None:
    """Do what FSDP does at the end of a backward, after one that may have reached no parameter; collective. Idempotent.

    Args:
        module: The sharded root module.
    """
    reshard(module)
    if syncs_gradients(module):
        # Every rank calls this, as ranks compare whether their loss has a graph: the others would wait to be averaged.
        reduce_accumulated(module)
        reduce_replicated_gradients(module)


class _ReduceAfterBackward:
    """Queues a callback of autograd, once per backward through the root's outputs, that reduces at its end."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # An aborted backward runs no callback; the next backward has another number, so there is nothing to reset.
        self._graph_task = -1
        self._warned = False

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the root: register a hook on every output that a backward may start from."""
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        for tensor in (*tensors, *bases_of(output, args)):
            if tensor.requires_grad:
                tensor.register_hook(self._queue)
        if not tensors and output is not None and not self._warned:
            self._warned = True  # for each module: the gradients of another one are another model's
            warnings.warn(
                f"no tensor is found in the output, a {type(output).__name__}: call "
                "raysharding.distributed.reduce_replicated_gradients(module) after each backward, or return a dict, "
                "tuple or dataclass",
                UserWarning,
                stacklevel=2,
            )

    def _queue(self, grad: torch.Tensor) -> None:
        graph_task = current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            # Runs after FSDP2's own callback, which was queued first and registers the shards again.
            Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        # Every rank of the group calls this at the end of the same backward, whether or not its rows used the
        # parameters; and all ranks are inside no_sync, or none.
        if syncs_gradients(self._module):
            reduce_replicated_gradients(self._module)  # makes the module's group current: not so on autograd's threads


def reduce_after_backward(module: nn.Module, unaveraged: Iterable[nn.Module] = ()) -> None:
    """Make every backward of the root average the gradients of replicated parameters, if there are any.

    Args:
        module: The root, after `fully_shard`. If it has no such parameters now, call `reduce_replicated_gradients` for
            parameters that are added later.
        unaveraged: Modules whose own parameters' gradients are not averaged.
    """
    _unaveraged.update(unaveraged)
    # Frozen parameters count: they may be trained later.
    if any(not isinstance(parameter, DTensor) for parameter in module.parameters()):
        module.register_forward_hook(_ReduceAfterBackward(module).watch)


@over_ranks_of("module")
def clip_grad_norm_(module: nn.Module, max_norm: float | None, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; collective, one all-reduce of one number.

    The norm is that of the unsharded gradients: shards are summed over the ranks, copies (replicated parameters, the
    replicas of HSDP) count once; under `average_ignored_gradients=False` ignored modules are no copies. Missing
    gradients and empty shards count as zero. As FSDP1's method, and `torch.nn.utils.clip_grad_norm_`: the factor is
    `min(1, max_norm / (norm + 1e-6))`, so that `max_norm=0` makes all gradients 0, an infinite norm makes finite ones
    0, and a NaN makes all of them NaN.

    Args:
        module: The sharded root module, after a backward outside `no_sync`.
        max_norm: Upper bound, 0 or more; `None` or infinity only measures.
        norm_type: p of the p-norm, above 0; `inf` for the largest magnitude. Default 2.

    Returns:
        The norm before clipping: 0-dim fp32 tensor, equal on every rank.

    Raises:
        ValueError: On every rank, if `norm_type` is not positive, or `max_norm` negative or NaN, or a parameter is on
            ranks outside the module's mesh, as with tensor parallelism.
        RuntimeError: On every rank, if `module` is a part of a sharded module, as in FSDP1: its gradients would be
            clipped by another norm.
    """
    check_norm(max_norm, norm_type)
    _require_root(module)
    reshard(module)  # after a forward, full parameters may be registered in place of the root's shards
    by_copies = _local_gradients(module)
    device = group_device(next((parameter.device for parameter in module.parameters()), metadata_device()))
    norm = _global_norm(by_copies, norm_type, device)
    if max_norm is not None and max_norm != math.inf:
        _scale((grad for grads in by_copies.values() for grad in grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _require_root(module: nn.Module) -> None:
    """Raise for a module inside an FSDP root. Not collective; the same on every rank.

    Raises:
        RuntimeError: The module is not the root. Before the first forward FSDP2 has no root, and no gradients exist.
    """
    roots = fsdp_modules(module, root_only=True)
    is_inside = not roots and any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if is_inside or any(outer_root(part) is not None for part in roots):
        raise RuntimeError(
            f"this {class_name(module)} is a part of a sharded module, and the norm is that of all gradients: call "
            "clip_grad_norm_(root, ...) with the module that was sharded as a whole"
        )


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply all gradients by a number. Not collective.

    Args:
        module: The sharded root module, after a backward outside `no_sync`.
        factor: The same on every rank.
    """
    reshard(module)  # as in `clip_grad_norm_`
    grads = [grad for several in _local_gradients(module).values() for grad in several]
    if factor != 1.0:
        _scale(grads, factor)


def check_norm(max_norm: float | None, norm_type: float) -> None:
    """Raise for an invalid bound or norm type.

    Raises:
        ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r}: give a positive number, or inf")
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm!r}: give 0 or more, or None to only measure")


def _local_gradients(module: nn.Module) -> dict[int, list[torch.Tensor]]:
    """Return this rank's non-empty gradient shards, by the number of ranks that hold a copy.

    Raises:
        ValueError: A parameter is on ranks outside the module's mesh, as with tensor parallelism.
    """
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    alone = {id(parameter) for parameter in unaveraged_parameters(module)}
    ranks = set(global_ranks())
    for parameter in module.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        copies = 1 if id(parameter) in alone else len(ranks)
        if isinstance(grad, DTensor):
            copies = _num_copies(grad, ranks)
            grad = grad.to_local()
        if grad.numel():
            by_copies[copies].append(grad)
    return by_copies


def _num_copies(grad: DTensor, ranks: set[int]) -> int:
    """Return the number of ranks that hold an equal shard; the mesh may be that of a part of the module."""
    mesh = grad.device_mesh
    if not ranks.issuperset(own := mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"a gradient is on the ranks {own}, and the module's mesh has {sorted(ranks)}: clip models on several "
            "meshes one by one; with tensor parallelism, use torch.nn.utils.get_total_norm for each mesh"
        )
    cut = [axis for axis, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    return mesh.size() // math.prod(map(mesh.size, cut))


def _global_norm(by_copies: dict[int, list[torch.Tensor]], norm_type: float, device: torch.device) -> torch.Tensor:
    """Reduce the norms of all shards in fp64; each of `copies` equal tensors adds its fraction."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    is_max = norm_type == math.inf
    for copies, grads in by_copies.items():
        for norms in _norms(grads, norm_type):
            norms = norms.to(device, torch.float64)
            total = torch.maximum(total, norms.max()) if is_max else total + norms.pow(norm_type).sum() / copies
    # Every rank calls this, without gradients too: the others would wait in the all-reduce.
    dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=current_group())
    return (total if is_max else total.pow(1.0 / norm_type)).float()


def _norms(grads: list[torch.Tensor], norm_type: float) -> Iterator[torch.Tensor]:
    """Yield the norms of tensors, 1-D, in fp32 or wider, by one fused call per device and dtype."""
    for alike in _alike(grads):
        dtype = torch.promote_types(alike[0].dtype, torch.float32)
        yield torch.stack(torch._foreach_norm(alike, norm_type, dtype=dtype))


def _scale(grads: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    for alike in _alike(grads):
        torch._foreach_mul_(alike, factor.to(alike[0].device) if isinstance(factor, torch.Tensor) else factor)
