"""torch's own cases of one mesh that has a part of the ranks, or two axes, through this library's names.

The cases are those of torch's tests of FSDP, HSDP, `DeviceMesh` and distributed checkpoints, by kind.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from raysharding import Sharding
from raysharding.distributed import (
    FullyShardedDataParallelPlugin,
    clip_grad_norm_,
    fsdp2_prepare_model,
    full_optim_state_dict,
    init_mesh,
    load_checkpoint,
    load_full_state_dict,
    load_optimizer_state,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    save_checkpoint,
    scatter_full_optim_state_dict,
    set_state_dict_type,
    shard_full_optim_state_dict,
    shard_module,
    sharded_optim_state_dict,
    state_dict_type,
)
from tests.distributed.comm.torch_mesh_kinds import (
    LINEAR,
    ON_RANK_0,
    ROOT,
    adam,
    assert_accumulates,
    assert_full_equals,
    assert_same_gradients,
    assert_trains_as,
    ddp,
    fsdp1,
    full,
    full_forms,
    grouped_adam,
    inputs_of,
    local_values,
    optimizer_values,
    pairs,
    rows,
    run_kinds,
    stack,
    tied_stack,
    train,
)
from tests.spawn import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def hsdp_mesh() -> DeviceMesh:
    """An HSDP mesh by other names than this library's."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def from_group(root: Path) -> None:
    """Meshes of `DeviceMesh.from_group`, of one group or of two, train as those of `init_device_mesh` and as DDP."""
    axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    group = axis.get_group()
    made = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    assert made.mesh.tolist() == axis.mesh.tolist() == init_mesh("cpu", group=group).mesh.tolist()
    for mesh in (axis, made, init_mesh("cpu", group=group)):
        assert_trains_as(ddp(stack(8), group), shard_module(stack(8), mesh, LINEAR), group, 8)
    shard, replicate = pairs()
    names = ("replicate", "shard")
    two = DeviceMesh.from_group([replicate, shard], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for mesh in (two, named, init_mesh("cpu", group=(shard, replicate))):
        assert_trains_as(ddp(stack(8)), shard_module(stack(8), mesh, LINEAR), None, 8)


def pair_of_groups(root: Path) -> None:
    """FSDP1's pair of groups trains as FSDP1 does with the pair, and as FSDP1 over all ranks."""
    shard, replicate = pairs()
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        fields = Sharding.from_strategy(strategy, 4, 2, wrap=["Linear"])
        for mesh in (init_mesh("cpu", fields), init_mesh("cpu", group=(shard, replicate))):
            reference = fsdp1(stack(6), (shard, replicate), sharding_strategy=strategy)
            assert_trains_as(reference, shard_module(stack(6), mesh, fields), None, 6)
            assert_trains_as(fsdp1(stack(6)), shard_module(stack(6), mesh, fields), None, 6)


def pair_states(root: Path) -> None:
    """On a pair of groups `sync_module_states` gives rank 0's values, and sharded states go into another model."""
    mesh = init_mesh("cpu", group=pairs())
    module: nn.Module = stack(6)
    for parameter in module.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    shard_module(module, mesh, Sharding(wrap=["Linear"], sync_module_states=True))
    assert all((value == 0).all() for value in full(module).values())

    module = shard_module(stack(6), mesh, LINEAR)
    optimizer = adam(module)
    train(module, optimizer, inputs_of(None, 6))
    with state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        held, state = copy.deepcopy((module.state_dict(), optim_state_dict(module, optimizer)))
    again = shard_module(stack(6, seed=1), mesh, LINEAR)
    other = adam(again)
    with state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
        again.load_state_dict(held)
        other.load_state_dict(optim_state_dict_to_load(again, other, state))
    last = inputs_of(None, 6)
    torch.testing.assert_close(train(again, other, last), train(module, optimizer, last))
    torch.testing.assert_close(full(again), full(module))


def hybrid_setup(root: Path) -> None:
    """HSDP with one replica, and HSDP blocks inside a root cut over all ranks, train and clip as DDP."""
    single = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    assert_trains_as(ddp(stack(6)), shard_module(stack(6), single, LINEAR), None, 6)
    mixed = stack(6)
    shard_module(mixed[1], init_mesh("cpu", group=pairs()), LINEAR)
    shard_module(mixed[2], single, ROOT)
    shard_module(mixed, init_mesh("cpu"), ROOT)
    assert {parameter.device_mesh.ndim for parameter in mixed.parameters() if isinstance(parameter, DTensor)} == {1, 2}
    assert_trains_as(ddp(stack(6)), mixed, None, 6)

    reference = stack(6)
    reference.load_state_dict(full(mixed))
    mixed.zero_grad()
    for module in (mixed, plain := ddp(reference)):
        module(rows(6, dist.get_rank())).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(mixed, 0.1), expected)
    assert_same_gradients(mixed, plain)


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return local_values(module.state_dict() | optimizer_values(optim_state_dict(module, optimizer)))


