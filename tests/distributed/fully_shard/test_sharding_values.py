"""`ignored_modules`, `param_init_fn` and `sync_module_states`: whole copies, and what shards hold before any load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm import all_gather_json, rank_name
from raysharding.errors import PlanError
from raysharding.models import build_module
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    Block,
    Net,
    assert_same,
    build,
    full,
    gradients,
    mine,
    rows,
    sharded,
)
from tests.distributed.models import Odd
from tests.spawn import device_type

IGNORED = [r"blocks\.1", "head"]
INSIDE = {f"blocks.1.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")}
INSIDE |= {"head.weight", "head.bias"}


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(item) for name, item in module.named_parameters()}


def require_same(module: nn.Module, expected: nn.Module) -> None:
    """Parameters and buffers, bit for bit."""
    found, wanted = (parameters(each) | dict(each.named_buffers()) for each in (module, expected))
    assert_same(found, wanted, rtol=0, atol=0)


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    seen = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, tensor.contiguous())
    return seen


# --- ignored_modules ------------------------------------------------------------------------------------------------


@on_ranks(1, 2, full=(4,))
def test_ignored_stay_whole(replicate_size: int) -> None:
    twin = build()
    batch = rows(24)
    twin(batch).square().mean().backward()
    of_three = {"head.weight", "head.bias", "unused.weight", "unused.bias"}
    ways: list[tuple[Any, set[str]]] = [(IGNORED, INSIDE), ("|".join(IGNORED), INSIDE)]
    ways.append((lambda inner: isinstance(inner, nn.Linear) and len(inner.bias) == 3, of_three))
    for way, inside in ways:
        module = sharded(twin, ignored_modules=way, replicate_size=replicate_size)
        plain = {name for name, item in module.named_parameters() if not isinstance(item, DTensor)}
        assert plain == inside | {"scale"}
        module(mine(batch)).square().mean().backward()
        assert_same(gradients(module), gradients(twin))
        for name in sorted(plain):
            grad = module.get_parameter(name).grad
            assert grad is None or all(torch.equal(grad, other) for other in everywhere(grad)), name
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
        assert torch.allclose(rs.clip_grad_norm_(module, None), norm, rtol=1e-5)
    alone = sharded(twin, ignored_modules=IGNORED, average_ignored_gradients=False)
    alone(mine(batch)).square().mean().backward()
    assert len({float(value) for value in everywhere(alone.scale.grad)}) == 1, "ignored by nobody: averaged"


class Experts(nn.Module):
    """Each rank has an expert of its own, beside what all have."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.block = Block(4)
        self.experts = nn.ModuleDict({f"number{number}": build(lambda: nn.Linear(4, 3 + number), seed=number)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.block(x)
        return torch.stack([expert(hidden).sum() for expert in self.experts.values()])


@on_ranks(2, full=(4,))
def test_fsdp1_ignores_the_same() -> None:
    copy = build()
    copy.scale = nn.Parameter(torch.tensor([1.5]))  # FSDP1 takes no 0-dim parameters
    options: Any = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    ignored = [copy.blocks[1], copy.head]
    oracle = FullyShardedDataParallel(copy, ignored_modules=ignored, use_orig_params=True, **options)
    whole = build()
    fields = Sharding(wrap=["Block"], ignored_modules=[whole.blocks[1], whole.head])
    ours: Any = shard_module(whole, init_mesh(device_type()), fields)
    batch = mine(rows(24))
    for each in (oracle, ours):
        each(batch).square().mean().backward()
    theirs = everywhere(copy.head.weight.grad)
    assert copy.head.weight.shape == ours.head.weight.shape, "whole there, too"
    assert not torch.equal(theirs[0], theirs[-1]), "FSDP1 leaves each rank its own gradient"
    assert torch.allclose(ours.head.weight.grad, torch.stack(theirs).mean(0), rtol=1e-4, atol=1e-7)
    alone = sharded(build(), ignored_modules=IGNORED, average_ignored_gradients=False)
    alone(batch).square().mean().backward()
    assert torch.allclose(alone.head.weight.grad, copy.head.weight.grad, rtol=1e-4, atol=1e-7)


@on_ranks(2, full=(4,))
def test_stages_on_meshes_of_their_own() -> None:
    """The second stage waits for the first one's outputs, and can be asked for nothing before them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stages = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("stage", "shard"))
    stage = build(lambda: nn.Linear(4, 4 + rank))
    shard_module(stage, stages["shard"], Sharding(wrap="none"))
    values = torch.ones(3, 4)
    if rank:
        dist.recv(values, rank - 1)
    stage(values).sum().backward()
    if rank + 1 < world_size:
        dist.send(values, rank + 1)
    assert stage.weight.grad is not None


@on_ranks(2, full=(4,))
def test_ignored_of_each_rank(root: Path) -> None:
    """As torch's own tests of FSDP1 have it: the rest is sharded as ever, and nobody touches the experts' gradients."""
    rank, batch = dist.get_rank(), mine(rows(24))
    plain, theirs = (build(lambda: Experts(rank)) for _ in range(2))
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    oracle = FullyShardedDataParallel(theirs, ignored_modules=[theirs.experts], **options)
    fields: dict[str, Any] = {"wrap": ["Block"], "ignored_modules": "experts"}
    ours = sharded(plain, average_ignored_gradients=False, **fields)
    for each in (oracle, ours):
        each(batch).square().sum().backward()
    (expert,) = ours.experts.values()
    (twin,) = theirs.experts.values()
    assert torch.equal(expert.weight.grad, twin.weight.grad)
    with FullyShardedDataParallel.summon_full_params(oracle, with_grads=True):
        expected = {name: item.grad for name, item in theirs.block.named_parameters()}
        assert_same(gradients(ours.block), expected)
        squares = sum(float(grad.square().sum()) for grad in expected.values())
    squares += sum(all_gather_json(sum(float(item.grad.square().sum()) for item in expert.parameters())))
    assert float(rs.clip_grad_norm_(ours, None)) == pytest.approx(squares**0.5), "each expert counts once"
    with pytest.warns(UserWarning, match="2 parameters are each rank's own .*: rank 0's are saved"):
        rs.save_checkpoint(ours, root / "experts")
    with pytest.raises(PlanError, match="average_ignored_gradients=False") as caught:
        sharded(plain, **fields)(batch)
    told = "experts.number0.weight: on ranks [{}] whole, trained, torch.float32, of shape [3, 4]; on ranks [{}"
    assert told.format(rank_name(0), rank_name(1)) in str(caught.value)
    assert len(set(all_gather_json(str(caught.value)))) == 1


@on_ranks(2, full=(4,))
def test_ranks_that_ignore_others_all_raise() -> None:
    last, batch = dist.get_world_size() - 1, mine(rows(24))
    module = sharded(build(), ignored_modules="head" if dist.get_rank() == last else r"blocks\.1")
    others, differ = ", ".join(map(rank_name, range(last))), "the ranks ignore or shard different modules"
    for _ in range(2):
        with pytest.raises(PlanError, match=differ) as caught:
            module(batch)
        names = [problem.partition(":")[0] for problem in caught.value.problems]
        assert names == sorted(INSIDE, key=list(dict(build().named_parameters())).index)
        what = "trained, torch.float32, of shape [3, 6]"
        line = f"head.weight: on ranks [{others}] sharded in the FSDP group of the root, {what}; "
        assert f"{line}on ranks [{rank_name(last)}] whole, {what}" in caught.value.problems
    cases: tuple[tuple[Callable[[nn.Module], object], Any, tuple[str, str]], ...] = (
        (lambda net: net.requires_grad_(False), ["Block"], ("trained", "frozen")),
        (lambda net: net.double(), ["Block"], ("torch.float32", "torch.float64")),
        (lambda net: net, "none", ("in the FSDP group of blocks.0", "in the FSDP group of the root")),
    )
    for prepare, wrap, (theirs, own) in cases:
        net = build()
        if dist.get_rank() == last:
            prepare(net)
        module = sharded(net, wrap=wrap if dist.get_rank() == last else ["Block"])
        with pytest.raises(PlanError, match=differ) as caught:
            module(batch)
        (line,) = [one for one in caught.value.problems if one.startswith(f"blocks.0.up.weight: on ranks [{others}]")]
        assert re.search(rf"{theirs}.*; on ranks \[{re.escape(rank_name(last))}\] .*{own}", line), line
    module = sharded(build(), ignored_modules="head", replicate_size=dist.get_world_size())
    if dist.get_rank() == 0:
        with torch.no_grad():
            module(batch)  # nothing is gathered: a rank may go alone
    module(batch).sum().backward()


@on_ranks(1, 2, full=(4,))
def test_ignored_modules_load(root: Path) -> None:
    sharding = Sharding(wrap=["Block"], ignored_modules=IGNORED, mixed_precision=None)
    path = root / "net.safetensors"
    if dist.get_rank() == 0:
        save_file(build(seed=7).state_dict(), path)
    dist.barrier()
    module: Any = build_module(Net, open_checkpoint(path), None)
    shard_module(module, init_mesh(device_type()), sharding)
    rs.load_checkpoint(module, path)
    assert_same(parameters(module), parameters(build(seed=7)), rtol=0, atol=0)


@on_ranks(2)
def test_bad_ignored_modules() -> None:
    stranger = nn.Linear(1, 1)
    net = build()
    cases: list[tuple[Any, str]] = [("block", "'block' matches no module's whole name"), ([net], "includes the root")]
    for value, message in (*cases, ([stranger], "the given Linear is not part of this Net")):
        with pytest.raises(PlanError, match=message):
            shard_module(net, init_mesh(device_type()), Sharding(ignored_modules=value))


@on_ranks(2)
def test_what_is_sharded_already_is_refused() -> None:
    mesh = init_mesh(device_type())
    cases: tuple[tuple[Callable[[], Any], Callable[[Any], nn.Module], Sharding, list[str]], ...] = (
        (small, lambda module: module, Sharding(wrap="none"), ["the root"]),
        (small, lambda module: module[1], Sharding(wrap="none", mixed_precision="bf16"), ["1"]),
        (Net, lambda module: module.blocks[1], Sharding(), ["blocks.1"]),
    )
    for make, choose, sharding, names in cases:
        module = build(make)
        fully_shard(choose(module), mesh=mesh)
        groups = rs.fsdp_modules(module)
        with pytest.raises(PlanError, match=r"sharded already.*leave that call out") as caught:
            shard_module(module, mesh, sharding)
        assert caught.value.problems == tuple(names)
        assert rs.fsdp_modules(module) == groups, "as it was"
    net = build()
    fully_shard(net.blocks[1], mesh=mesh)
    shard_module(net, mesh, Sharding(wrap="none"))  # one inside a group is left as it is
    net(rows(4)).sum().backward()


# --- param_init_fn --------------------------------------------------------------------------------------------------


def by_shape(module: nn.Module) -> None:
    """A rule that depends on nothing but names and shapes."""
    for name, item in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        count = torch.arange(item.numel(), dtype=torch.float32).reshape(item.shape)
        item.copy_((count + len(name)).to(item.dtype))


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


@on_ranks(1, 2, full=(4,))
def test_one_group_at_a_time(replicate_size: int) -> None:
    for make in (Net, Odd):
        expected: Any = make()
        with torch.no_grad():
            for inner in expected.modules():
                by_shape(inner)
        meta = on_meta(make)
        alive: list[int] = []
        called: list[str] = []

        def rule(inner: nn.Module, root: Any = meta, alive: list[int] = alive, called: list[str] = called) -> None:
            if not any(item.is_meta for item in own_tensors(inner)):
                called.append(next(name for name, other in root.named_modules() if other is inner))
            elif isinstance(root, Odd):
                only_allocates(inner)
            by_shape(inner)
            items = {item for item in root.parameters() if not isinstance(item, DTensor) and not item.is_meta}
            alive.append(sum(item.numel() for item in items if item.ndim))

        sharding = Sharding(wrap=wrap_of(make), param_init_fn=rule, replicate_size=replicate_size)
        module: Any = shard_module(meta, init_mesh(device_type(), sharding), sharding)
        require_same(module, expected)
        assert len(called) == len(set(called)), "each module once with memory"
        if make is Net:
            total = sum(item.numel() for item in expected.parameters())
            assert max(alive) <= total - 2 * sum(item.numel() for item in expected.blocks[0].parameters())
            assert "blocks" not in called, "it holds nothing"
        else:
            assert module.head.weight is module.embed.weight
            assert module.twin is module.table


def wrap_of(make: Callable[[], nn.Module]) -> Any:
    return ["Block"] if make is Net else "auto"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def own_tensors(inner: nn.Module) -> list[torch.Tensor]:
    return [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]


def only_allocates(inner: nn.Module) -> None:
    inner.to_empty(device=torch.device("cpu"), recurse=False)


def materializes(inner: Any) -> None:
    """As in the documentation and tests of FSDP1."""
    if any(item.is_meta for item in own_tensors(inner)):
        only_allocates(inner)
        inner.reset_parameters()


def fills(inner: nn.Module) -> None:
    if isinstance(inner, nn.Linear):
        nn.init.normal_(inner.weight)
        nn.init.zeros_(inner.bias)
    elif isinstance(inner, nn.BatchNorm1d):
        inner.reset_parameters()


def fills_by_data(inner: nn.Module) -> None:
    """Cannot be run on meta."""
    fills(inner)
    if isinstance(inner, nn.Linear):
        inner.weight.data = torch.randn(inner.weight.shape)


def fills_by_numpy(inner: nn.Module) -> None:
    """Raises something else on meta."""
    fills(inner)
    if isinstance(inner, nn.Linear):
        inner.weight.detach().numpy()[:] = torch.randn(inner.weight.shape).numpy()


def fills_once(inner: Any) -> None:
    """As transformers' `_initialize_weights`, which marks what it has done."""
    if not getattr(inner, "is_initialized", False):
        fills(inner)
        inner.is_initialized = True


@on_ranks(1, 2, full=(4,))
def test_init_fn_is_called_as_by_fsdp1() -> None:
    seen: list[tuple[str, bool]] = []

    def rule(inner: nn.Module) -> None:
        if tensors := own_tensors(inner):
            seen.append((type(inner).__name__, all(item.is_meta for item in tensors)))
        materializes(inner)

    torch.manual_seed(3)
    options: Any = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": torch.device("cpu")}
    oracle = FullyShardedDataParallel(on_meta(small), param_init_fn=rule, use_orig_params=True, **options)
    theirs, seen = seen, []
    torch.manual_seed(3)
    module = sharded(on_meta(small), wrap=["Linear"], param_init_fn=rule)
    assert seen == theirs == [("Linear", True), ("Linear", True), ("BatchNorm1d", True)]
    with FullyShardedDataParallel.summon_full_params(oracle):
        expected = {name.replace("_fsdp_wrapped_module.", ""): item for name, item in oracle.state_dict().items()}
        assert_same({name: full(item) for name, item in module.state_dict().items()}, expected, rtol=0, atol=0)


class Scaled(nn.Module):
    """Holds a parameter beside a container without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.part = nn.Sequential(nn.Linear(4, 4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def reaches_down(inner: Any) -> None:
    inner.to_empty(device="cpu")  # children, too
    if hasattr(inner, "reset_parameters"):
        inner.reset_parameters()


def works_on_containers(inner: Any) -> None:
    if isinstance(inner, Scaled):
        only_allocates(inner)
        inner.reset_parameters()
    elif isinstance(inner, nn.Sequential):
        materializes(inner[0])


@on_ranks(1, 2, full=(4,))
def test_init_fn_may_reach_into_children() -> None:
    for rule in (reaches_down, works_on_containers):
        torch.manual_seed(3)
        oracle = FullyShardedDataParallel(on_meta(Scaled), param_init_fn=rule, device_id=torch.device("cpu"))
        torch.manual_seed(3)
        module = sharded(on_meta(Scaled), wrap="none", param_init_fn=rule)
        with FullyShardedDataParallel.summon_full_params(oracle):
            assert_same(parameters(module), dict(oracle.module.named_parameters()), rtol=0, atol=0)
    with pytest.raises(PlanError, match=r"of a module that is sharded already.*recurse=False"):
        sharded(on_meta(Scaled), wrap=["Linear"], param_init_fn=reaches_down)


@on_ranks(1, 2, full=(4,))
def test_init_fn_may_only_fill_values() -> None:
    for rule in (fills, fills_by_data, fills_by_numpy, fills_once):
        torch.manual_seed(3)
        expected = small()
        torch.manual_seed(3)
        for inner in expected.modules():
            rule(inner)
        torch.manual_seed(3)
        module = sharded(on_meta(small), wrap=["Linear"], param_init_fn=rule)
        require_same(module, expected)


def only_fills_parameters(inner: nn.Module) -> None:
    for item in inner.parameters(recurse=False):
        nn.init.ones_(item)


def fails_on_meta(inner: nn.Module) -> None:
    if inner.training and any(item.is_meta for item in own_tensors(inner)):
        raise RuntimeError("out of memory")


@on_ranks(1, 2, full=(4,))
def test_init_fn_leaves_nothing_unset() -> None:
    cases: tuple[tuple[Callable[[nn.Module], None], list[str]], ...] = (
        (lambda inner: None, ["0.weight", "0.bias"]),
        (only_allocates, ["0.weight", "0.bias"]),
        (fails_on_meta, ["0.weight", "0.bias"]),
        (only_fills_parameters, ["1.running_mean", "1.running_var", "1.num_batches_tracked"]),
    )
    for rule, names in cases:
        with pytest.raises(PlanError, match=r"param_init_fn left \d tensors without a value") as caught:
            sharded(on_meta(small), wrap=["Linear"], param_init_fn=rule)
        assert caught.value.problems == tuple(names)
        assert isinstance(caught.value.__cause__, RuntimeError) == (rule is fails_on_meta)


@on_ranks(1, 2, full=(4,))
def test_init_fn_on_all_ranks_but_the_first() -> None:
    """How FSDP1 is told that rank 0 alone has values."""
    expected = build(small)
    is_first = dist.get_rank() == 0
    own = expected if is_first else on_meta(small)
    module = sharded(own, param_init_fn=None if is_first else only_allocates, sync_module_states=True, wrap="none")
    require_same(module, expected)


@on_ranks(1, 2, full=(4,))
def test_rules_written_for_fsdp1() -> None:
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


@on_ranks(2, full=(4,))
def test_a_rule_that_fails_on_one_rank() -> None:
    def rule(inner: nn.Module) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise LookupError("no rule")
        by_shape(inner)

    with pytest.raises(Exception, match="no rule"):
        sharded(on_meta(Net), param_init_fn=rule, sync_module_states=True)


# --- sync_module_states ---------------------------------------------------------------------------------------------


@on_ranks(1, 2, full=(4,))
def test_rank_0_decides(replicate_size: int) -> None:
    """The oracle is rank 0's own module: FSDP1 refuses `sync_module_states` on CPUs."""
    rank = dist.get_rank()
    for make in (Net, Odd):
        expected, own = build(make, seed=0), build(make, seed=rank)
        if make is Odd:
            for each, seed in ((expected, 0), (own, rank)):
                each.norm.running_mean.fill_(seed)
                each.mask.fill_(seed % 2 == 0)
        fields: dict[str, Any] = {"sync_module_states": True, "replicate_size": replicate_size}
        module = sharded(own, wrap=wrap_of(make), **fields)
        require_same(module, expected)
        # Only rank 0 has values, as accelerate's cpu_ram_efficient_loading leaves it.
        module = sharded(expected if rank == 0 else on_meta(make), wrap=wrap_of(make), **fields)
        assert_same(parameters(module), parameters(expected), rtol=0, atol=0)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


@on_ranks(2, full=(4,))
def test_differing_ranks_all_raise() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    cases: list[tuple[nn.Module, str]] = [
        (build(Wider if last else Net), r"has \['head.weight'.*where rank 0 has \['head.weight'"),
        (on_meta(Net), "is on meta on rank 0, which has nothing to send"),
    ]
    for module, message in cases:
        with pytest.raises(PlanError, match=message) as caught:
            sharded(module, sync_module_states=True)
        assert len(set(all_gather_json(str(caught.value)))) == 1
