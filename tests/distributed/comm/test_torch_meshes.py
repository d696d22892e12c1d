"""torch's own cases of meshes that have a part of the ranks, or two axes, and of modules on other ranks than the root.

They are those of torch's tests of FSDP, HSDP, `DeviceMesh` and distributed checkpoints that no other test shows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from raysharding import PlanError, Sharding
from raysharding import distributed as rs
from raysharding.distributed import init_mesh, shard_module
from tests.distributed.checks import on_ranks
from tests.distributed.comm.test_process_groups import accelerator_with

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LINEAR, ROOT = Sharding(wrap=["Linear"]), Sharding(wrap="none")
EXACT: Any = {"rtol": 0, "atol": 0}


def stack(width: int = 6, seed: int = 42) -> nn.Sequential:
    """Two blocks, parts 1 and 2, whose hidden width is odd, so that shards differ in size; and a part on each side."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width + 1), nn.ReLU(), nn.Linear(2 * width + 1, width))

    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(width), block(), block(), nn.Linear(width, width, bias=False))


def rows(width: int, number: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 + number))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None, width: int = 6) -> list[float]:
    """Make three steps on this rank's rows; returns the losses."""
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = module(rows(width, 100 * step + dist.get_rank(group))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict, which every rank of the mesh has."""
    with rs.state_dict_type(module, FULL):
        return dict(module.state_dict())


def moments(module: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    state = rs.full_optim_state_dict(module, optimizer, rank0_only=False, group=group)["state"]
    return {f"{name}.{key}": value for name, one in state.items() for key, value in one.items()}


def require_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def backward(modules: Sequence[nn.Module], batch: torch.Tensor) -> None:
    losses = [each(batch).square().mean() for each in modules]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()


def require_trains_as(reference: Any, module: nn.Module, group: Any = None) -> None:
    """Losses, and parameters after some steps, are those of DDP or FSDP1 over the same ranks."""
    torch.testing.assert_close(train(module, adam(module), group), train(reference, adam(reference), group))
    if isinstance(reference, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(reference):
            expected = {name: value.detach().clone() for name, value in reference.module.named_parameters()}
    else:
        expected = dict(reference.module.named_parameters())
    with rs.summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), expected)


def require_accumulation(mesh: DeviceMesh, group: Any, sharding: Sharding) -> None:
    """Steps of 3 backward passes, 2 of them in `no_sync`, equal those of DDP over the same ranks, and its norms."""
    modules: list[Any] = [shard_module(stack(), mesh, sharding), DistributedDataParallel(stack(), process_group=group)]
    module, reference = modules
    optimizers = [adam(each) for each in modules]
    for step in range(3):
        batches = [rows(6, 100 * step + 10 * number + dist.get_rank(group)) for number in range(3)]
        with rs.no_sync(module), reference.no_sync():
            for batch in batches[:2]:
                backward(modules, batch)
        backward(modules, batches[2])
        for norm_type in (1.0, 3.0, float("inf")):
            expected = nn.utils.get_total_norm([one.grad for one in reference.parameters()], norm_type)
            torch.testing.assert_close(rs.clip_grad_norm_(module, None, norm_type), expected)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(rs.clip_grad_norm_(module, 0.1), expected)
        require_same_gradients(module, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    torch.testing.assert_close(full(module), dict(reference.module.state_dict()))


def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """FSDP1's `process_group` for HSDP: this rank's (shard group, replicate group), of 4 ranks."""
    rank = dist.get_rank()
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return shard, replicate


def hsdp_mesh() -> DeviceMesh:
    """An HSDP mesh by other names than this library's."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


@on_ranks(full=(4,))
def test_training_on_an_axis_and_with_replicas() -> None:
    """As DDP, whatever is freed, recomputed or offloaded; with a replica alone, and by torch's all-reduce hook."""
    axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    group = axis.get_group()
    made = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    assert made.mesh.tolist() == axis.mesh.tolist() == init_mesh("cpu", group=group).mesh.tolist()
    for mesh in (axis, made, init_mesh("cpu", group=group)):
        require_accumulation(mesh, group, LINEAR)
    require_accumulation(init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard")), None, LINEAR)
    for reshard, recompute, offload in ((True, True, False), (False, False, True), (2, True, True), (2, False, False)):
        fields: Any = {"reshard_after_forward": reshard, "cpu_offload": offload, "activation_checkpointing": recompute}
        require_accumulation(hsdp_mesh(), None, Sharding(wrap=["Sequential"], **fields))
    shard, replicate = pairs()
    module: Any = shard_module(stack(), init_mesh("cpu", group=shard), ROOT)
    module.set_all_reduce_hook(lambda grad: dist.all_reduce(grad.div_(2), group=replicate))
    reference = DistributedDataParallel(stack())
    backward((module, reference), rows(6, dist.get_rank()))
    require_same_gradients(module, reference)


@on_ranks(full=(4,))
def test_pairs_of_groups() -> None:
    """They train as FSDP1 does with the pair, and over all ranks; `sync_module_states` gives rank 0's values."""
    shard, replicate = pairs()
    names = ("replicate", "shard")
    two = DeviceMesh.from_group([replicate, shard], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for mesh in (two, named, init_mesh("cpu", group=(shard, replicate))):
        require_trains_as(DistributedDataParallel(stack()), shard_module(stack(), mesh, LINEAR))
    for strategy in (fsdp.ShardingStrategy.HYBRID_SHARD, fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2):
        fields = Sharding.from_strategy(strategy, 4, 2, wrap=["Linear"])
        options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
        for mesh in (init_mesh("cpu", fields), init_mesh("cpu", group=(shard, replicate))):
            with_pair = options | {"process_group": (shard, replicate), "sharding_strategy": strategy}
            for given in (with_pair, options):
                reference = FullyShardedDataParallel(stack(), **given)
                require_trains_as(reference, shard_module(stack(), mesh, fields))
    module: nn.Module = stack()
    for parameter in module.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    shard_module(module, init_mesh("cpu", group=(shard, replicate)), Sharding(wrap=["Linear"], sync_module_states=True))
    assert all((value == 0).all() for value in full(module).values())


@on_ranks(full=(4,))
def test_blocks_with_replicas_inside_a_root_on_all_ranks() -> None:
    """HSDP blocks inside a root that is cut over all ranks train and clip as DDP."""
    mixed = stack()
    shard_module(mixed[1], init_mesh("cpu", group=pairs()), LINEAR)
    shard_module(mixed[2], init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard")), ROOT)
    shard_module(mixed, init_mesh("cpu"), ROOT)
    assert {parameter.device_mesh.ndim for parameter in mixed.parameters() if isinstance(parameter, DTensor)} == {1, 2}
    require_trains_as(DistributedDataParallel(stack()), mixed)
    reference = stack()
    reference.load_state_dict(full(mixed))
    mixed.zero_grad()
    plain = DistributedDataParallel(reference)
    backward((mixed, plain), rows(6, dist.get_rank()))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(rs.clip_grad_norm_(mixed, 0.1), expected)
    require_same_gradients(mixed, plain)


@on_ranks(full=(8,))
def test_axes_of_a_mesh_of_three(root: Path) -> None:
    """One, and an HSDP pair, train as DDP, and the pair's checkpoint loads."""
    one = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp"]
    require_accumulation(one, one.get_group(), LINEAR)
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    two = whole["dp_replicate", "dp_shard"]
    group = two._flatten().get_group()
    require_accumulation(two, group, LINEAR)
    module, again = shard_module(stack(), two, LINEAR), shard_module(stack(seed=1), two, LINEAR)
    optimizer, other = adam(module), adam(again)
    train(module, optimizer, group)
    folder = root / f"first-{two.mesh.flatten()[0].item()}"  # each of the two meshes saves its own
    rs.save_checkpoint(module, folder, optimizer=optimizer)
    rs.load_checkpoint(again, folder)
    rs.load_optimizer_state(again, other, folder)
    torch.testing.assert_close(full(again), full(module), **EXACT)
    torch.testing.assert_close(train(again, other, group), train(module, optimizer, group))


@on_ranks(full=(4,))
def test_a_torch_checkpoint_with_replicas_loads_on_other_meshes(root: Path) -> None:
    """Into HSDP, and into FSDP over all ranks and over half of them; the state itself is refused on another mesh."""
    half = dist.new_group([2, 3])
    for width in (4, 5):  # the 2 ranks of a replica divide the rows of one alone
        module = shard_module(stack(width), hsdp_mesh(), LINEAR)
        optimizer = adam(module)
        train(module, optimizer, width=width)
        values, state, folder = full(module), moments(module, optimizer), root / f"hsdp-{width}"
        with rs.state_dict_type(module, SHARDED):
            held = {"model": module.state_dict(), "optim": rs.sharded_optim_state_dict(module, optimizer)}
        dcp.save(held, checkpoint_id=folder)
        meshes: list[Any] = [(hsdp_mesh(), None), (init_mesh("cpu"), None)]
        if dist.get_rank() >= 2:
            meshes.append((init_mesh("cpu", group=half), half))
        for mesh, group in meshes:
            again = shard_module(stack(width, seed=1), mesh, LINEAR)
            other = adam(again)
            train(again, other, group, width)  # so that there is state to load into
            with rs.state_dict_type(again, SHARDED):
                if mesh.ndim == 1:
                    with pytest.raises(ValueError, match="another mesh"):
                        again.load_state_dict(held["model"])
                wanted = {"model": again.state_dict(), "optim": rs.sharded_optim_state_dict(again, other)}
                dcp.load(wanted, checkpoint_id=folder, process_group=group)
                again.load_state_dict(wanted["model"])
                other.load_state_dict(rs.optim_state_dict_to_load(again, other, wanted["optim"], group=group))
            torch.testing.assert_close(full(again), values, **EXACT)
            torch.testing.assert_close(moments(again, other, group), state, **EXACT)
        # Sharded state is a copy: it stays as it was when the optimizer goes on.
        before = {name: one["exp_avg"].to_local().clone() for name, one in held["optim"]["state"].items()}
        train(module, optimizer, width=width)
        after = {name: one["exp_avg"].to_local() for name, one in held["optim"]["state"].items()}
        torch.testing.assert_close(after, before, **EXACT)


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, one in state["state"].items() for key, value in one.items()}


@torch.no_grad()
def local_values(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of tensors, in copies."""
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in values.items()}
    return {name: value.clone() for name, value in local.items()}


@on_ranks(full=(4,))
def test_sharded_states_with_replicas(root: Path) -> None:
    """They are on the user's mesh, and come back through `torch.save` and in another model."""

    def states() -> dict[str, torch.Tensor]:
        return local_values(module.state_dict() | values_of(rs.optim_state_dict(module, optimizer)))

    for mesh, offload in itertools.product((hsdp_mesh(), init_mesh("cpu", group=pairs())), (True, False)):
        module, again = shard_module(stack(8), mesh, LINEAR), shard_module(stack(8, seed=1), mesh, LINEAR)
        optimizer, other = adam(module), adam(again)
        train(module, optimizer, width=8)
        kinds = (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig)
        configs: list[Any] = [kind(offload_to_cpu=offload) for kind in kinds]
        for each in (module, again):
            rs.set_state_dict_type(each, SHARDED, *configs)
        state, held = rs.optim_state_dict(module, optimizer), module.state_dict()
        for value in (*held.values(), *(one["exp_avg"] for one in state["state"].values())):
            assert value.placements == (Replicate(), Shard(0))
            assert value.device_mesh == mesh
        file = root / f"{mesh.mesh_dim_names}-{offload}-{dist.get_rank()}"
        torch.save({"model": held, "optimizer": state}, file)
        saved = states()
        train(module, optimizer, width=8)
        loaded = torch.load(file, weights_only=False)
        module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(rs.optim_state_dict_to_load(module, optimizer, loaded["optimizer"]))
        torch.testing.assert_close(states(), saved, **EXACT)
        loaded = torch.load(file, weights_only=False)
        again.load_state_dict(loaded["model"])
        other.load_state_dict(rs.optim_state_dict_to_load(again, other, loaded["optimizer"]))
        torch.testing.assert_close(train(again, other, width=8), train(module, optimizer, width=8))
        torch.testing.assert_close(full(again), full(module))


@on_ranks(full=(4,))
def test_offloaded_states_of_an_optimizer_on_cpus_are_copies() -> None:
    """They stay as they were when the optimizer goes on, as FSDP1's."""
    module = shard_module(stack(), init_mesh("cpu"), LINEAR)
    optimizer = adam(module)
    train(module, optimizer)
    offloaded = fsdp.ShardedStateDictConfig(offload_to_cpu=True), fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)
    with rs.state_dict_type(module, SHARDED, *offloaded):
        by_type = rs.optim_state_dict(module, optimizer)
    for state in (by_type, rs.sharded_optim_state_dict(module, optimizer)):
        before = local_values(values_of(state))
        train(module, optimizer)
        torch.testing.assert_close(local_values(values_of(state)), before, **EXACT)


@on_ranks(full=(4,))
def test_models_of_one_rank_each(root: Path) -> None:
    """Each rank has a model of its own, on a group of itself: state dicts, steps and files ask nobody else."""
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(4)][rank]
    mesh = init_mesh("cpu", group=own)
    module = shard_module(stack(seed=rank), mesh, LINEAR)
    for kind in (SHARDED, FULL, StateDictType.LOCAL_STATE_DICT):
        with rs.state_dict_type(module, kind):
            held = {name: value.clone() for name, value in module.state_dict().items()}
            for parameter in module.parameters():
                parameter.detach().zero_()
            module.load_state_dict(held)
        torch.testing.assert_close(full(module), dict(stack(seed=rank).state_dict()), **EXACT)
    for number in range(rank):  # the ranks do so at different times, and not equally often
        optimizer = adam(module)
        train(module, optimizer, own)
        folder = root / f"alone-{rank}-{number}"
        rs.save_checkpoint(module, folder, optimizer=optimizer)
        again = shard_module(stack(), mesh, ROOT)
        rs.load_checkpoint(again, folder)
        rs.load_optimizer_state(again, adam(again), folder)
        torch.testing.assert_close(full(again), full(module), **EXACT)


@on_ranks(full=(4,))
def test_local_states_of_four_ranks_on_two() -> None:
    """LOCAL_STATE_DICT of 4 ranks is refused on 2, as in torch; cut anew by hand it loads."""
    half = dist.new_group([0, 1])
    module = shard_module(stack(4), init_mesh("cpu"), LINEAR)
    train(module, adam(module), width=4)
    with rs.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        held = module.state_dict()
    whole = {name: value.full_tensor() for name, value in held.items()}
    if dist.get_rank() > 1:
        return
    two = shard_module(stack(4, seed=1), init_mesh("cpu", group=half), LINEAR)
    with rs.state_dict_type(two, StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(ValueError, match="another mesh"):
            two.load_state_dict(held)
        own = two.state_dict()
        for name, value in own.items():
            value.to_local().copy_(torch.chunk(whole[name], 2)[dist.get_rank()])
        two.load_state_dict(own)
    torch.testing.assert_close(full(two), whole, **EXACT)


@on_ranks(full=(4,))
def test_a_full_state_dict_of_the_first_rank_reaches_the_others() -> None:
    """The first of the mesh; torch's function needs rank 0."""
    half = dist.new_group([1, 3])
    module = shard_module(stack(seed=1), hsdp_mesh(), LINEAR)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    expected = dict(stack(seed=4).state_dict())
    dcp_state.set_model_state_dict(module, dict(expected) if dist.get_rank() == 0 else {}, options=options)
    torch.testing.assert_close(full(module), expected, **EXACT)
    modules: list[Any] = [(module, None)]
    if dist.get_rank(half) >= 0:
        modules.append((shard_module(stack(seed=1), init_mesh("cpu", group=half), LINEAR), half))
    for each, group in modules:
        expected = dict(stack(seed=3).state_dict())
        rs.load_full_state_dict(each, expected if dist.get_rank(group) == 0 else {})
        torch.testing.assert_close(full(each), expected, **EXACT)


def tied_stack(width: int = 6, seed: int = 42) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(width, width, bias=False), *stack(width, seed))
    module[0].weight = module[4].weight
    return module


def full_forms(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Full optimizer state on every rank and on rank 0 alone, by the function of each and by `optim_state_dict`."""
    forms = [rs.full_optim_state_dict(module, optimizer, rank0_only=False), rs.full_optim_state_dict(module, optimizer)]
    for config in (fsdp.FullOptimStateDictConfig(), fsdp.FullOptimStateDictConfig(rank0_only=True)):
        with rs.state_dict_type(module, FULL, fsdp.FullStateDictConfig(), config):
            forms.append(rs.optim_state_dict(module, optimizer))
    return forms


@on_ranks(full=(4,))
def test_full_optimizer_state_of_all_ranks_loads_into_half() -> None:
    """By each function, into every second rank and other FSDP groups, from parameters in another order."""
    half = dist.new_group([0, 2])
    for build, several in itertools.product((stack, tied_stack), (False, True)):

        def grouped(parameters: list[nn.Parameter], several: bool = several) -> torch.optim.Optimizer:
            groups: Any = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.9}]
            return torch.optim.Adam(groups if several else parameters, lr=1e-2)

        module = shard_module(build(), init_mesh("cpu"), LINEAR)
        optimizer = grouped(list(module.parameters()))
        train(module, optimizer)
        forms, values, expected = full_forms(module, optimizer), full(module), moments(module, optimizer)
        if dist.get_rank() % 2 == 0:
            again = shard_module(build(seed=5), init_mesh("cpu", group=half), ROOT)
            rs.load_full_state_dict(again, values if dist.get_rank(half) == 0 else {})
            load_into(again, half, forms, expected, grouped)


def load_into(again: nn.Module, half: Any, forms: list[dict[str, Any]], expected: dict[str, Any], grouped: Any) -> None:
    everywhere, on_first, by_type, by_rank_0 = forms
    first, parameters = dist.get_rank(half) == 0, list(again.parameters())
    has_groups = len(everywhere["param_groups"]) > 1  # groups of other parameters are a mistake
    for same_order in (True,) if has_groups else (True, False):
        other = grouped(parameters if same_order or first else parameters[::-1])
        for given in ({"optim": other}, {"optim_input": other.param_groups}):
            options: Any = given
            results = [
                rs.shard_full_optim_state_dict(everywhere, again, **options),
                rs.scatter_full_optim_state_dict(on_first if first else None, again, group=half, **options),
            ]
            for config, form in (
                (fsdp.FullOptimStateDictConfig(), by_type),
                (fsdp.FullOptimStateDictConfig(rank0_only=True), by_rank_0),
            ):
                with rs.state_dict_type(again, FULL, fsdp.FullStateDictConfig(), config):
                    results.append(rs.optim_state_dict_to_load(again, other, form, group=half))
            for result in results:
                assert all(held["exp_avg"].device_mesh.mesh.tolist() == [0, 2] for held in result["state"].values())
                other.load_state_dict(result)
                for name, parameter in again.named_parameters():
                    moment = other.state[parameter]["exp_avg"].full_tensor()
                    torch.testing.assert_close(moment, expected[f"{name}.exp_avg"], **EXACT)
                if same_order:
                    found = rs.full_optim_state_dict(again, other, rank0_only=False, group=half)
                    torch.testing.assert_close(values_of(found), expected, **EXACT)
                    assert found["param_groups"] == everywhere["param_groups"]
                    by_id = rs.rekey_optim_state_dict(found, fsdp.OptimStateKeyType.PARAM_ID, again, optim=other)
                    assert set(by_id["state"]) == set(other.state_dict()["state"])
    train(again, grouped(parameters), half)


@on_ranks(full=(4,))
def test_torchs_functions_of_state_dicts() -> None:
    """They go from model to model, on HSDP and on a part of the ranks."""
    half = dist.new_group([1, 3])
    meshes: list[Any] = [(hsdp_mesh(), None)]
    if dist.get_rank(half) >= 0:
        meshes.append((init_mesh("cpu", group=half), half))
    for mesh, group in meshes:
        module, again = shard_module(stack(), mesh, LINEAR), shard_module(stack(seed=1), mesh, LINEAR)
        optimizer, other = adam(module), adam(again)
        train(module, optimizer, group)
        dcp_state.set_model_state_dict(again, dcp_state.get_model_state_dict(module))
        dcp_state.set_optimizer_state_dict(
            again, other, copy.deepcopy(dcp_state.get_optimizer_state_dict(module, optimizer))
        )
        torch.testing.assert_close(train(again, other, group), train(module, optimizer, group))


@on_ranks(full=(4,))
def test_meshes_of_accelerates_parallelism_config() -> None:
    """`fsdp2_prepare_model` takes the data parallel axes of each."""
    from accelerate.parallelism_config import ParallelismConfig  # slow to import, in every rank of every test

    for sizes, num_ranks in (
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
        ({"dp_shard_size": 2, "tp_size": 2}, 2),
        ({"dp_shard_size": 2, "cp_size": 2}, 4),  # a flattened axis: parameters are cut over cp, too
        ({"dp_shard_size": 4}, 4),
    ):
        config = ParallelismConfig(**sizes)
        whole = config.build_device_mesh("cpu")
        group = None if num_ranks == 4 else whole[tuple(config.fsdp_dim_names)].get_group()
        for efficient in (True, False):
            accelerator = accelerator_with(efficient, torch_device_mesh=whole, parallelism_config=config)
            has_values = not efficient or dist.get_rank(group) == 0
            module = rs.fsdp2_prepare_model(accelerator, stack(seed=42 if has_values else 9))
            held: Any = list(module.parameters())
            assert {parameter.device_mesh.size() for parameter in held} == {num_ranks}
            torch.testing.assert_close(full(module), dict(stack().state_dict()), **EXACT)
            require_trains_as(DistributedDataParallel(stack(), process_group=group), module, group)


# --- modules on other ranks than the root -----------------------------------------------------------------------------


class Experts(nn.Module):
    """An expert of each rank's own between layers of all ranks, as torch's `MixtureOfExperts`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(8, 12), nn.Linear(12, 23), nn.Linear(12, 8)
        torch.manual_seed(42 + dist.get_rank())
        self.expert = nn.Linear(23, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.shared(self.first(x))))


def backward_of_experts(modules: Sequence[nn.Module], step: int) -> None:
    """Make a backward on both; the reference's shared gradients are averaged here."""
    backward(modules, rows(8, 10 * step + dist.get_rank()))
    for name, parameter in modules[1].named_parameters():
        if "expert" not in name and parameter.grad is not None:
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def norm_of(shared: list[nn.Parameter], own: list[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of gradients that all ranks share, and of those that each rank has for itself."""
    powers = [
        torch.stack([p.grad.abs().pow(norm_type).sum() for p in part if p.grad is not None]) for part in (shared, own)
    ]
    dist.all_reduce(powers[1])
    return (powers[0].sum() + powers[1].sum()).pow(1 / norm_type)


def require_norms(module: nn.Module, reference: Experts) -> None:
    """The expert of each rank counts once, and a shared gradient once."""
    shared = [parameter for name, parameter in reference.named_parameters() if "expert" not in name]
    for norm_type in (2.0, 1.0, 3.0):
        expected = norm_of(shared, list(reference.expert.parameters()), norm_type)
        torch.testing.assert_close(rs.clip_grad_norm_(module, None, norm_type), expected)


@on_ranks(full=(4,))
def test_experts_of_each_rank(root: Path) -> None:
    """On groups of one rank they keep to it in training, norms and sharded states; full states are refused."""
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    module, reference = Experts(), Experts()
    shard_module(module.expert, init_mesh("cpu", group=own), ROOT)
    for part in (module.shared, module):
        shard_module(part, init_mesh("cpu"), ROOT)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (module, reference)]
    for step in range(4):
        backward_of_experts((module, reference), step)
        require_norms(module, reference)
        require_same_gradients(module, reference)
        norm = rs.clip_grad_norm_(module, 0.1)
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1 / (norm + 1e-6))
        require_same_gradients(module, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with rs.state_dict_type(module, SHARDED):
            held = copy.deepcopy((module.state_dict(), rs.optim_state_dict(module, optimizers[0])))
            for parameter in module.parameters():
                parameter.detach().zero_()
                optimizers[0].state[parameter]["momentum_buffer"].zero_()
            module.load_state_dict(held[0])
            optimizers[0].load_state_dict(rs.optim_state_dict_to_load(module, optimizers[0], held[1]))
    on_other_ranks = rf"expert.weight.*its mesh holds the ranks \(\({rank},\),\), and the process group \[0, 1, 2, 3\]"
    on_other_meshes = r"parameters \['expert.weight', 'first.weight'\] lie on different meshes"
    for call, message in (
        (lambda: full(module), on_other_ranks),
        (rs.summon_full_params(module).__enter__, on_other_ranks),
        (lambda: list(rs.gather_state_dict(module)), on_other_ranks),
        (lambda: rs.full_optim_state_dict(module, optimizers[0]), on_other_ranks),
        (lambda: rs.save_checkpoint(module, root / "experts"), on_other_meshes),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not (root / "experts").exists()
    backward_of_experts((module, reference), 5)
    require_same_gradients(module, reference)


@on_ranks(full=(4,))
def test_ignored_experts_of_each_rank() -> None:
    """Not averaged, they train alike; full parameters and optimizer state have each rank's own."""
    module, reference = Experts(), Experts()
    fields: Any = {"ignored_modules": ["expert"], "average_ignored_gradients": False}
    shard_module(module, init_mesh("cpu"), Sharding(wrap="none", **fields))
    torch.testing.assert_close(full(module), dict(reference.state_dict()), **EXACT)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (module, reference)]
    for step in range(4):
        backward_of_experts((module, reference), step)
        require_norms(module, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with rs.summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), dict(reference.named_parameters()))
    whole = rs.full_optim_state_dict(module, optimizers[0], rank0_only=False)["state"]
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole[name]["momentum_buffer"], optimizers[1].state[parameter]["momentum_buffer"])


class Layers(nn.Module):
    """Two layers, of which a rank has one, as in torch's test of expert parallelism with FSDP."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({f"{index}": nn.Linear(6, 6)})
        self.net = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layers.values()
        return self.net(layer(x))


def require_averages(module: nn.Module, reference: nn.Module, groups: dict[str, Any]) -> None:
    """Gradients are the reference's, averaged over the group of each part."""
    backward((module, reference), rows(6, dist.get_rank()))
    for name, group in groups.items():
        for parameter in reference.get_submodule(name).parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)
    require_same_gradients(module, reference)


