"""`state_dict_type`, `apply`, `fsdp_modules` and names beside FSDP1's; state saved by some ranks, loaded by others."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, state_dict_type, summon_full_params
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.fully_shard.layout import local_tensor
from tests.distributed import models
from tests.distributed.checks import on_ranks
from tests.distributed.fsdp.test_full_params import rank, require_equal, require_shards, summon_theirs
from tests.distributed.fully_shard.sharding_models import (
    IDS,
    bumped,
    ours,
    outcomes,
    own_rows,
    same,
    shardings,
    theirs,
    theirs_named,
)
from tests.distributed.fully_shard.test_sharding import Scaled
from tests.distributed.models import Odd, filled
from tests.spawn import device_type

FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)
RANK_0_ONLY = FullStateDictConfig(rank0_only=True)


@on_ranks(1, 3, sim=(2,))
def test_full(root: Path) -> None:
    """FSDP1's keys and values, on every rank or on rank 0; ties and buffers included."""
    expected = filled().state_dict()
    for sharding, rank0_only, offload in itertools.product(shardings(), (False, True), (False, True)):
        module, oracle = ours(sharding), theirs(sharding)
        config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
        module(IDS)  # the root keeps its full parameters registered
        with state_dict_type(module, FULL, config):
            found = module.state_dict()
        # On the CPU FSDP1's offload_to_cpu ends the process: it reads what it has freed.
        with FullyShardedDataParallel.state_dict_type(oracle, FULL, FullStateDictConfig(rank0_only=rank0_only)):
            wanted = oracle.state_dict()
        # Elsewhere FSDP1 leaves a buffer's second name, and under HSDP each replica's first rank gets all.
        assert not found or list(wanted) == list(found)
        assert list(found) == ([] if rank0_only and rank() else list(expected))
        for name, value in found.items():
            assert not isinstance(value, DTensor)
            assert value.dtype == expected[name].dtype, name
            assert value.device.type == ("cpu" if offload else device_type()), name
            assert same(expected[name], value), name
            assert same(wanted[name], value), name
        found.clear()
        assert isinstance(module.state_dict()["narrow"], DTensor)
        require_shards(module)
    wrapped = nn.ModuleDict({"inner": ours(), "other": nn.Linear(2, 2)})
    with state_dict_type(wrapped["inner"], FULL, RANK_0_ONLY):
        names = {f"inner.{name}" for name in expected if rank() == 0}
        assert set(wrapped.state_dict()) == names | {"other.weight", "other.bias"}
    model: Any = filled()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    shard_module(model, init_mesh(device_type()))
    for kind in (FULL, SHARDED, LOCAL):
        with state_dict_type(model, kind):
            found = model.state_dict()
            assert list(found) == list(expected)
            assert str(model.load_state_dict(found)) == "<All keys matched successfully>"
    with state_dict_type(rs.DistModule(wrapped["inner"]), FULL):
        assert same(wrapped["inner"].state_dict()["large"], expected["large"])


@on_ranks(1, 3, sim=(2,))
def test_full_load() -> None:
    """Rank 0's values, whatever the others pass; FSDP1 wants all of them on every rank."""
    state = bumped().state_dict()
    for sharding, others in itertools.product(shardings(), ({}, filled(5).state_dict())):
        module = ours(sharding)
        with state_dict_type(module, FULL):
            result = module.load_state_dict(state if rank() == 0 else others)
        assert str(result) == "<All keys matched successfully>"
        require_shards(module)
        require_equal(module, bumped())
        if sharding.mixed_precision is None:
            with torch.no_grad():
                torch.testing.assert_close(module(IDS).cpu(), bumped()(IDS))
    oracle = theirs()
    with FullyShardedDataParallel.state_dict_type(oracle, FULL):
        wanted = oracle.state_dict()
        found = outcomes(lambda: oracle.load_state_dict(_on_rank_0(wanted)))
    assert [bool(text) for text in found] == [index > 0 for index in range(len(found))]
    with torch.device("meta"):
        empty = Odd()
    empty.positions = torch.arange(5).expand(2, 5).clone()
    shard_module(empty, init_mesh(device_type()))
    with state_dict_type(empty, FULL):
        empty.load_state_dict(state if rank() == 0 else {})
    require_equal(empty.eval(), bumped())