def hsdp_states(root: Path) -> None:
    """Sharded states of HSDP are DTensors on the user's mesh, and come back through `torch.save`, offloaded or not."""
    mesh = hsdp_mesh()
    for offload in (True, False):
        module = shard_module(stack(8), mesh, LINEAR)
        optimizer = adam(module)
        train(module, optimizer, inputs_of(None, 8))
        configs = ShardedStateDictConfig(offload_to_cpu=offload), ShardedOptimStateDictConfig(offload_to_cpu=offload)
        set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *configs)
        state, held = optim_state_dict(module, optimizer), module.state_dict()
        for value in (*held.values(), *(one["exp_avg"] for one in state["state"].values())):
            assert value.placements == (Replicate(), Shard(0))
            assert value.device_mesh == mesh
        file = root / f"rank-{offload}-{dist.get_rank()}"
        torch.save({"model": held, "optimizer": state}, file)
        saved = states(module, optimizer)
        train(module, optimizer, inputs_of(None, 8))
        loaded = torch.load(file, weights_only=False)
        module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(optim_state_dict_to_load(module, optimizer, loaded["optimizer"]))
        torch.testing.assert_close(states(module, optimizer), saved, rtol=0, atol=0)


def hsdp_checkpoints(root: Path) -> None:
    """A torch.distributed.checkpoint of HSDP loads into HSDP, and into FSDP over all ranks and over half of them."""
    half = dist.new_group([2, 3])
    hsdp = hsdp_mesh()
    for width in (4, 5):  # the 2 ranks of a replica divide the rows of one alone
        module = shard_module(stack(width), hsdp, LINEAR)
        optimizer = adam(module)
        train(module, optimizer, inputs_of(None, width))
        values, folder = full(module), root / f"{width}"
        moments = optimizer_values(full_optim_state_dict(module, optimizer, rank0_only=False))
        with state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            held = {"model": module.state_dict(), "optim": sharded_optim_state_dict(module, optimizer)}
            dcp.save(held, checkpoint_id=folder)
        meshes = [(hsdp, None), (init_mesh("cpu"), None)]
        if dist.get_rank() >= 2:
            meshes.append((init_mesh("cpu", group=half), half))
        for mesh, group in meshes:
            again = shard_module(stack(width, seed=1), mesh, LINEAR)
            other = adam(again)
            train(again, other, inputs_of(group, width, 1))  # so that there is state to load into
            with state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
                wanted = {"model": again.state_dict(), "optim": sharded_optim_state_dict(again, other)}
                dcp.load(wanted, checkpoint_id=folder, process_group=group)
                again.load_state_dict(wanted["model"])
                other.load_state_dict(optim_state_dict_to_load(again, other, wanted["optim"], group=group))
            torch.testing.assert_close(full(again), values, rtol=0, atol=0)
            found = optimizer_values(full_optim_state_dict(again, other, rank0_only=False, group=group))
            torch.testing.assert_close(found, moments, rtol=0, atol=0)


