"""`apply`, `fsdp_modules`, `params_with_grad` and names on real groups, beside FSDP1."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor

from raysharding.distributed import (
    DistModule,
    apply,
    fsdp_modules,
    init_mesh,
    named_buffers,
    named_parameters,
    params_with_grad,
    shard_module,
    summon_full_params,
)
from raysharding.distributed.comm.json_collectives import all_gather_json
from tests.distributed.checks import on_ranks
from tests.distributed.fsdp.test_full_params import require_equal, require_shards, summon_theirs
from tests.distributed.fully_shard.sharding_models import (
    ours,
    outcomes,
    own_rows,
    same,
    shardings,
    theirs,
    theirs_named,
)
from tests.distributed.models import Odd, filled
from tests.spawn import device_type


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
        assert apply(module, initialise) is module
        torch.manual_seed(3)
        oracle.apply(initialise)
        require_shards(module)
        require_equal(module, expected)
        with summon_full_params(module, writeback=False), summon_theirs(oracle, writeback=False):
            wanted = theirs_named(oracle)
            assert all(same(wanted[name], parameter) for name, parameter in module.named_parameters())
    wrapped = DistModule(ours())
    torch.manual_seed(3)
    assert apply(wrapped, initialise) is wrapped
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

    apply(module, visit)
    assert visits == wanted
    shared: Any = nn.Sequential(module.blocks[0], module.blocks[0])
    visits.clear()
    names[shared] = "shared"
    apply(shared, visit)
    assert visits == ["blocks.0", "shared"]
    plain: list[nn.Module] = []
    assert apply(lonely := nn.Sequential(nn.Linear(2, 2)), plain.append) is lonely
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

    found = outcomes(lambda: apply(module, fail))
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
        found = [names[each] for each in fsdp_modules(module, root_only) if isinstance(each, nn.Module)]
        wanted = FullyShardedDataParallel.fsdp_modules(oracle, root_only)
        assert found == [their_names[each].removeprefix("_fsdp_wrapped_module") for each in wanted]
        assert len(found) == (1 if root_only else 4)
    first, second = ours(), ours()
    pair = nn.ModuleList([first, nn.Linear(1, 1), second])
    assert fsdp_modules(pair, root_only=True) == [first, second]
    assert len(fsdp_modules(pair)) == 8
    assert all(isinstance(each, FSDPModule) for each in fsdp_modules(pair))
    assert fsdp_modules(nn.Linear(1, 1)) == []
    wrapped = DistModule(module)
    assert fsdp_modules(wrapped, root_only=True) == [module]


@on_ranks(3)
def test_names() -> None:
    """FQNs of the plain module, under activation checkpointing and torch.compile too; shards after a forward."""
    model: Any = filled()
    plain = filled()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    shard_module(model, init_mesh(device_type()))
    oracle = theirs()
    found = dict(named_parameters(model))
    assert list(found) == [name for name, _ in plain.named_parameters()]
    with summon_theirs(oracle):
        assert list(found) == list(dict(oracle.named_parameters()))
    options: list[dict[str, Any]] = [{"remove_duplicate": False}, {"recurse": False}, {"prefix": "model"}]
    for option in options:
        pairs = dict(named_parameters(model, **option)), dict(plain.named_parameters(**option))
        assert pairs[0].keys() == pairs[1].keys()
        buffers = dict(named_buffers(model, **option)), dict(plain.named_buffers(**option))
        assert buffers[0].keys() == buffers[1].keys()
        assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    for module in (ours(), DistModule(ours())):
        module(own_rows())
        assert all(isinstance(p, DTensor) for name, p in named_parameters(module) if name != "scale")
        with summon_full_params(module):
            assert not any(isinstance(parameter, DTensor) for _, parameter in named_parameters(module))


@on_ranks(3, sim=(2,))
def test_params_with_grad() -> None:
    """Those that one process has; FSDP1 has each on the ranks that hold some of it."""
    module, oracle, plain = ours(), theirs(), filled()
    assert params_with_grad(module) == []
    for each in (module, oracle, plain):
        each.large.requires_grad_(False)
        each.blocks[0].weight.requires_grad_(False)
        each(own_rows()).float().mean().backward()
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = [names[parameter] for parameter in params_with_grad(module)]
    assert found == [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    local = [name for name, parameter in theirs_named(oracle).items() if parameter.grad is not None]
    assert set(found) == {name for names in all_gather_json(local) for name in names}
