"""What must neither hang nor come out wrong without an error: each check runs on every rank of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from raysharding.distributed import (
    DistModule,
    apply,
    apply_fsdp2,
    broadcast_and_shard_state_dict,
    init_mesh,
    shard_broadcasted_state_dict,
    shard_module,
    state_dict_type,
)
from raysharding.errors import PlanError, RayshardingError
from tests.distributed.models import Odd, filled
from tests.spawn import device_type


def sharded(seed: int = 0) -> Odd:
    model = filled(seed)
    shard_module(model, init_mesh(device_type()))
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def check_assign_that_differs(root: Path) -> None:
    model = DistModule(sharded())
    if dist.get_world_size() > 1:
        with pytest.raises(PlanError, match="assign is True on some ranks"):
            model.load_state_dict(filled(1).state_dict() if dist.get_rank() == 0 else {}, assign=is_last())
    with pytest.raises(RayshardingError if dist.get_rank() else TypeError):
        model.load_state_dict(None)  # type: ignore[arg-type]
    model.load_state_dict(filled(1).state_dict() if dist.get_rank() == 0 else {})
    assert torch.equal(full(model.large), filled(1).large)


def check_hooks_see_values(root: Path) -> None:
    """A hook after `load_state_dict` runs once there are values, and not before."""
    for on_meta in (False, True):
        model = DistModule(sharded().to_empty(device="meta") if on_meta else sharded())
        model.module.positions = torch.zeros(2, 5, dtype=torch.int64)
        seen: list[torch.Tensor] = []

        def note(module: nn.Module, keys: Any, seen: list[torch.Tensor] = seen) -> None:
            seen.append(full(module.get_parameter("large")))

        model.module.register_load_state_dict_post_hook(note)
        model.load_state_dict(filled(2).state_dict() if dist.get_rank() == 0 else {})
        assert len(seen) == 1
        assert torch.equal(seen[0], filled(2).large)


def check_apply_that_changes_a_shape(root: Path) -> None:
    """On one rank alone: it raises its own error, the others one that names it."""
    model = sharded()

    def grow(module: nn.Module) -> None:
        if is_last() and isinstance(module, nn.Linear) and module.out_features == 64:
            module.weight = nn.Parameter(torch.zeros(65, 64))

    with pytest.raises(RuntimeError if is_last() else RayshardingError, match="keeps its shape"):
        apply(model, grow)
    assert model.blocks[0].weight.shape == (64, 64)
    apply(model, lambda module: None)


def check_a_parameter_that_is_trained_later(root: Path) -> None:
    model = filled()
    model.scale.requires_grad_(False)
    shard_module(model, init_mesh(device_type()))
    model.scale.requires_grad_(True)
    ids = torch.tensor([[dist.get_rank(), 3, 5]])
    model(ids).square().mean().backward()
    assert model.scale.grad is not None
    every = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, model.scale.grad)
    assert all(torch.equal(grad, every[0]) for grad in every)


def check_state_dict_forms_after_a_forward(root: Path) -> None:
    model = sharded()
    for form in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with state_dict_type(model, form):
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            held = model.state_dict()
            model(torch.tensor([[1, 2]]))
            model.load_state_dict(kept)
            if form is StateDictType.FULL_STATE_DICT:
                with torch.no_grad():
                    model.scale.zero_()
                    model.norm.get_buffer("running_mean").zero_()
                assert held["scale"].item() != 0, "a full state dict does not follow the module"
                assert held["norm.running_mean"].abs().sum() > 0
        assert torch.equal(full(model.large), filled().large)


def check_ties_of_distributed_state_dicts(root: Path) -> None:
    """An optimizer made after `load_state_dict(assign=True)` holds each parameter once."""
    with torch.device("meta"):
        model = Odd()
    apply_fsdp2(model, init_mesh(device_type()))
    spec = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        broadcast_and_shard_state_dict(filled(4).state_dict(), spec, found)
    else:
        shard_broadcasted_state_dict(spec, found)
    model.load_state_dict(found, assign=True)
    assert model.head.weight is model.embed.weight
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in filled().parameters())
    assert torch.equal(full(model.head.weight), filled(4).head.weight)