def half_the_world(root: Path) -> None:
    """Full optimizer state of all ranks loads, by each function, into every second rank and other FSDP groups."""
    half = dist.new_group([0, 2])
    for several, use_input, build in itertools.product((False, True), (False, True), (stack, tied_stack)):
        module = shard_module(build(6), init_mesh("cpu"), LINEAR)
        optimizer = grouped_adam(module, several=several)
        train(module, optimizer, inputs_of(None, 6))
        forms, values = full_forms(module, optimizer), full(module)
        if dist.get_rank() % 2 == 0:
            load_into(build(6, seed=5), half, forms, values, several=several, use_input=use_input)


def load_into(
    model: nn.Module, group: Any, forms: list[dict[str, Any]], values: Any, *, several: bool, use_input: bool
) -> None:
    everywhere, on_first, by_type, by_rank_0 = forms
    first = dist.get_rank(group) == 0
    module = shard_module(model, init_mesh("cpu", group=group), ROOT)
    optimizer = grouped_adam(module, several=several)
    train(module, optimizer, inputs_of(group, 6, 1))
    load_full_state_dict(module, values if first else {})
    given: Any = {"optim_input": optimizer.param_groups} if use_input else {"optim": optimizer}
    results = [
        shard_full_optim_state_dict(everywhere, module, **given),
        scatter_full_optim_state_dict(on_first if first else None, module, group=group, **given),
    ]
    with state_dict_type(module, StateDictType.FULL_STATE_DICT):
        results.append(optim_state_dict_to_load(module, optimizer, by_type, group=group))
    with state_dict_type(module, *ON_RANK_0):
        results.append(optim_state_dict_to_load(module, optimizer, by_rank_0, group=group))
    for result in results:
        assert all(held["exp_avg"].device_mesh.mesh.tolist() == [0, 2] for held in result["state"].values())
        optimizer.load_state_dict(result)
        found = full_optim_state_dict(module, optimizer, rank0_only=False, group=group)
        torch.testing.assert_close(optimizer_values(found), optimizer_values(everywhere), rtol=0, atol=0)
        assert found["param_groups"] == everywhere["param_groups"]
        by_id = rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, module, optim=optimizer)
        assert set(by_id["state"]) == set(optimizer.state_dict()["state"])
    train(module, optimizer, inputs_of(group, 6, 1))


def other_order(root: Path) -> None:
    """Optimizer state loads by name where a rank of the half gave its optimizer the parameters in another order."""
    half = dist.new_group([0, 2])
    module = shard_module(stack(6), init_mesh("cpu"), LINEAR)
    optimizer = adam(module)
    train(module, optimizer, inputs_of(None, 6, 1))
    everywhere = full_optim_state_dict(module, optimizer, rank0_only=False)
    if dist.get_rank() % 2:
        return
    two = shard_module(stack(6), init_mesh("cpu", group=half), ROOT)
    parameters = list(two.parameters())
    other = torch.optim.Adam(parameters[::-1] if dist.get_rank() else parameters, lr=1e-2)
    set_state_dict_type(two, StateDictType.FULL_STATE_DICT)
    results = [
        shard_full_optim_state_dict(everywhere, two, optim=other),
        scatter_full_optim_state_dict(everywhere if dist.get_rank() == 0 else None, two, optim=other),
        optim_state_dict_to_load(two, other, everywhere),
    ]
    for result in results:
        other.load_state_dict(result)
        for name, parameter in two.named_parameters():
            assert_full_equals(other.state[parameter]["exp_avg"], everywhere["state"][name]["exp_avg"])


def one_rank_groups(root: Path) -> None:
    """A model on a group of one rank, each rank with its own: state dicts, steps and files ask nobody else."""
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(4)][rank]
    mesh = init_mesh("cpu", group=own)
    module = shard_module(stack(6, seed=rank), mesh, LINEAR)
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with state_dict_type(module, kind):
            held = {name: value.clone() for name, value in module.state_dict().items()}
            for parameter in module.parameters():
                parameter.detach().zero_()
            module.load_state_dict(held)
        torch.testing.assert_close(full(module), dict(stack(6, seed=rank).state_dict()), rtol=0, atol=0)
    for number in range(rank):  # another number of times on each rank: a collective of all would hang
        optimizer = adam(module)
        train(module, optimizer, inputs_of(own, 6, 1))
        folder = root / f"{rank}-{number}"
        save_checkpoint(module, folder, optimizer=optimizer)
        again = shard_module(stack(6), mesh, ROOT)
        load_checkpoint(again, folder)
        load_optimizer_state(again, adam(again), folder)
        torch.testing.assert_close(full(again), full(module), rtol=0, atol=0)


