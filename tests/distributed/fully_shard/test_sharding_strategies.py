"""FSDP1's sharding strategies: what each holds in memory, measured beside FSDP1, and that each loads, trains, saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed import clip_grad_norm_, init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.footprint import gathered_bytes
from raysharding.distributed.fully_shard.internals import fsdp_groups
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.models import build_module, wrap_groups
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    Block,
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    gradients,
    mine,
    rows,
)
from tests.distributed.models import Odd, filled, require_equal, saved
from tests.distributed.training.training_cases import llama
from tests.spawn import device_type

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Wide(nn.Module):
    """Four blocks that hold nearly all parameters, in sizes that need no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def held_bytes(module: nn.Module) -> int:
    """Parameters that this rank holds between steps."""
    return sum(local_tensor(item).nbytes for item in module.parameters())


def full_bytes(module: nn.Module) -> int:
    """Full parameters that this rank holds beside its shards, now."""
    outputs = [out for group in fsdp_groups(module) for item in group.fsdp_params for out in item.all_gather_outputs]
    return sum(output.untyped_storage().nbytes() for output in outputs)


def fsdp1_bytes(module: Any) -> tuple[int, int]:
    """The same two figures of FSDP1."""
    flats = [handle.flat_param for handle in module._all_handles]
    local = sum(flat._local_shard.untyped_storage().nbytes() for flat in flats if hasattr(flat, "_local_shard"))
    padded = [flat._full_param_padded for flat in flats if hasattr(flat, "_full_param_padded")]
    if not padded:  # NO_SHARD: the one parameter is the full one
        return sum(flat.untyped_storage().nbytes() for flat in flats), 0
    return local, sum(tensor.untyped_storage().nbytes() for tensor in padded)


def measure(strategy: str) -> dict[str, tuple[float, float]]:
    """Bytes held, and full bytes between forward and backward, in parts of the whole model; ours and FSDP1's."""
    world_size = dist.get_world_size()
    ranks_per_node = world_size // 2 if "HYBRID" in strategy else None
    sharding = Sharding.from_strategy(strategy, world_size, ranks_per_node, wrap=["Block"])
    mesh = init_mesh(device_type(), sharding)
    total = sum(item.nbytes for item in build(Wide).parameters())
    module = shard_module(build(Wide), mesh, sharding)
    options: dict[str, Any] = {"device_mesh": mesh} if "HYBRID" in strategy else {}
    oracle = fsdp1(build(Wide), sharding_strategy=ShardingStrategy[strategy], **options)
    batch = mine(rows(8, 64))
    held = held_bytes(module)
    loss, expected = module(batch).square().mean(), oracle(batch).square().mean()
    live, theirs = full_bytes(module), fsdp1_bytes(oracle)
    loss.backward()
    expected.backward()
    assert full_bytes(module) == 0
    # Without sharding FSDP1's own method is torch's; ours counts copies once.
    assert torch.allclose(clip_grad_norm_(module, 0.01), oracle.clip_grad_norm_(0.01), rtol=1e-5)
    assert_same(gradients(module), fsdp1_gradients(oracle), rtol=1e-4)
    return {"ours": (held / total, live / total), "fsdp1": (theirs[0] / total, theirs[1] / total)}


@on_ranks(4)
def test_memory_of_each_strategy() -> None:
    """Ours is FSDP1's, within the padding of a flat parameter."""
    root = 0.005  # the head: the root's group keeps it until backward
    expected = {
        "FULL_SHARD": (0.25, root),
        "SHARD_GRAD_OP": (0.25, 1.0),
        "NO_SHARD": (1.0, 0.0),
        "HYBRID_SHARD": (0.5, root),
        "_HYBRID_SHARD_ZERO2": (0.5, 1.0),
    }
    for name, figures in expected.items():
        for who, found in measure(name).items():
            assert found == pytest.approx(figures, abs=0.02), (name, who)


@on_ranks(1, 4, sim=(4,))
def test_replicas_load_train_and_save(root: Path) -> None:
    """A replica on each rank, and a replica for each half: every way in and out works on a shard axis of 1 and 2."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = filled().state_dict()
    if rank == 0:
        save_file(saved(filled()), root / "odd.safetensors")
    dist.barrier()
    for strategy, ranks_per_node in (("NO_SHARD", None), ("hybrid_shard", world_size // 2 or 1)):
        sharding = Sharding.from_strategy(strategy, world_size, ranks_per_node)
        module: Any = build_module(Odd, open_checkpoint(root / "odd.safetensors"), None)
        shard_module(module, init_mesh(device_type(), sharding), sharding)
        load_checkpoint(module, root / "odd.safetensors")
        if strategy == "NO_SHARD":
            assert all(
                torch.equal(local_tensor(item).cpu(), expected[name]) for name, item in module.named_parameters()
            )
        require_equal(module, expected)
        ids = torch.arange(8).view(2, 4)
        twin = filled()
        for each in (module, twin):
            each.train()(ids).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        assert torch.allclose(clip_grad_norm_(module, 0.5).cpu(), norm, rtol=1e-5)
        assert_same(gradients(module), gradients(twin), rtol=1e-4)
        folder = root / f"{strategy}-{world_size}"
        save_checkpoint(module, folder)
        again: Any = shard_module(build_module(Odd, open_checkpoint(folder), None), init_mesh(device_type()))
        load_checkpoint(again, folder)
        before, after = (dict(item.named_parameters()) for item in (module, again))
        assert all(torch.equal(before[name].full_tensor(), after[name].full_tensor()) for name in ("large", "narrow"))


def test_names_and_enums_are_taken() -> None:
    for name, theirs in ShardingStrategy.__members__.items():
        ours = Sharding.from_strategy(theirs, 4, 2)
        assert ours == Sharding.from_strategy(name.lower(), 4, 2)
        assert name in STRATEGIES
    assert Sharding.from_strategy("NO_SHARD", 6).replicate_size == 6
    assert Sharding.from_strategy("HYBRID_SHARD", 6, 2, wrap="none") == Sharding(wrap="none", replicate_size=3)
    with pytest.raises(ValueError, match=r"strategy='zero3'.*FULL_SHARD"):
        Sharding.from_strategy("zero3", 4)
    for ranks_per_node in (None, 3, 0):
        with pytest.raises(ValueError, match=r"ranks_per_node=.*needs the number of ranks on each node"):
            Sharding.from_strategy("HYBRID_SHARD", 4, ranks_per_node)


def test_what_is_not_freed_counts_as_gathered_all_along() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model: Any = llama()

    def size(*parts: nn.Module) -> int:
        return sum(parameter.nbytes for part in parts for parameter in part.parameters())

    def gathered(**fields: Any) -> int:
        sharding = Sharding(**fields)
        return gathered_bytes(model, sharding, wrap_groups(model, sharding))

    head, layers = size(model.model.norm, model.lm_head), size(*model.model.layers)
    assert len(model.model.layers) == 2
    assert gathered() == head + layers
    assert gathered(reshard_after_forward=True) == sum(sorted((head, layers // 2, layers // 2))[1:])
    assert gathered(reshard_after_forward=False) == size(model)