@on_ranks(3)
def test_full_mismatches() -> None:
    """Missing, unexpected and mis-shaped keys raise on every rank before data moves; `strict=False` reports them."""
    state = bumped().state_dict()
    incomplete = {name: value for name, value in state.items() if name != "narrow"} | {"more.weight": torch.zeros(2)}
    module = ours()
    with state_dict_type(module, FULL):
        for wrong, strict in ((incomplete, True), (state | {"large": torch.zeros(3, 4)}, False)):
            found = outcomes(partial(module.load_state_dict, _on_rank_0(wrong), strict=strict))
            assert all(text.startswith("PlanError") for text in found), found
            names = ("narrow", "more.weight") if strict else ("large",)
            assert all(name in text for text in found for name in names), found
            require_equal_unformed(module, filled())
        result = module.load_state_dict(_on_rank_0(incomplete), strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["narrow"], ["more.weight"])
    expected = bumped()
    with torch.no_grad():
        expected.narrow.copy_(filled().narrow)
    require_equal(module, expected)
    with state_dict_type(module, FULL), summon_full_params(module, rank0_only=True):
        for use in (module.state_dict, lambda: module.load_state_dict(_on_rank_0(state))):
            found = outcomes(use)
            assert all(text.startswith("RuntimeError") and "summon_full_params" in text for text in found), found
    wrapper = nn.ModuleDict({"inner": module})
    with state_dict_type(module, FULL):
        wrapper.load_state_dict({f"inner.{name}": value for name, value in _on_rank_0(state).items()})
        text = {"inner.table": torch.zeros(3, 4, dtype=torch.int32), "inner.stray": torch.zeros(1)}
        found = outcomes(lambda: wrapper.load_state_dict(_on_rank_0(text)))
        assert all("Missing key" in each and "inner.stray" in each for each in found), found
    expected = bumped()
    expected.table.zero_()
    require_equal(module, expected)