def local_states(root: Path) -> None:
    """LOCAL_STATE_DICT of 4 ranks is refused on 2, as in torch; cut anew by hand it loads."""
    half = dist.new_group([0, 1])
    module = shard_module(stack(4), init_mesh("cpu"), LINEAR)
    train(module, adam(module), inputs_of(None, 4, 1))
    with state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        held = module.state_dict()
    whole = {name: value.full_tensor() for name, value in held.items()}
    if dist.get_rank() > 1:
        return
    two = shard_module(stack(4, seed=1), init_mesh("cpu", group=half), LINEAR)
    with state_dict_type(two, StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(ValueError, match="another mesh"):
            two.load_state_dict(held)
        own = two.state_dict()
        for name, value in own.items():
            value.to_local().copy_(torch.chunk(whole[name], 2)[dist.get_rank()])
        two.load_state_dict(own)
    torch.testing.assert_close(full(two), whole, rtol=0, atol=0)


def axis_training(root: Path) -> None:
    """On one axis of a mesh gradients, every norm, clipping and `no_sync` are those of DDP over the axis' group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    group = mesh.get_group()
    for norm in (2.0, 1.0, 3.0, float("inf")):
        module, reference = shard_module(stack(6), mesh, LINEAR), ddp(stack(6), group)
        for step in range(3):
            for each in (module, reference):
                each.zero_grad()
                (100 * each(rows(6, 10 * step + dist.get_rank(group))).sum()).backward()
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm)
            torch.testing.assert_close(clip_grad_norm_(module, 1.0, norm), expected)
            assert_same_gradients(module, reference)
    assert_accumulates(mesh, group, LINEAR)


def hsdp_training(root: Path) -> None:
    """HSDP accumulates and trains as DDP, whatever is freed, recomputed or offloaded."""
    mesh = hsdp_mesh()
    for reshard, recompute, offload in ((True, True, False), (False, False, True), (2, True, True), (2, False, False)):
        fields: Any = {"reshard_after_forward": reshard, "cpu_offload": offload}
        assert_accumulates(mesh, None, Sharding(wrap=["Sequential"], activation_checkpointing=recompute, **fields))


def three_axes(root: Path) -> None:
    """One axis, and an HSDP pair of axes, of a mesh of three train as DDP, and the pair's checkpoint loads."""
    one = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp"]
    assert_accumulates(one, one.get_group(), LINEAR)
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    two = whole["dp_replicate", "dp_shard"]
    group = two._flatten().get_group()
    assert_accumulates(two, group, LINEAR)
    module = shard_module(stack(6), two, LINEAR)
    optimizer = adam(module)
    train(module, optimizer, inputs_of(group, 6))
    folder = root / f"first-{two.mesh.flatten()[0].item()}"  # each of the two meshes saves its own
    save_checkpoint(module, folder, optimizer=optimizer)
    again = shard_module(stack(6, seed=1), two, LINEAR)
    other = adam(again)
    load_checkpoint(again, folder)
    load_optimizer_state(again, other, folder)
    torch.testing.assert_close(full(again), full(module), rtol=0, atol=0)
    last = inputs_of(group, 6)
    torch.testing.assert_close(train(again, other, last), train(module, optimizer, last))


def all_reduce_hook(root: Path) -> None:
    """FSDP2's all-reduce hook on a module over a part of the ranks makes HSDP of it."""
    shard, replicate = pairs()
    module: Any = shard_module(stack(6), init_mesh("cpu", group=shard), ROOT)
    module.set_all_reduce_hook(lambda grad: dist.all_reduce(grad.div_(2), group=replicate))
    reference = ddp(stack(6))
    for each in (module, reference):
        each(rows(6, dist.get_rank())).square().mean().backward()
    assert_same_gradients(module, reference)


def torch_states(root: Path) -> None:
    """`torch.distributed.checkpoint.state_dict` goes from model to model, on HSDP and on a part of the ranks."""
    half = dist.new_group([1, 3])
    meshes: list[Any] = [(hsdp_mesh(), None)]
    if dist.get_rank(half) >= 0:
        meshes.append((init_mesh("cpu", group=half), half))
    for mesh, group in meshes:
        module, again = shard_module(stack(6), mesh, LINEAR), shard_module(stack(6, seed=1), mesh, LINEAR)
        optimizer, other = adam(module), adam(again)
        train(module, optimizer, inputs_of(group, 6))
        set_model_state_dict(again, get_model_state_dict(module))
        set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(module, optimizer)))
        last = inputs_of(group, 6)
        torch.testing.assert_close(train(again, other, last), train(module, optimizer, last))


