"""`summon_full_params` on real groups, beside FSDP1's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, state_dict_type, summon_full_params
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.worker.changes import version
from tests.distributed import models
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    IDS,
    bump,
    bumped,
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

summon_theirs = FullyShardedDataParallel.summon_full_params


def rank() -> int:
    return dist.get_rank()


def require_equal(module: nn.Module, expected: nn.Module) -> None:
    """What the shards hold is what `expected` holds, bit for bit; replicas are alike."""
    models.require_equal(module, expected.state_dict())
    replicated = [parameter.tolist() for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    assert len({str(values) for values in all_gather_json(replicated)}) == 1


def require_shards(module: Any) -> None:
    """The shards are registered, ties included, and FSDP2 uses them."""
    kinds = {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}
    assert [name for name, is_sharded in kinds.items() if not is_sharded] == ["scale"]
    assert module.head.weight is module.embed.weight


@on_ranks(1, 3, full=(2, 4), sim=(4,))
def test_values(root: Path) -> None:
    """Full parameters under FSDP1's names and with its values, in fp32 under mixed precision too; then shards again."""
    for sharding in shardings():
        module, oracle = ours(sharding), theirs(sharding)
        module.narrow.requires_grad_(False)
        module(IDS)  # the root keeps its full parameters registered
        assert module.large.dtype == (torch.float32 if sharding.mixed_precision is None else torch.bfloat16)
        shards = {name: local_tensor(p).data_ptr() for name, p in dict(rs.named_parameters(module)).items()}
        with summon_full_params(module), summon_theirs(oracle):
            found, wanted = dict(module.named_parameters()), theirs_named(oracle)
            assert list(found) == list(wanted)
            for name, parameter in found.items():
                assert type(parameter) is nn.Parameter, name
                assert parameter.dtype == torch.float32, name
                assert same(wanted[name], parameter), name
                assert parameter.requires_grad == (name != "narrow")
                assert parameter.grad is None
            assert module.head.weight is module.embed.weight
            assert set(module.state_dict()) == set(filled().state_dict())
        require_shards(module)
        assert {name: local_tensor(p).data_ptr() for name, p in dict(rs.named_parameters(module)).items()} == shards


@on_ranks(1, 3, full=(2, 4), sim=(4,))
def test_write_back() -> None:
    """Changes reach the shards, or are undone, as FSDP1 does; a forward and an optimizer see them."""
    for sharding, writeback in itertools.product(shardings(), (True, False)):
        module, oracle = ours(sharding), theirs(sharding)
        with summon_full_params(module, writeback=writeback):
            bump(module)
        with summon_theirs(oracle, writeback=writeback):
            bump(oracle)
        require_shards(module)
        expected = bumped() if writeback else filled()
        require_equal(module, expected)
        with summon_full_params(module, writeback=False), summon_theirs(oracle, writeback=False):
            wanted = theirs_named(oracle)
            # FSDP1 does not undo changes in one process.
            if writeback or dist.get_world_size() > 1:
                assert all(same(wanted[name], p) for name, p in module.named_parameters())
            else:
                assert not same(wanted["narrow"], module.narrow)
        if sharding.mixed_precision is None:
            with torch.no_grad():
                torch.testing.assert_close(module(IDS).cpu(), expected(IDS))
        torch.optim.SGD(module.parameters(), lr=1.0).step()


@on_ranks(1, 3, full=(2, 4), sim=(4,))
def test_rank_0_only() -> None:
    """The others keep their shards; what rank 0 changes comes to all, which FSDP1 refuses."""
    for sharding, offload in itertools.product(shardings(), (True, False)):
        module = ours(sharding)
        with summon_full_params(module, rank0_only=True, offload_to_cpu=offload):
            kinds = {isinstance(parameter, DTensor) for parameter in module.parameters() if parameter.ndim}
            assert kinds == {rank() != 0}
            if rank() == 0:
                devices = {parameter.device.type for parameter in module.parameters()}
                assert devices == {"cpu" if offload else device_type()}
                bump(module)
        require_shards(module)
        require_equal(module, bumped())
        with summon_full_params(module, rank0_only=True, writeback=False):
            if rank() == 0:
                bump(module)
        require_equal(module, bumped())
    oracle = theirs()
    with pytest.raises(NotImplementedError), summon_theirs(oracle, rank0_only=True, writeback=True):
        pass


