"""Models, references and comparisons for torch's own cases of meshes that have a part of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raysharding import Sharding
from raysharding.distributed import (
    full_optim_state_dict,
    no_sync,
    optim_state_dict,
    shard_module,
    state_dict_type,
    summon_full_params,
)

LINEAR = Sharding(wrap=["Linear"])
ROOT = Sharding(wrap="none")
"""All parameters in the root's FSDP group."""
ON_RANK_0 = (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))


def run_kinds(kinds: Sequence[Callable[[Path], None]], root: Path) -> None:
    """Run several cases in one world, one after the other, each with a directory of its own."""
    for kind in kinds:
        folder = root / kind.__name__
        folder.mkdir(exist_ok=True)
        kind(folder)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width + 1), nn.ReLU(), nn.Linear(2 * width + 1, width))


def stack(width: int, seed: int = 42) -> nn.Sequential:
    """Two blocks, parts 1 and 2, whose hidden width is odd, so that shards differ in size; and a part on each side."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(width), block(width), block(width), nn.Linear(width, width, bias=False))


def tied_stack(width: int, seed: int = 42) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(width, width, bias=False), *stack(width, seed))
    module[0].weight = module[4].weight
    return module


def rows(width: int, number: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 + number))


def inputs_of(group: Any, width: int, num_steps: int = 3) -> list[torch.Tensor]:
    """The rows of this rank of a group: ranks of equal number in different groups have the same."""
    return [rows(width, 100 * step + dist.get_rank(group)) for step in range(num_steps)]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def grouped_adam(module: nn.Module, *, several: bool) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    groups: Any = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.9}]
    return torch.optim.Adam(groups if several else parameters, lr=1e-2)


def ddp(module: nn.Module, group: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group)


def fsdp1(module: nn.Module, group: Any = None, **kwargs: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        module, process_group=group, device_id=torch.device("cpu"), use_orig_params=True, **kwargs
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[torch.Tensor]) -> list[float]:
    """Make a step for each input; returns the losses."""
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict, which every rank of the mesh has."""
    with state_dict_type(module, StateDictType.FULL_STATE_DICT):
        return dict(module.state_dict())


def optimizer_values(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, one in state["state"].items() for key, value in one.items()}


def full_forms(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Full optimizer state on every rank and on rank 0 alone, by the function of each and by `optim_state_dict`."""
    forms = [full_optim_state_dict(module, optimizer, rank0_only=False), full_optim_state_dict(module, optimizer)]
    with state_dict_type(module, StateDictType.FULL_STATE_DICT):
        forms.append(optim_state_dict(module, optimizer))
    with state_dict_type(module, *ON_RANK_0):
        forms.append(optim_state_dict(module, optimizer))
    return forms


@torch.no_grad()
def local_values(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of tensors, in copies."""
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in values.items()}
    return {name: value.clone() for name, value in local.items()}


def assert_full_equals(ours: Any, theirs: Any) -> None:
    """Compare a shard, put together on its mesh, with a whole tensor."""
    assert isinstance(ours, DTensor)
    torch.testing.assert_close(ours.full_tensor(), theirs)


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_full_equals(ours.grad, theirs.grad)


def assert_trains_as(reference: nn.Module, module: nn.Module, group: Any, width: int) -> None:
    """Compare losses, and parameters after some steps, with DDP or FSDP1 over the same ranks."""
    inputs = inputs_of(group, width)
    torch.testing.assert_close(train(module, adam(module), inputs), train(reference, adam(reference), inputs))
    if isinstance(reference, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(reference):
            expected = {name: value.detach().clone() for name, value in reference.module.named_parameters()}
    else:
        expected = dict(reference.module.named_parameters())  # type: ignore[union-attr]
    with summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), expected)


def assert_accumulates(mesh: DeviceMesh, group: Any, sharding: Sharding) -> None:
    """Compare steps of 3 backward passes, 2 of them in `no_sync`, with DDP over the same ranks."""
    module, reference = shard_module(stack(6), mesh, sharding), ddp(stack(6), group)
    ours, theirs = adam(module), adam(reference)
    for step in range(3):
        batches = [rows(6, 100 * step + 10 * number + dist.get_rank(group)) for number in range(3)]
        with no_sync(module), reference.no_sync():
            for batch in batches[:2]:
                assert_same_loss(module, reference, batch)
        assert_same_loss(module, reference, batches[2])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    torch.testing.assert_close(full(module), dict(reference.module.state_dict()))


def assert_same_loss(module: nn.Module, reference: nn.Module, batch: torch.Tensor) -> None:
    losses = [each(batch).square().mean() for each in (module, reference)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()


def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """FSDP1's `process_group` for HSDP: this rank's (shard group, replicate group), of 4 ranks."""
    rank = dist.get_rank()
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return shard, replicate