def broadcasts(root: Path) -> None:
    """A full state dict that only the first rank of the mesh has reaches the others; torch's function needs rank 0."""
    half = dist.new_group([1, 3])
    hsdp = shard_module(stack(6, seed=1), hsdp_mesh(), LINEAR)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    expected = dict(stack(6, seed=4).state_dict())
    set_model_state_dict(hsdp, dict(expected) if dist.get_rank() == 0 else {}, options=options)  # fills the dict
    torch.testing.assert_close(full(hsdp), expected, rtol=0, atol=0)
    modules = [(hsdp, None)]
    if dist.get_rank(half) >= 0:
        modules.append((shard_module(stack(6, seed=1), init_mesh("cpu", group=half), LINEAR), half))
    for module, group in modules:
        expected = dict(stack(6, seed=3).state_dict())
        load_full_state_dict(module, expected if dist.get_rank(group) == 0 else {})
        torch.testing.assert_close(full(module), expected, rtol=0, atol=0)


def accelerates(root: Path) -> None:
    """`fsdp2_prepare_model` takes the data parallel axes of each mesh that accelerate's ParallelismConfig builds."""
    from accelerate.parallelism_config import ParallelismConfig  # slow to import, in every rank of every test

    for sizes, num_ranks in (
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
        ({"dp_shard_size": 2, "tp_size": 2}, 2),
        ({"dp_shard_size": 2, "cp_size": 2}, 4),  # a flattened axis: parameters are cut over cp, too
        ({"dp_shard_size": 4}, 4),
    ):
        config = ParallelismConfig(**sizes)
        whole = config.build_device_mesh("cpu")
        mesh = whole[tuple(config.fsdp_dim_names)]
        group = None if num_ranks == 4 else mesh.get_group()
        for efficient in (True, False):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=efficient)
            accelerator: Any = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin),
                device=torch.device("cpu"),
                torch_device_mesh=whole,
                parallelism_config=config,
            )
            has_values = not efficient or dist.get_rank(group) == 0
            module = fsdp2_prepare_model(accelerator, stack(6, seed=42 if has_values else 9))
            held: Any = list(module.parameters())
            assert {parameter.device_mesh.size() for parameter in held} == {num_ranks}
            torch.testing.assert_close(full(module), dict(stack(6).state_dict()), rtol=0, atol=0)
            assert_trains_as(ddp(stack(6), group), module, group, 6)


KINDS = {
    "axes": (4, (from_group, axis_training)),
    "pairs": (4, (pair_of_groups, pair_states)),
    "hybrid": (4, (hybrid_setup, all_reduce_hook)),
    "states": (4, (hsdp_states, local_states, torch_states, broadcasts)),
    "checkpoints": (4, (hsdp_checkpoints,)),
    "halves": (4, (half_the_world, other_order)),
    "single": (4, (one_rank_groups,)),
    "training": (4, (hsdp_training,)),
    "three_axes": (8, (three_axes,)),
    "accelerate": (4, (accelerates,)),
}
"""Name → number of ranks, and cases that run one after the other in one world."""


@pytest.mark.parametrize("name", KINDS)
def test_torchs_cases_hold(name: str, tmp_path: Path) -> None:
    world_size, kinds = KINDS[name]
    run_ranks(world_size, run_kinds, kinds, tmp_path, timeout_s=120)