@on_ranks(1, 3, full=(2, 4), sim=(4,))
def test_gradients() -> None:
    """Full gradients as FSDP1 has them; they are written back, made and dropped."""
    for sharding, rank0_only in itertools.product(shardings(), (False, True)):
        module, oracle = ours(sharding), theirs(sharding)
        for each in (module, oracle):
            each(own_rows()).square().mean().backward()
        options = {"rank0_only": rank0_only, "with_grads": True}
        with summon_full_params(module, **options), summon_theirs(oracle, with_grads=True, writeback=False):
            wanted = theirs_named(oracle)
            if rank() == 0 or not rank0_only:
                for name, parameter in module.named_parameters():
                    grad = wanted[name].grad
                    assert grad is not None, name
                    size = grad.abs().max().item() * (1e-5 if sharding.mixed_precision is None else 2e-2)
                    found = parameter.grad.cpu()
                    torch.testing.assert_close(found, grad.reshape(parameter.shape), rtol=1e-4, atol=size)
                    parameter.grad.fill_(3.0)
                module.narrow.grad = None
        assert module.narrow.grad is None
        grads = {name: p.grad for name, p in module.named_parameters() if p is not module.narrow}
        assert all(grad is not None and bool((local_tensor(grad) == 3.0).all()) for grad in grads.values())
        assert all(isinstance(grad, DTensor) for name, grad in grads.items() if name != "scale")
        module.zero_grad()
        with summon_full_params(module, offload_to_cpu=True, **options):
            assert all(parameter.grad is None for parameter in module.parameters())
            if rank() == 0 or not rank0_only:
                rows = torch.arange(float(module.large.numel()), device=module.large.device)
                module.large.grad = rows.view_as(module.large)
        assert [name for name, p in module.named_parameters() if p.grad is not None] == ["large"]
        large = module.large.grad.full_tensor().cpu()
        assert torch.equal(large.flatten(), torch.arange(float(large.numel())))
    with pytest.raises(NotImplementedError), summon_theirs(oracle, with_grads=True, offload_to_cpu=True):
        pass


@on_ranks(2)
def test_what_the_body_writes_counts_as_a_change_on_every_rank() -> None:
    """By which a group knows whether files hold its weights."""
    module = shard_module(nn.Linear(4, 4), init_mesh("cpu"))

    bodies: list[tuple[bool, bool, Callable[[torch.Tensor], object]]] = [
        (False, False, lambda weight: weight.sum()),
        (False, True, lambda weight: weight.fill_(1.0)),
        (False, True, lambda weight: weight[3].fill_(2.0)),  # a row of rank 1
        (False, True, lambda weight: setattr(module, "weight", nn.Parameter(weight + 1.0))),
        (True, False, lambda weight: weight.sum()),
        (True, True, lambda weight: weight.fill_(3.0)),
    ]
    expected = [is_written for _, is_written, _ in bodies]
    versions = [version(module, None)]
    for rank0_only, _, body in bodies:
        with torch.no_grad(), summon_full_params(module, rank0_only=rank0_only):
            if rank() == 0 or not rank0_only:
                body(module.get_parameter("weight"))
        versions.append(version(module, None))
    assert [one != other for one, other in itertools.pairwise(versions)] == expected
    rs.fsdp.apply(module, lambda one: nn.init.ones_(one.get_parameter("weight")))
    assert version(module, None) != versions[-1]
    for rank0_only in (False, True):  # tensors of inference mode have no count
        with torch.inference_mode(), summon_full_params(module, writeback=False, rank0_only=rank0_only):
            assert (rank0_only and rank()) or bool((module.get_parameter("weight") == 1.0).all())


