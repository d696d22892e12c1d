"""`clip_grad_norm_`: the norm of all gradients, over all shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from raysharding.distributed.metadata import metadata_device
from raysharding.distributed.replicated_gradients import group_device, parameters_left_alone
from raysharding.distributed.sharded_module import fsdp_modules, reshard
from raysharding.models import clean_name
from raysharding.models.conversion import class_name


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
        ValueError: On every rank, when `norm_type` is not positive, or `max_norm` negative or NaN.
        RuntimeError: On every rank, when `module` is a part of a sharded module, as from FSDP1: its gradients would be
            clipped by a norm of their own.
    """
    check_norm(max_norm, norm_type)
    _require_root(module)
    reshard(module)  # a forward since the backward may have hidden the root's shards, and their gradients
    by_copies = _local_gradients(module)
    device = group_device(next((parameter.device for parameter in module.parameters()), metadata_device()))
    norm = _global_norm(by_copies, norm_type, device)
    if max_norm is not None and max_norm != math.inf:
        _scale((grad for grads in by_copies.values() for grad in grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _require_root(module: nn.Module) -> None:
    """Refuse a module inside an FSDP root; each rank alone, and all alike.

    Raises:
        RuntimeError: It is one. Before the first forward FSDP2 knows of no root, and there are no gradients either.
    """
    found = fsdp_modules(module, root_only=True)
    cure = (
        "the norm is that of all gradients: call clip_grad_norm_(root, ...) with the module that was sharded as a whole"
    )
    if not found and any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise RuntimeError(f"this {class_name(module)} is in the FSDP group of a module around it; {cure}")
    for inner in found:
        state = inner._get_fsdp_state()
        if state._is_root is False:
            root = next(other._modules[0] for other in state._state_ctx.all_states if other._is_root)
            name = next(name for name, submodule in root.named_modules() if submodule is inner)
            raise RuntimeError(f"{clean_name(name)} is a part of a sharded {class_name(root)}; {cure}")


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply all gradients by a number; no collective.

    Args:
        module: The sharded root module, after a backward outside `no_sync`.
        factor: The same on every rank.
    """
    reshard(module)  # as in `clip_grad_norm_`
    grads = [grad for several in _local_gradients(module).values() for grad in several]
    if factor != 1.0:
        _scale(grads, torch.tensor(factor))


def check_norm(max_norm: float | None, norm_type: float) -> None:
    """Refuse bounds and powers that no norm has.

    Raises:
        ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r}: give a positive number, or inf")
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm!r}: give 0 or more, or None to only measure")


def _local_gradients(module: nn.Module) -> dict[int, list[torch.Tensor]]:
    """This rank's non-empty gradient shards, keyed by how many ranks hold a copy of each."""
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    alone = {id(parameter) for parameter in parameters_left_alone(module)}
    for parameter in module.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        copies = 1 if id(parameter) in alone else dist.get_world_size()
        if isinstance(grad, DTensor):
            sharded = math.prod(
                grad.device_mesh.size(axis)
                for axis, placement in enumerate(grad.placements)
                if not isinstance(placement, Replicate)
            )
            copies //= sharded
            grad = grad.to_local()
        if grad.numel():
            by_copies[copies].append(grad)
    return by_copies


def _global_norm(by_copies: dict[int, list[torch.Tensor]], norm_type: float, device: torch.device) -> torch.Tensor:
    """Reduce the norms of all shards in fp64; each of `copies` equal tensors adds its part of one."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    is_max = norm_type == math.inf
    for copies, grads in by_copies.items():
        norms = torch.stack([norm.to(device, torch.float64) for norm in _norms(grads, norm_type)])
        total = torch.maximum(total, norms.max()) if is_max else total + norms.pow(norm_type).sum() / copies
    # Every rank reduces its one number, also without any gradient: a rank that left early would stop the others here.
    dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
    return (total if is_max else total.pow(1.0 / norm_type)).float()


def _norms(grads: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Each tensor's own norm, in fp32 or wider, one fused call for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device, grad.dtype].append(grad)
    norms: list[torch.Tensor] = []
    for (_, dtype), group in groups.items():
        norms += torch._foreach_norm(group, norm_type, dtype=torch.promote_types(dtype, torch.float32))
    return norms


def _scale(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    groups: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device].append(grad)
    for device, group in groups.items():
        torch._foreach_mul_(group, factor.to(device))