@on_ranks(full=(4,))
def test_layers_of_some_ranks() -> None:
    """They are in torch's states on their mesh; the optimizer's by name are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["dp"]
    index = dist.get_rank() % 2
    module, reference = Layers(index), Layers(index)
    shard_module(module.layers[f"{index}"], mesh, ROOT)
    shard_module(module, init_mesh("cpu"), ROOT)
    optimizer = adam(module)
    states: Any = dcp_state.get_state_dict(module, optimizer)
    values, state = states
    for name, ranks in (("net.weight", [0, 1, 2, 3]), (f"layers.{index}.bias", [index, index + 2])):
        assert values[name].device_mesh.mesh.tolist() == ranks
        assert state["state"][name]["exp_avg"].device_mesh.mesh.tolist() == ranks
    assert set(state["state"]) == set(values) == set(reference.state_dict())
    with rs.state_dict_type(module, SHARDED):
        module.load_state_dict(module.state_dict())
    with pytest.raises(PlanError, match=r"the optimizers of ranks 1, 3 hold other param groups or state than rank 0's"):
        rs.sharded_optim_state_dict(module, optimizer)
    module.zero_grad()
    require_averages(module, reference, {"net": None, f"layers.{index}": mesh.get_group()})


@on_ranks(full=(4,))
def test_blocks_on_two_axes() -> None:
    """Inside a root on all ranks they average over their own axis; the norm counts each copy once."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    module, reference = stack(), stack()
    shard_module(module[1], whole["dp"], ROOT)
    shard_module(module[2], whole["other"], ROOT)
    shard_module(module, init_mesh("cpu"), ROOT)
    groups = {"0": None, "1": whole.get_group("dp"), "2": whole.get_group("other"), "3": None}
    require_averages(module, reference, groups)
    own = [*reference[1].parameters(), *reference[2].parameters()]
    for parameter in own:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5**0.5)  # both ranks of an axis have it: half of its square from each
    expected = norm_of([*reference[0].parameters(), *reference[3].parameters()], own)
    torch.testing.assert_close(rs.clip_grad_norm_(module, None), expected)