def _on_rank_0(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state if rank() == 0 else {}


def require_equal_unformed(module: nn.Module, expected: nn.Module) -> None:
    with state_dict_type(module, SHARDED):
        require_equal(module, expected)


@on_ranks(1, 3, full=(4,), sim=(2,))
def test_sharded() -> None:
    """DTensors of the module's own memory, as FSDP1 cuts them on a mesh; they load into another module."""
    for sharding in shardings():
        module, other = ours(sharding), ours(sharding, seed=1)
        with state_dict_type(module, SHARDED), state_dict_type(other, SHARDED):
            found = module.state_dict()
            assert list(found) == list(filled().state_dict())
            assert found["large"].to_local().data_ptr() == local_tensor(module.large).data_ptr()
            assert str(other.load_state_dict(found)) == "<All keys matched successfully>"
        require_equal(other, filled())
        oracle = _on_a_mesh()
        with FullyShardedDataParallel.state_dict_type(oracle, SHARDED, fsdp.ShardedStateDictConfig()):
            wanted = oracle.state_dict()
        assert list(wanted) == list(found)
        for name, value in found.items():
            if isinstance(value, DTensor):
                if dist.get_world_size() == 1:  # FSDP1 gives plain tensors
                    assert same(wanted[name], value.full_tensor()), name
                    continue
                assert same(wanted[name].full_tensor(), value.full_tensor()), name
                if sharding.replicate_size == 1:
                    assert wanted[name].placements == value.placements
                    assert same(wanted[name].to_local(), value.to_local()), name
    for wrong in ({"large": torch.zeros(521, 520)}, {"large": found["narrow"]}, {"scale": found["narrow"]}, {}):
        changed = found | wrong if wrong else {}
        if rank() == 0 or "scale" not in wrong:
            errors = outcomes(partial(_load, module, SHARDED, changed))
        else:
            errors = outcomes(partial(_load, module, SHARDED, found))  # rank 0 alone sees what is wrong
        assert all(text.startswith("PlanError") for text in errors), errors


def _on_a_mesh() -> Any:
    model = filled()
    model.scale = nn.Parameter(model.scale.detach().reshape(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), device_mesh=mesh)


def _load(module: nn.Module, kind: StateDictType, state: dict[str, Any], strict: bool = True) -> None:
    with state_dict_type(module, kind):
        module.load_state_dict(state, strict=strict)


@pytest.mark.all_ranks
@on_ranks(1, 3)
def test_local(root: Path) -> None:
    """DTensors of the module's own memory; through files and torch.distributed.checkpoint each rank gets its rows."""
    world_size = dist.get_world_size()
    for index, sharding in enumerate(shardings()):
        module, path = ours(sharding), root / f"local-{world_size}-{index}"
        with state_dict_type(module, LOCAL, fsdp.LocalStateDictConfig(offload_to_cpu=True)):
            found = module.state_dict()
        assert list(found) == list(filled().state_dict())
        assert found["head.weight"].to_local().data_ptr() == local_tensor(module.embed.weight).data_ptr()
        _load(loaded := ours(sharding, seed=1), LOCAL, found)
        require_equal(loaded, filled())
        save_sharded(found, checkpoint_id=path)
        torch.save(found, path / f"rank{rank()}.pt")
        dist.barrier()  # nobody reads before the files are whole
        _load_checkpoint(loaded := ours(sharding, seed=1), path, LOCAL)
        require_equal(loaded, filled())
        _load(loaded := ours(sharding, seed=1), LOCAL, torch.load(path / f"rank{rank()}.pt"))
        require_equal(loaded, filled())
    flat, wanted = _flat(seed=0), _flat(seed=0)
    with FullyShardedDataParallel.state_dict_type(flat, LOCAL):
        save_sharded(flat.state_dict(), checkpoint_id=root / f"flat-{world_size}")
    dist.barrier()
    with FullyShardedDataParallel.state_dict_type(flat := _flat(seed=1), LOCAL):
        state = flat.state_dict()
        load_sharded(state, checkpoint_id=root / f"flat-{world_size}")
        flat.load_state_dict(state)
    assert torch.equal(next(flat.parameters()), next(wanted.parameters()))
    last = dist.get_world_size() - 1
    wrongs = [("large", torch.zeros(521, 1), "DTensor"), ("narrow", module.narrow.detach()[:1], "shape")]
    for key, value, word in (*wrongs, ("narrow", None, "not a tensor")):
        for strict in (True, False):
            state = found | {key: value} if rank() == last else found
            errors = outcomes(partial(_load, module, LOCAL, state, strict))
            assert all(text.startswith("PlanError") and key in text and word in text for text in errors), errors
    with torch.device("meta"):
        empty = Odd()
    fsdp.fully_shard(empty, mesh=init_mesh(device_type()), ignored_params={empty.scale})
    assert all("materialize" in text for text in outcomes(lambda: _load(empty, LOCAL, found)))


def _flat(seed: int) -> FullyShardedDataParallel:
    """FSDP1 with flat parameters, without which it has no local form."""
    torch.manual_seed(seed)
    return FullyShardedDataParallel(nn.Linear(5, 7), device_id=torch.device("cpu"))


def _load_checkpoint(module: nn.Module, path: Path, kind: StateDictType) -> None:
    with state_dict_type(module, kind):
        state = module.state_dict()
        load_sharded(state, checkpoint_id=path)
        module.load_state_dict(state)


@on_ranks(3, sim=(2,))
def test_inner_modules(root: Path) -> None:
    """An inner module gives and takes the form, as FSDP1's does, also one that is in its parent's group."""
    for sharding, rank0_only in itertools.product(shardings(), (False, True)):
        module, oracle, expected = ours(sharding), theirs(sharding), filled()
        config = FullStateDictConfig(rank0_only=rank0_only)
        with state_dict_type(module, FULL, config), FullyShardedDataParallel.state_dict_type(oracle, FULL, config):
            block, wanted = module.blocks[0].state_dict(), oracle.blocks[0].state_dict()
            if sharding.replicate_size == 1 or rank() == 0:  # under HSDP FSDP1 gives them to each replica's first rank
                assert list(block) == list(wanted) == ([] if rank0_only and rank() else ["weight", "bias"])
            assert all(same(wanted[name], value) for name, value in block.items())
            module(IDS)  # the root keeps its full parameters registered, in low precision maybe
            for name in ("head", "blocks"):
                inner = module.get_submodule(name).state_dict(prefix="x.")
                full = {} if rank0_only and rank() else expected.get_submodule(name).state_dict(prefix="x.")
                assert inner.keys() == full.keys()
                assert all(same(inner[key], value) for key, value in full.items())
                module(IDS)
                state = bumped().get_submodule(name).state_dict()
                result = module.get_submodule(name).load_state_dict(state if rank() == 0 else {})
                assert str(result) == "<All keys matched successfully>"
                expected.get_submodule(name).load_state_dict(state)
            assert rs.get_state_dict_type(module.blocks[0]).state_dict_config is config
            with state_dict_type(module.blocks[0], SHARDED):
                assert isinstance(module.blocks[0].state_dict()["weight"], DTensor)
            assert ("weight" in module.blocks[0].state_dict()) == (not rank0_only or rank() == 0)
        require_equal(module, expected)
        assert not any({"state_dict", "load_state_dict"} & set(inner.__dict__) for inner in module.modules())
        for kind in (SHARDED, LOCAL):
            with state_dict_type(module, kind):
                module(IDS)
                assert isinstance(module.head.state_dict()["weight"], DTensor)
                assert str(module.head.load_state_dict(module.head.state_dict())) == "<All keys matched successfully>"
                found = outcomes(partial(module.head.load_state_dict, {} if rank() == 0 else module.head.state_dict()))
                assert all(text.startswith("PlanError") and "missing" in text for text in found), found


@on_ranks(3)
def test_a_wrapped_root(root: Path) -> None:
    """A root that is a checkpoint wrapper loads what it gave, and what the module that it wraps gave."""
    for kind, outer in itertools.product((FULL, SHARDED, LOCAL), (False, True)):
        module: Any = shard_module(checkpoint_wrapper(filled()), init_mesh(device_type()))
        compiled: Any = torch.compile(filled(1), backend="eager")
        other: Any = shard_module(checkpoint_wrapper(compiled), init_mesh(device_type()))
        with state_dict_type(module, kind), state_dict_type(other, kind):
            found = module.state_dict()
            assert list(found) == list(filled().state_dict())
            if outer:
                nn.ModuleDict({"inner": other}).load_state_dict({f"inner.{key}": value for key, value in found.items()})
            else:
                assert str(other.load_state_dict(found, assign=kind is FULL)) == "<All keys matched successfully>"
        require_equal_unformed(other, filled())


@on_ranks(3)
def test_extra_state() -> None:
    """In the full form rank 0's, once on every rank; in the others each rank's own."""
    states = ({"step": 3}, torch.arange(3), 5)
    module: Any = shard_module(nn.Sequential(*map(Scaled, states)), init_mesh(device_type()))
    for kind in (FULL, SHARDED):
        other: Any = shard_module(nn.Sequential(*(Scaled() for _ in states)), init_mesh(device_type()))
        with state_dict_type(module, kind), state_dict_type(other, kind):
            state = module.state_dict()
            result = other.load_state_dict(_on_rank_0(state) if kind is FULL else state)
            assert str(result) == "<All keys matched successfully>"
            assert repr([inner.state for inner in other]) == repr([inner.state for inner in module])
            wrong = {key: value for key, value in state.items() if key != "1._extra_state"} | {"more._extra_state": 1}
            for strict in (True, False):
                found = outcomes(partial(other.load_state_dict, wrong if rank() == 0 else {}, strict=strict))
                words = ("1._extra_state", "more._extra_state") if strict else ()
                assert all(text.startswith("PlanError") == strict for text in found), found
                assert all(word in found[0] for word in words), found
            nn.ModuleDict({"x": other}).load_state_dict({f"x.{key}": value for key, value in state.items()})


@on_ranks(3)
def test_settings() -> None:
    """Forms nest, and go when their context does, by an exception too, after which FSDP1's stays."""
    module, oracle = ours(), theirs()
    assert rs.get_state_dict_type(module).state_dict_type is SHARDED
    with pytest.raises(KeyError), state_dict_type(module, FULL, RANK_0_ONLY):  # noqa: PT012
        settings = rs.get_state_dict_type(module)
        assert (settings.state_dict_type, settings.state_dict_config) == (FULL, RANK_0_ONLY)
        with state_dict_type(module, LOCAL):
            assert isinstance(module.state_dict()["narrow"], DTensor)
        assert ("narrow" in module.state_dict()) == (rank() == 0)
        raise KeyError
    assert isinstance(module.state_dict()["narrow"], DTensor)
    assert "load_state_dict" not in module.__dict__
    assert not module._state_dict_hooks
    with pytest.raises(KeyError), FullyShardedDataParallel.state_dict_type(oracle, LOCAL):
        raise KeyError
    assert FullyShardedDataParallel.get_state_dict_type(oracle).state_dict_type is LOCAL
    assert rs.set_state_dict_type(module, FULL).state_dict_type is SHARDED
    assert rs.set_state_dict_type(module, LOCAL).state_dict_type is FULL
    with pytest.raises(ValueError, match="ShardedStateDictConfig"):
        rs.set_state_dict_type(module, SHARDED, FullStateDictConfig())
    rs.set_state_dict_type(module, FULL, None, fsdp.FullOptimStateDictConfig())
    assert isinstance(rs.get_state_dict_type(module).optim_state_dict_config, fsdp.FullOptimStateDictConfig)


@pytest.mark.all_ranks
@on_ranks(4, sim=(2,))
def test_what_other_meshes_saved(root: Path) -> None:
    """Bit for bit, from more ranks and from fewer, in the full form and through torch.distributed.checkpoint."""
    meshes: list[Any] = [(init_mesh(device_type(), sharding), sharding, None) for sharding in shardings()]
    groups = [dist.new_group(list(range(size))) for size in ((3, 2, 1) if device_type() == "cpu" else ())]
    meshes += [(init_mesh("cpu", group=group), Sharding(), group) for group in groups if dist.get_rank(group) >= 0]
    for index, (mesh, sharding, ranks) in enumerate(meshes):
        module = shard_module(filled(index), mesh, sharding)
        with state_dict_type(module, FULL, RANK_0_ONLY):
            state = module.state_dict()
        if rank() == 0:
            torch.save(state, root / f"full-{index}.pt")
        with state_dict_type(module, SHARDED):
            save_sharded(module.state_dict(), checkpoint_id=root / f"sharded-{index}", process_group=ranks)
    dist.barrier()  # nobody reads before the files are whole
    expected = [filled(saved).state_dict() for saved in range(len(list(root.glob("full-*.pt"))))]
    for mesh, sharding, ranks in meshes:
        module = shard_module(filled(9), mesh, sharding)
        for saved, values in enumerate(expected):  # each load replaces other values
            _load(module, FULL, torch.load(root / f"full-{saved}.pt") if rank() == 0 else {})
            models.require_equal(module, values)
        module = shard_module(filled(9), mesh, sharding)
        for saved, values in enumerate(expected):
            with state_dict_type(module, SHARDED):
                state = module.state_dict()
                load_sharded(state, checkpoint_id=root / f"sharded-{saved}", process_group=ranks)
                module.load_state_dict(state)
            models.require_equal(module, values)


def initialise(module: nn.Module) -> None:
    """As `init_weights` of many libraries: random numbers, in the order of the visits."""
    with torch.no_grad():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert not isinstance(module.weight, DTensor)
            assert module.weight.dtype == torch.float32
            nn.init.orthogonal_(module.weight)
        if isinstance(module, Odd):
            module.narrow.normal_()
            module.scale.fill_(0.25)


@on_ranks(1, 3, full=(2, 4), sim=(2,))
def test_apply() -> None:
    """The values of FSDP1 and of one process, for a rule that needs whole rows and columns; also in low precision."""
    expected = filled()
    torch.manual_seed(3)
    expected.apply(initialise)
    for sharding in shardings():
        module, oracle = ours(sharding), theirs(sharding)
        torch.manual_seed(3)
        assert rs.apply(module, initialise) is module
        torch.manual_seed(3)
        oracle.apply(initialise)
        require_shards(module)
        require_equal(module, expected)
        with summon_full_params(module, writeback=False), summon_theirs(oracle, writeback=False):
            wanted = theirs_named(oracle)
            assert all(same(wanted[name], parameter) for name, parameter in module.named_parameters())
    wrapped = rs.DistModule(ours())
    torch.manual_seed(3)
    assert rs.apply(wrapped, initialise) is wrapped
    require_equal(wrapped.module, expected)


@on_ranks(3)
def test_visits() -> None:
    """Each submodule once, in the order of `nn.Module.apply`, with its own group gathered and no other below."""
    module = ours()
    wanted: list[str] = []
    visits: list[str] = []
    names = {submodule: name for name, submodule in module.named_modules()}
    nn.Module.apply(module, lambda submodule: wanted.append(names[submodule]))

    def visit(submodule: nn.Module) -> None:
        visits.append(names[submodule])
        assert not any(isinstance(parameter, DTensor) for parameter in submodule.parameters(recurse=False))
        if isinstance(submodule, Odd):
            assert isinstance(module.blocks[0].weight, DTensor)

    rs.apply(module, visit)
    assert visits == wanted
    shared: Any = nn.Sequential(module.blocks[0], module.blocks[0])
    visits.clear()
    names[shared] = "shared"
    rs.apply(shared, visit)
    assert visits == ["blocks.0", "shared"]
    plain: list[nn.Module] = []
    assert rs.apply(lonely := nn.Sequential(nn.Linear(2, 2)), plain.append) is lonely
    assert plain == [lonely[0], lonely]


@on_ranks(3)
def test_an_apply_that_fails() -> None:
    """An error of one rank is one of all ranks, and no rank waits for the failed one's part."""
    module, last = ours(), dist.get_world_size() - 1

    def fail(submodule: nn.Module) -> None:
        if submodule in module.blocks and dist.get_rank() == last:
            raise KeyError("no rule")
        if isinstance(submodule, Odd):
            module.narrow.data.fill_(4.0)

    found = outcomes(lambda: rs.apply(module, fail))
    assert found[last] == "KeyError: 'no rule'"
    assert all(f"on rank {last}" in text for text in found[:last]), found
    require_shards(module)


@on_ranks(3)
def test_modules() -> None:
    """The modules that FSDP1 finds, in its order."""
    module, oracle = ours(), theirs()
    names = {submodule: name for name, submodule in module.named_modules()}
    their_names = {submodule: clean_tensor_name(name) for name, submodule in oracle.named_modules()}
    for root_only in (False, True):
        found = [names[each] for each in rs.fsdp_modules(module, root_only) if isinstance(each, nn.Module)]
        wanted = FullyShardedDataParallel.fsdp_modules(oracle, root_only)
        assert found == [their_names[each].removeprefix("_fsdp_wrapped_module") for each in wanted]
        assert len(found) == (1 if root_only else 4)
    first, second = ours(), ours()
    pair = nn.ModuleList([first, nn.Linear(1, 1), second])
    assert rs.fsdp_modules(pair, root_only=True) == [first, second]
    assert len(rs.fsdp_modules(pair)) == 8
    assert all(isinstance(each, fsdp.FSDPModule) for each in rs.fsdp_modules(pair))
    assert rs.fsdp_modules(nn.Linear(1, 1)) == []
    wrapped = rs.DistModule(module)
    assert rs.fsdp_modules(wrapped, root_only=True) == [module]


@on_ranks(3)
def test_names() -> None:
    """FQNs of the plain module, under activation checkpointing and torch.compile too; shards after a forward."""
    model: Any = filled()
    plain = filled()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    shard_module(model, init_mesh(device_type()))
    oracle = theirs()
    found = dict(rs.named_parameters(model))
    assert list(found) == [name for name, _ in plain.named_parameters()]
    with summon_theirs(oracle):
        assert list(found) == list(dict(oracle.named_parameters()))
    options: list[dict[str, Any]] = [{"remove_duplicate": False}, {"recurse": False}, {"prefix": "model"}]
    for option in options:
        pairs = dict(rs.named_parameters(model, **option)), dict(plain.named_parameters(**option))
        assert pairs[0].keys() == pairs[1].keys()
        buffers = dict(rs.named_buffers(model, **option)), dict(plain.named_buffers(**option))
        assert buffers[0].keys() == buffers[1].keys()
        assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    for module in (ours(), rs.DistModule(ours())):
        module(own_rows())
        assert all(isinstance(p, DTensor) for name, p in rs.named_parameters(module) if name != "scale")
        with summon_full_params(module):
            assert not any(isinstance(parameter, DTensor) for _, parameter in rs.named_parameters(module))


@on_ranks(3, sim=(2,))
def test_params_with_grad() -> None:
    """Those that one process has; FSDP1 has each on the ranks that hold some of it."""
    module, oracle, plain = ours(), theirs(), filled()
    assert rs.params_with_grad(module) == []
    for each in (module, oracle, plain):
        each.large.requires_grad_(False)
        each.blocks[0].weight.requires_grad_(False)
        each(own_rows()).float().mean().backward()
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = [names[parameter] for parameter in rs.params_with_grad(module)]
    assert found == [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    local = [name for name, parameter in theirs_named(oracle).items() if parameter.grad is not None]
    assert set(found) == {name for names in all_gather_json(local) for name in names}