@on_ranks(3)
def test_a_gradient_that_some_ranks_lack() -> None:
    """It counts as zeros there, sharded or not, and nobody waits."""
    module = ours()
    if rank() == 0:
        module.large.grad = torch.ones_like(module.large)
        module.scale.grad = torch.tensor(float(dist.get_world_size()))
    with summon_full_params(module, with_grads=True):
        ones = -(-521 // dist.get_world_size())
        assert module.large.grad.sum(1).tolist() == [520.0] * ones + [0.0] * (521 - ones)
        assert module.scale.grad.item() == 1.0
        assert module.narrow.grad is None


@on_ranks(3)
def test_one_group() -> None:
    """Without `recurse`: the module's own parameters, or an inner module's; FSDP1 gives the same."""
    module, oracle = ours(), theirs()
    with summon_full_params(module, recurse=False), summon_theirs(oracle, recurse=False, writeback=False):
        full = {name for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        sizes = {name: p.numel() for name, p in filled().named_parameters()}
        theirs_full = {name for name, p in theirs_named(oracle).items() if p.numel() == sizes[name]}
        assert full == {name for name in sizes if not name.startswith("blocks")}
        assert full <= theirs_full
        with summon_full_params(module.blocks[1], recurse=False):  # another group: no conflict
            assert not isinstance(module.blocks[1].weight, DTensor)
            bump(module.blocks[1])
        with summon_full_params(module.blocks, recurse=False):  # no FSDP module
            assert isinstance(module.blocks[0].weight, DTensor)
    with summon_full_params(module.blocks[0]):
        bump(module.blocks[0])
        assert isinstance(module.large, DTensor)
    expected = filled()
    bump(expected.blocks[0])
    bump(expected.blocks[1])
    require_equal(module, expected)
    with torch.no_grad():
        torch.testing.assert_close(module(IDS).cpu(), expected(IDS))


class Pair(nn.Module):
    """No FSDP module: two roots and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = ours(seed=1), ours(seed=2)
        self.plain = nn.Parameter(torch.zeros(3, 3))
        self.factor = nn.Parameter(torch.tensor(float(rank())))


@on_ranks(3)
def test_several_roots() -> None:
    """A module that contains roots: theirs are full, its own stay as they are, as with FSDP1. A DistModule too."""
    pair = Pair()
    with summon_full_params(pair):
        assert not any(isinstance(parameter, DTensor) for parameter in pair.parameters())
        bump(pair)
    for each in (pair.left, pair.right):
        require_shards(each)
    require_equal(pair.left, bumped(seed=1))
    require_equal(pair.right, bumped(seed=2))
    assert pair.factor.item() == rank() + 1.0
    wrapped = rs.DistModule(ours())
    with summon_full_params(wrapped):
        bump(wrapped)
    require_equal(wrapped.module, bumped())


@on_ranks(3)
def test_parts_of_several_strategies(root: Path) -> None:
    """A block that is whole on every rank inside a root that is cut: trained, summoned and gathered as one process."""
    world_size = dist.get_world_size()
    whole = Sharding(replicate_size=world_size, wrap="none")
    for rank0_only in (False, True):
        module, expected = filled(), filled()
        for inner, sharding in ((module.blocks[0], whole), (module, Sharding(wrap="none"))):
            shard_module(inner, init_mesh(device_type(), sharding), sharding)
        for each in (module, expected):
            each(IDS).square().mean().backward()
        with summon_full_params(module, rank0_only=rank0_only, with_grads=True):
            if rank() == 0 or not rank0_only:
                for found, plain in zip(module.parameters(), expected.parameters(), strict=True):
                    assert torch.equal(found, plain)
                    torch.testing.assert_close(found.grad, plain.grad, rtol=1e-4, atol=1e-6)
                bump(module)
        bump(expected)
        require_equal(module, expected)
        with state_dict_type(module, StateDictType.FULL_STATE_DICT):
            state = module.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        held = rs.full_optim_state_dict(module, optimizer, rank0_only=False)["state"]
        torch.testing.assert_close(held["blocks.0.weight"]["momentum_buffer"], expected.blocks[0].weight.grad)


@on_ranks(full=(4,))
def test_exceptions() -> None:
    """Whatever raises in the body, on whichever ranks: changes until then are written, as FSDP1 does, and all go on."""
    for sharding, rank0_only in itertools.product(shardings(), (False, True)):
        module, oracle = ours(sharding), theirs(sharding)
        errors = (KeyError("zero"), ValueError("one"), KeyboardInterrupt())
        for raising in ({0}, {dist.get_world_size() - 1}, set(range(4))):
            options: Any = {"rank0_only": rank0_only, "with_grads": True}
            with _raised(errors[rank() % 3] if rank() in raising else None), summon_full_params(module, **options):
                if rank() == 0 or not rank0_only:
                    bump(module, 1.0)
                if rank() in raising:
                    raise errors[rank() % 3]
            require_shards(module)
        with _raised(errors[0]), summon_theirs(oracle):
            for _ in range(3):
                bump(oracle, 1.0)
            raise errors[0]
        expected = bumped()
        bump(expected)
        bump(expected)
        require_equal(module, expected)
        with summon_theirs(oracle, writeback=False):
            assert same(theirs_named(oracle)["narrow"], expected.narrow)


@contextmanager
def _raised(error: BaseException | None) -> Iterator[None]:
    """Swallow this very error."""
    try:
        yield
    except BaseException as found:
        if found is not error:
            raise


@on_ranks(3)
def test_what_the_body_does_to_parameters() -> None:
    """New data and new parameters are written back, where FSDP1 loses them; another shape is an error, here only."""
    module, oracle = ours(), theirs()
    with summon_full_params(module), summon_theirs(oracle):
        for each in (module, oracle.module):
            each.narrow = nn.Parameter(torch.full((2, 64), 7.0))
            each.large.data = torch.full((521, 520), 8.0)
            each.head.weight = nn.Parameter(torch.full((37, 64), 9.0))
    require_shards(module)
    with summon_full_params(module, writeback=False), summon_theirs(oracle, writeback=False):
        assert (module.narrow == 7.0).all()
        assert (module.large == 8.0).all()
        assert (module.embed.weight == 9.0).all()
        assert not (theirs_named(oracle)["large"] == 8.0).any()
    for rank0_only in (False, True):

        def reshape(rank0_only: bool = rank0_only) -> None:
            with summon_full_params(module, rank0_only=rank0_only):
                if rank() == 0:
                    module.narrow.data = torch.zeros(3, 3)
                    module.scale.data = torch.tensor(5.0)

        found = outcomes(reshape)
        assert "narrow" in found[0]
        assert "(2, 64)" in found[0]
        assert found[0].startswith("RuntimeError")
        assert all(("narrow" in text) == rank0_only for text in found[1:])
        require_shards(module)
    with summon_full_params(module, writeback=False):
        assert (module.narrow == 7.0).all()
        del module.narrow


@on_ranks(3)
def test_load_inside() -> None:
    """`load_state_dict` in the context fills the full parameters, as FSDP1's module does; FSDP2's hooks come back."""
    module, oracle = ours(), theirs()
    state = bumped().state_dict()
    with summon_full_params(module):
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    with summon_theirs(oracle):
        oracle.module.load_state_dict(state | {"scale": state["scale"].reshape(1)})
    require_equal(module, bumped())
    with summon_theirs(oracle, writeback=False):
        assert same(theirs_named(oracle)["large"], state["large"])
    # FSDP2 takes a new shard only in its hook.
    module.load_state_dict({"narrow": torch.zeros_like(module.narrow)}, strict=False, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(module(IDS).cpu(), _zeroed(bumped())(IDS))


def _zeroed(model: Odd) -> Odd:
    with torch.no_grad():
        model.narrow.zero_()
    return model


@on_ranks(1, 3, sim=(2,))
def test_refusals() -> None:
    """Forward, backward, unshard, to, gather and a second context raise on every rank; training goes on as before."""
    for rank0_only in (False, True):
        _check_refusals(ours(), filled(), rank0_only)
    oracle = theirs()
    with pytest.raises(AssertionError), summon_theirs(oracle), summon_theirs(oracle):
        pass


def _check_refusals(module: Any, reference: Odd, rank0_only: bool) -> None:
    loss = module(IDS).mean()

    def second() -> None:
        with summon_full_params(module):
            pass

    with summon_full_params(module, rank0_only=rank0_only):
        calls = [lambda: module(IDS), lambda: module.blocks[0](torch.zeros(1, 64)), module.unshard, module.double]
        calls += [lambda: loss.backward(retain_graph=True), lambda: list(rs.gather_state_dict(module)), second]
        for refused in calls:
            found = outcomes(refused)
            assert all(text.startswith("RuntimeError") and "summon_full_params" in text for text in found), found
    require_shards(module)
    with summon_full_params(module, rank0_only=rank0_only):  # FSDP2 is idle
        pass
    loss.backward()
    reference(IDS).mean().backward()
    torch.testing.assert_close(module.narrow.grad.full_tensor().cpu(), reference.narrow.grad, rtol=1e-4, atol=1e-6)
    assert module.float() is module


@on_ranks(3)
def test_inside_a_forward() -> None:
    """Neither in a forward nor in a backward; FSDP1 refuses it too."""
    module = ours()

    def summon(*args: Any) -> None:
        with summon_full_params(module):
            pass

    handle = module.blocks[1].register_forward_hook(summon)
    found = outcomes(lambda: module(IDS))
    handle.remove()
    assert all(text.startswith("RuntimeError") and "forward" in text for text in found), found
    assert all("reset_iter_state" in text for text in outcomes(summon))
    module.reset_iter_state()
    summon()
    output = module(IDS)
    output.register_hook(summon)
    assert all(text.startswith("RuntimeError") for text in outcomes(output.mean().backward))


@on_ranks(3)
def test_ranks_that_differ() -> None:
    """Other options, another module, no memory on one rank, parameters on meta: an error on every rank at once."""
    world_size = dist.get_world_size()
    module, last = ours(), rank() == dist.get_world_size() - 1

    def summon(target: nn.Module, **options: Any) -> None:
        with summon_full_params(target, **options):
            raise AssertionError("not entered")

    if world_size > 1:
        for fn in (lambda: summon(module, writeback=last), lambda: summon(module.blocks[0] if last else module.blocks)):
            found = outcomes(fn)
            assert all(text.startswith("PlanError") and "alike" in text for text in found), found
        # Beside the function of the same name, which hides it as an attribute.
        implementation: Any = import_module("raysharding.distributed.fsdp.summon_full_params")
        with pytest.MonkeyPatch.context() as changed:
            if last:
                changed.setattr(implementation, "_allocate", Mock(side_effect=MemoryError("no memory")))
            found = outcomes(lambda: summon(module))
        assert found[-1] == "MemoryError: no memory"
        assert all(f"on rank {world_size - 1}" in text for text in found[:-1]), found
    require_shards(module)
    with torch.device("meta"):
        empty = Odd()
    shard_module(empty, init_mesh(device_type()))
    assert all(text.startswith("ValueError") and "materialize" in text for text in outcomes(lambda: summon(empty)))


@on_ranks(1, 3, full=(2, 4), sim=(4,))
def test_replicas() -> None:
    """Ranks that write different values: a shard is its first holder's, so replicas and 0-dim parameters are alike."""
    for sharding in shardings():
        module = ours(sharding)
        with summon_full_params(module), torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float(rank()))
        shards = dist.get_world_size() // sharding.replicate_size
        # What the ranks hold, not what a gather shows, which takes each part from one of them.
        held = {name: sorted(set(local_tensor(p).flatten().tolist())) for name, p in module.named_parameters()}
        assert held["scale"] == [0.0]
        assert held["embed.weight"] == [float(rank() % shards)]
        assert held["narrow"] == ([float(rank() % shards)] if rank() % shards < 2 else [])


@on_ranks(3)
def test_after_a_part_of_a_group(root: Path) -> None:
    """FSDP2 takes a group to be in forward until all of it has run; the error says what ends that."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    reference = deepcopy(module)
    mesh = init_mesh(device_type())
    fully_shard([module[1], module[2]], mesh=mesh)
    fully_shard(module, mesh=mesh)
    module(torch.ones(4, 5))  # FSDP2 finds its root by the first forward
    with torch.no_grad():
        module[1](torch.ones(4, 5))

    def summon() -> None:
        with summon_full_params(module):
            for name, value in reference.state_dict().items():
                assert torch.equal(module.state_dict()[name], value), name

    assert all("RuntimeError" in text and "part of an FSDP group" in text for text in outcomes(summon))
    module.reset_iter_state()
    summon()
    assert torch.equal(module(torch.ones(4, 5)), reference(torch.ones(4, 5)))


@on_ranks(3)
def test_a_group_of_several_modules() -> None:
    """`fully_shard([a, b])`, an LSTM (which keeps a list of its parameters), a user's ignored parameter."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.LSTM(8, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    reference = deepcopy(module)
    mesh = init_mesh(device_type())
    ignored = module[1].bias
    fully_shard([module[1], module[2]], mesh=mesh, ignored_params={ignored})
    fully_shard(module, mesh=mesh, ignored_params={ignored})
    with summon_full_params(module):
        assert module[1].bias is ignored
        for each in (module, reference):
            bump(each)
        inputs = torch.ones(4, 2, 8)
        assert torch.equal(module[0](inputs)[0], reference[0](inputs)[0])
    with summon_full_params(module[1], recurse=False), torch.no_grad():
        assert isinstance(module[2].weight, DTensor)
        module[1].weight.zero_()
        reference[1].weight.zero_()
    require_equal(module, reference)
