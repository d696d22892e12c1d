"""`ignored_modules`, `param_init_fn` and `sync_module_states`: whole copies, and what shards hold before any load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed import clip_grad_norm_, init_mesh, load_checkpoint, shard_module
from raysharding.distributed.metadata import all_gather_json
from raysharding.errors import PlanError
from raysharding.models import build_module
from tests.distributed.models import Odd
from tests.distributed.sharding_models import (
    Block,
    Net,
    assert_same,
    build,
    full,
    gradients,
    meshes,
    mine,
    rows,
    sharded,
)
from tests.grid import world_sizes
from tests.spawn import run_ranks

IGNORED = [r"blocks\.1", "head"]
INSIDE = {f"blocks.1.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")} | {
    "head.weight",
    "head.bias",
}


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(item) for name, item in module.named_parameters()}


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    seen = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, tensor.contiguous())
    return seen


# --- ignored_modules ------------------------------------------------------------------------------------------------


def ignored_stay_whole(replicate_size: int) -> None:
    twin = build()
    batch = rows(24)
    twin(batch).square().mean().backward()
    ways: list[Any] = [IGNORED, "|".join(IGNORED), lambda inner: isinstance(inner, nn.Linear) and len(inner.bias) == 3]
    for way in ways:
        module = sharded(twin, ignored_modules=way, replicate_size=replicate_size)
        plain = {name for name, item in module.named_parameters() if not isinstance(item, DTensor)}
        assert (
            plain
            == ({"scale", "head.weight", "head.bias", "unused.weight", "unused.bias"}, INSIDE | {"scale"})[
                isinstance(way, str | list)
            ]
        )
        module(mine(batch)).square().mean().backward()
        assert_same(gradients(module), gradients(twin))
        for name in sorted(plain):
            grad = module.get_parameter(name).grad
            assert grad is None or all(torch.equal(grad, other) for other in everywhere(grad)), name
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
        assert torch.allclose(clip_grad_norm_(module, None), norm, rtol=1e-5)


def fsdp1_ignores_the_same() -> None:
    copy = build()
    copy.scale = nn.Parameter(torch.tensor([1.5]))
    modules = [copy.blocks[1], copy.head]
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    oracle = FullyShardedDataParallel(
        copy, auto_wrap_policy=policy, device_id=device, ignored_modules=modules, use_orig_params=True
    )
    module_copy = build()
    ours: Any = shard_module(
        module_copy,
        init_mesh("cpu"),
        Sharding(wrap=["Block"], ignored_modules=[module_copy.blocks[1], module_copy.head]),
    )
    batch = mine(rows(24))
    for each in (oracle, ours):
        each(batch).square().mean().backward()
    theirs = everywhere(copy.head.weight.grad)
    assert copy.head.weight.shape == ours.head.weight.shape, "whole there, too"
    assert not torch.equal(theirs[0], theirs[-1]), "FSDP1 leaves each rank its own gradient"
    assert torch.allclose(ours.head.weight.grad, torch.stack(theirs).mean(0), rtol=1e-4, atol=1e-7)


def ignored_load(root: Path) -> None:
    sharding = Sharding(wrap=["Block"], ignored_modules=IGNORED, mixed_precision=None)
    path = root / "net.safetensors"
    module: Any = build_module(Net, open_checkpoint(path), None)
    shard_module(module, init_mesh("cpu"), sharding)
    load_checkpoint(module, path)
    assert_same(parameters(module), parameters(build(seed=7)), rtol=0, atol=0)


def bad_ignored() -> None:
    stranger = nn.Linear(1, 1)
    net = build()
    cases: list[tuple[Any, str]] = [
        ("block", "'block' matches no module's whole name"),
        ([stranger], "the Linear given is no part of this Net"),
        ([net], "the root is among them"),
    ]
    for value, message in cases:
        with pytest.raises(PlanError, match=message):
            shard_module(net, init_mesh("cpu"), Sharding(ignored_modules=value))


# --- param_init_fn --------------------------------------------------------------------------------------------------


def by_shape(module: nn.Module) -> None:
    """A rule that depends on nothing but names and shapes."""
    for name, item in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        count = torch.arange(item.numel(), dtype=torch.float32).reshape(item.shape)
        item.copy_((count + len(name)).to(item.dtype))


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def one_group_at_a_time(replicate_size: int) -> None:
    for make in (Net, Odd):
        expected: Any = make()
        with torch.no_grad():
            for inner in expected.modules():
                by_shape(inner)
        meta = on_meta(make)
        alive: list[int] = []
        called: list[str] = []

        def rule(inner: nn.Module, root: Any = meta, alive: list[int] = alive, called: list[str] = called) -> None:
            called.append(next(name for name, other in root.named_modules() if other is inner))
            by_shape(inner)
            items = {item for item in root.parameters() if not isinstance(item, DTensor) and not item.is_meta}
            alive.append(sum(item.numel() for item in items if item.ndim))

        sharding = Sharding(
            wrap=["Block"] if make is Net else "auto", param_init_fn=rule, replicate_size=replicate_size
        )
        module: Any = shard_module(meta, init_mesh("cpu", sharding), sharding)
        assert_same(parameters(module), parameters(expected), rtol=0, atol=0)
        assert_same(dict(module.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
        assert len(called) == len(set(called)), "each module once"
        if make is Net:
            total = sum(item.numel() for item in expected.parameters())
            assert max(alive) <= total - 2 * sum(item.numel() for item in expected.blocks[0].parameters())
            assert "blocks" not in called, "it holds nothing"
        else:
            assert module.head.weight is module.embed.weight
            assert module.twin is module.table


def takes_rules_written_for_fsdp1() -> None:
    """A function that gives memory itself, as FSDP1's must; ranks draw other numbers, and rank 0's win."""

    def rule(inner: Any) -> None:
        inner.to_empty(device=torch.device("cpu"), recurse=False)
        if isinstance(inner, nn.Linear):
            inner.reset_parameters()
        else:
            for item in inner.parameters(recurse=False):
                nn.init.normal_(item)

    torch.manual_seed(dist.get_rank())
    module = sharded(on_meta(Net), param_init_fn=rule, sync_module_states=True)
    for name, item in module.named_parameters():
        value = full(item)
        assert value.isfinite().all(), name
        assert value.any(), name
        assert all(torch.equal(other, value) for other in everywhere(value)), name


def rule_fails_on_one_rank() -> None:
    def rule(inner: nn.Module) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise LookupError("no rule")
        by_shape(inner)

    with pytest.raises(Exception, match="no rule"):
        sharded(on_meta(Net), param_init_fn=rule, sync_module_states=True)


# --- sync_module_states ---------------------------------------------------------------------------------------------


def rank_0_decides(replicate_size: int) -> None:
    """The oracle is rank 0's own module: FSDP1 refuses `sync_module_states` on CPUs."""
    rank = dist.get_rank()
    for make in (Net, Odd):
        expected, own = build(make, seed=0), build(make, seed=rank)
        if make is Odd:
            for each, seed in ((expected, 0), (own, rank)):
                each.norm.running_mean.fill_(seed)
                each.mask.fill_(seed % 2 == 0)
        fields: dict[str, Any] = {"sync_module_states": True, "replicate_size": replicate_size}
        wrap = ["Block"] if make is Net else "auto"
        module = sharded(own, wrap=wrap, **fields)
        assert_same(parameters(module), parameters(expected), rtol=0, atol=0)
        assert_same(dict(module.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
        # Only rank 0 has values, as accelerate's cpu_ram_efficient_loading leaves it.
        module = sharded(expected if rank == 0 else on_meta(make), wrap=wrap, **fields)
        assert_same(parameters(module), parameters(expected), rtol=0, atol=0)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


def differing_ranks_all_raise() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    cases: list[tuple[nn.Module, str]] = [
        (build(Wider if last else Net), r"has \['head.weight'.*where rank 0 has \['head.weight'"),
        (on_meta(Net), "is on meta on rank 0, which has nothing to send"),
    ]
    for module, message in cases:
        with pytest.raises(PlanError, match=message) as caught:
            sharded(module, sync_module_states=True)
        assert len(set(all_gather_json(str(caught.value)))) == 1


def run_all(root: Path) -> None:
    for replicate_size in meshes():
        ignored_stay_whole(replicate_size)
        one_group_at_a_time(replicate_size)
        rank_0_decides(replicate_size)
    ignored_load(root)
    takes_rules_written_for_fsdp1()
    bad_ignored()
    if dist.get_world_size() > 1:
        fsdp1_ignores_the_same()
        rule_fails_on_one_rank()
        differing_ranks_all_raise()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", world_sizes(1, 2, full=(4,)))
def test_first_values(world_size: int, tmp_path: Path) -> None:
    save_file(build(seed=7).state_dict(), tmp_path / "net.safetensors")
    run_ranks(world_size, run_all, tmp_path, timeout_s=110)