@on_ranks(full=(4,))
def test_refused_groups_and_meshes() -> None:
    """Groups that make no mesh, and meshes that FSDP2 does not take; a list of two is as good as a tuple."""
    shard, replicate = pairs()
    groups: Any
    for groups in ((), (shard,), (shard, shard), [replicate, replicate], (shard, replicate, shard), (shard, None)):
        with pytest.raises(ValueError, match=r"group=.*: give one process group, or \(shard group, replicate"):
            init_mesh("cpu", group=groups)
    groups = [shard, replicate]
    assert init_mesh("cpu", group=groups).mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="replicate_size=4, but the replicate group has 2 ranks"):
        init_mesh("cpu", Sharding(replicate_size=4), (shard, replicate))
    with pytest.raises(ValueError, match="replicate_size=3 does not divide world_size=4"):
        init_mesh("cpu", Sharding(replicate_size=3))
    with pytest.raises(ValueError, match="HYBRID_SHARD needs the number of ranks on each node"):
        Sharding.from_strategy(fsdp.ShardingStrategy.HYBRID_SHARD, 4)
    with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh"):
        shard_module(stack(), init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("a", "b", "c")))
    with pytest.raises(AssertionError, match="with mesh_dim_names specified"):  # torch's own error
        shard_module(stack(), init_device_mesh("cpu", (2, 2)))


@on_ranks(full=(4,))
def test_with_tensor_parallelism() -> None:
    """On another axis: a backward is that of DDP; the norm is refused and clips nothing."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = whole.get_group("dp")
    modules: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))
    module, reference = modules[0], DistributedDataParallel(modules[1], process_group=group)
    parallelize_module(module, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_module(module, whole["dp"], ROOT)
    backward((module, reference), rows(6, dist.get_rank(group)))  # the ranks of a tp group must have the same rows
    ranks = rf"\[{dist.get_rank() % 2}, {dist.get_rank() % 2 + 2}\]"
    message = rf"a gradient is on the ranks \[0, 1, 2, 3\], and the module's mesh has {ranks}: clip models on several"
    for max_norm in (None, 1e-3):
        with pytest.raises(ValueError, match=message):
            rs.clip_grad_norm_(module, max_norm)
    require_same_gradients(module, reference)
