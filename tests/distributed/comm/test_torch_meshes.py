"""torch's own cases of meshes that have a part of the ranks, or two axes, and of modules on other ranks than the root.

They are those of torch's tests of FSDP, HSDP, `DeviceMesh` and distributed checkpoints that no other test shows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from raysharding import PlanError, Sharding
from raysharding.distributed import (
    FullyShardedDataParallelPlugin,
    clip_grad_norm_,
    fsdp2_prepare_model,
    full_optim_state_dict,
    gather_state_dict,
    init_mesh,
    load_checkpoint,
    load_full_state_dict,
    load_optimizer_state,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    save_checkpoint,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    shard_module,
    sharded_optim_state_dict,
    state_dict_type,
    summon_full_params,
)
from tests.distributed.checks import on_ranks

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
    with state_dict_type(module, FULL):
        return dict(module.state_dict())


def moments(module: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    state = full_optim_state_dict(module, optimizer, rank0_only=False, group=group)["state"]
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


def require_accumulation(mesh: DeviceMesh, group: Any, sharding: Sharding) -> None:
    """Steps of 3 backward passes, 2 of them in `no_sync`, equal those of DDP over the same ranks, and its norms."""
    modules: list[Any] = [shard_module(stack(), mesh, sharding), DistributedDataParallel(stack(), process_group=group)]
    module, reference = modules
    optimizers = [adam(each) for each in modules]
    for step in range(3):
        batches = [rows(6, 100 * step + 10 * number + dist.get_rank(group)) for number in range(3)]
        with no_sync(module), reference.no_sync():
            for batch in batches[:2]:
                backward(modules, batch)
        backward(modules, batches[2])
        for norm_type in (1.0, 3.0, float("inf")):
            expected = nn.utils.get_total_norm([one.grad for one in reference.parameters()], norm_type)
            torch.testing.assert_close(clip_grad_norm_(module, None, norm_type), expected)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(module, 0.1), expected)
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    require_accumulation(mesh, mesh.get_group(), LINEAR)
    require_accumulation(init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard")), None, LINEAR)
    for reshard, recompute, offload in ((True, True, False), (False, False, True), (2, True, True)):
        fields: Any = {"reshard_after_forward": reshard, "cpu_offload": offload, "activation_checkpointing": recompute}
        require_accumulation(hsdp_mesh(), None, Sharding(wrap=["Sequential"], **fields))
    shard, replicate = pairs()
    module: Any = shard_module(stack(), init_mesh("cpu", group=shard), ROOT)
    module.set_all_reduce_hook(lambda grad: dist.all_reduce(grad.div_(2), group=replicate))
    reference = DistributedDataParallel(stack())
    backward((module, reference), rows(6, dist.get_rank()))
    require_same_gradients(module, reference)


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
    save_checkpoint(module, folder, optimizer=optimizer)
    load_checkpoint(again, folder)
    load_optimizer_state(again, other, folder)
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
        with state_dict_type(module, SHARDED):
            held = {"model": module.state_dict(), "optim": sharded_optim_state_dict(module, optimizer)}
        dcp.save(held, checkpoint_id=folder)
        meshes: list[Any] = [(hsdp_mesh(), None), (init_mesh("cpu"), None)]
        if dist.get_rank() >= 2:
            meshes.append((init_mesh("cpu", group=half), half))
        for mesh, group in meshes:
            again = shard_module(stack(width, seed=1), mesh, LINEAR)
            other = adam(again)
            train(again, other, group, width)  # so that there is state to load into
            with state_dict_type(again, SHARDED):
                if mesh.ndim == 1:
                    with pytest.raises(ValueError, match="another mesh"):
                        again.load_state_dict(held["model"])
                wanted = {"model": again.state_dict(), "optim": sharded_optim_state_dict(again, other)}
                dcp.load(wanted, checkpoint_id=folder, process_group=group)
                again.load_state_dict(wanted["model"])
                other.load_state_dict(optim_state_dict_to_load(again, other, wanted["optim"], group=group))
            torch.testing.assert_close(full(again), values, **EXACT)
            torch.testing.assert_close(moments(again, other, group), state, **EXACT)
        # Sharded state is a copy: it stays as it was when the optimizer goes on.
        before = {name: one["exp_avg"].to_local().clone() for name, one in held["optim"]["state"].items()}
        train(module, optimizer, width=width)
        after = {name: one["exp_avg"].to_local() for name, one in held["optim"]["state"].items()}
        torch.testing.assert_close(after, before, **EXACT)


@on_ranks(full=(4,))
def test_full_optimizer_state_of_all_ranks_loads_into_half() -> None:
    """By each function, into every second rank and other FSDP groups, from parameters in another order."""
    half = dist.new_group([0, 2])
    module = shard_module(stack(), init_mesh("cpu"), LINEAR)
    optimizer = adam(module)
    train(module, optimizer)
    everywhere = full_optim_state_dict(module, optimizer, rank0_only=False)
    on_first, values, expected = full_optim_state_dict(module, optimizer), full(module), moments(module, optimizer)
    if dist.get_rank() % 2:
        return
    first = dist.get_rank(half) == 0
    again = shard_module(stack(seed=5), init_mesh("cpu", group=half), ROOT)
    load_full_state_dict(again, values if first else {})
    parameters = list(again.parameters())
    for mine in (parameters, parameters if first else parameters[::-1]):
        other = torch.optim.Adam(mine, lr=1e-2)
        for given in ({"optim": other}, {"optim_input": other.param_groups}):
            options: Any = given
            results = [
                shard_full_optim_state_dict(everywhere, again, **options),
                scatter_full_optim_state_dict(on_first if first else None, again, group=half, **options),
            ]
            for config in (FullOptimStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)):
                with state_dict_type(again, FULL, FullStateDictConfig(), config):
                    results.append(optim_state_dict_to_load(again, other, everywhere, group=half))
            for result in results:
                assert all(held["exp_avg"].device_mesh.mesh.tolist() == [0, 2] for held in result["state"].values())
                other.load_state_dict(result)
                for name, parameter in again.named_parameters():
                    moment = other.state[parameter]["exp_avg"].full_tensor()
                    torch.testing.assert_close(moment, expected[f"{name}.exp_avg"], **EXACT)
    train(again, adam(again), half)


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
        set_model_state_dict(again, get_model_state_dict(module))
        set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(module, optimizer)))
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
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=efficient)
            accelerator: Any = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin),
                device=torch.device("cpu"),
                torch_device_mesh=whole,
                parallelism_config=config,
            )
            has_values = not efficient or dist.get_rank(group) == 0
            module = fsdp2_prepare_model(accelerator, stack(seed=42 if has_values else 9))
            held: Any = list(module.parameters())
            assert {parameter.device_mesh.size() for parameter in held} == {num_ranks}
            torch.testing.assert_close(full(module), dict(stack().state_dict()), **EXACT)
            reference = DistributedDataParallel(stack(), process_group=group)
            expected = train(reference, adam(reference), group)
            torch.testing.assert_close(train(module, adam(module), group), expected)


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
        torch.testing.assert_close(clip_grad_norm_(module, None, norm_type), expected)


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
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with state_dict_type(module, SHARDED):
            held = copy.deepcopy((module.state_dict(), optim_state_dict(module, optimizers[0])))
            for parameter in module.parameters():
                parameter.detach().zero_()
                optimizers[0].state[parameter]["momentum_buffer"].zero_()
            module.load_state_dict(held[0])
            optimizers[0].load_state_dict(optim_state_dict_to_load(module, optimizers[0], held[1]))
    on_other_ranks = rf"expert.weight.*its mesh holds the ranks \(\({rank},\),\), and the process group \[0, 1, 2, 3\]"
    on_other_meshes = r"parameters \['expert.weight', 'first.weight'\] lie on different meshes"
    for call, message in (
        (lambda: full(module), on_other_ranks),
        (summon_full_params(module).__enter__, on_other_ranks),
        (lambda: list(gather_state_dict(module)), on_other_ranks),
        (lambda: full_optim_state_dict(module, optimizers[0]), on_other_ranks),
        (lambda: save_checkpoint(module, root / "experts"), on_other_meshes),
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
    for step in range(2):
        backward_of_experts((module, reference), step)
        require_norms(module, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), dict(reference.named_parameters()))
    whole = full_optim_state_dict(module, optimizers[0], rank0_only=False)["state"]
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
    states: Any = get_state_dict(module, optimizer)
    values, state = states
    for name, ranks in (("net.weight", [0, 1, 2, 3]), (f"layers.{index}.bias", [index, index + 2])):
        assert values[name].device_mesh.mesh.tolist() == ranks
        assert state["state"][name]["exp_avg"].device_mesh.mesh.tolist() == ranks
    assert set(state["state"]) == set(values) == set(reference.state_dict())
    with state_dict_type(module, SHARDED):
        module.load_state_dict(module.state_dict())
    with pytest.raises(PlanError, match=r"the optimizers of ranks 1, 3 hold other param groups or state than rank 0's"):
        sharded_optim_state_dict(module, optimizer)
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
    torch.testing.assert_close(clip_grad_norm_(module, None), expected)


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
        Sharding.from_strategy(ShardingStrategy.HYBRID_SHARD, 4)
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
            clip_grad_norm_(module, max_norm)
    require_same_gradients(module, reference)
