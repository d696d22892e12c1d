"""torch's own cases of modules on other ranks than the module around them, through this library's names.

An expert of each rank's own in a model that all ranks share, layers that only some ranks have, groups and meshes that
are refused, and tensor parallelism.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raysharding import PlanError, Sharding
from raysharding.distributed import (
    clip_grad_norm_,
    full_optim_state_dict,
    gather_state_dict,
    init_mesh,
    optim_state_dict,
    optim_state_dict_to_load,
    save_checkpoint,
    shard_module,
    sharded_optim_state_dict,
    state_dict_type,
    summon_full_params,
)
from tests.distributed.comm.torch_mesh_kinds import (
    LINEAR,
    ROOT,
    adam,
    assert_full_equals,
    assert_same_gradients,
    ddp,
    full,
    inputs_of,
    local_values,
    optimizer_values,
    pairs,
    rows,
    run_kinds,
    stack,
    train,
)
from tests.spawn import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


class Experts(nn.Module):
    """An expert of each rank's own between layers of all ranks, as torch's `MixtureOfExperts`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(8, 12), nn.Linear(12, 23), nn.Linear(12, 8)
        torch.manual_seed(42 + rank)
        self.expert = nn.Linear(23, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.shared(self.first(x))))


def nested_experts() -> tuple[Experts, Experts]:
    """Experts on groups of one rank inside a root on all ranks; and the same model, whole."""
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    module = Experts(rank)
    shard_module(module.expert, init_mesh("cpu", group=own), ROOT)
    shard_module(module.shared, init_mesh("cpu"), ROOT)
    shard_module(module, init_mesh("cpu"), ROOT)
    return module, Experts(rank)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


def backward(module: nn.Module, reference: Experts, step: int) -> None:
    """Make a backward on both, with equal losses; the reference's shared gradients are averaged here."""
    batch = rows(8, 10 * step + dist.get_rank())
    losses = [each(batch).sum() for each in (module, reference)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for name, parameter in reference.named_parameters():
        if "expert" not in name and parameter.grad is not None:
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def step_both(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def norm_of(shared: list[nn.Parameter], own: list[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of gradients that all ranks share, and of those that each rank has for itself."""
    powers = [
        torch.stack([p.grad.abs().pow(norm_type).sum() for p in part if p.grad is not None]) for part in (shared, own)
    ]
    dist.all_reduce(powers[1])
    return (powers[0].sum() + powers[1].sum()).pow(1 / norm_type)


def experts_norm_of(reference: Experts, norm_type: float = 2.0) -> torch.Tensor:
    own = list(reference.expert.parameters())
    shared = [parameter for name, parameter in reference.named_parameters() if "expert" not in name]
    return norm_of(shared, own, norm_type)


def experts_train(root: Path) -> None:
    """Experts on groups of one rank keep to their rank in training, and in sharded states of model and optimizer."""
    module, reference = nested_experts()
    optimizers = [sgd(module), sgd(reference)]
    for step in range(4):
        backward(module, reference, step)
        step_both(optimizers)
        with state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            held = copy.deepcopy((module.state_dict(), optim_state_dict(module, optimizers[0])))
            for parameter in module.parameters():
                parameter.detach().zero_()
                optimizers[0].state[parameter]["momentum_buffer"].zero_()
            module.load_state_dict(held[0])
            optimizers[0].load_state_dict(optim_state_dict_to_load(module, optimizers[0], held[1]))
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_full_equals(ours, theirs)
        moments = [
            optimizer.state[each]["momentum_buffer"] for optimizer, each in zip(optimizers, (ours, theirs), strict=True)
        ]
        assert_full_equals(*moments)


def experts_norm(root: Path) -> None:
    """The norm counts the expert of each rank once, and a shared gradient once."""
    module, reference = nested_experts()
    backward(module, reference, 0)
    for norm_type in (2.0, 1.0, 3.0):
        expected = experts_norm_of(reference, norm_type)
        torch.testing.assert_close(clip_grad_norm_(module, None, norm_type), expected)
    norm = clip_grad_norm_(module, 0.1)
    torch.testing.assert_close(norm, experts_norm_of(reference))
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.1 / (norm + 1e-6))
    assert_same_gradients(module, reference)


def experts_ignored(root: Path) -> None:
    """Experts in `ignored_modules`, not averaged, train alike; full parameters have each rank's own expert."""
    module, reference = Experts(dist.get_rank()), Experts(dist.get_rank())
    fields: Any = {"ignored_modules": ["expert"], "average_ignored_gradients": False}
    shard_module(module, init_mesh("cpu"), Sharding(wrap="none", **fields))
    torch.testing.assert_close(full(module), dict(reference.state_dict()), rtol=0, atol=0)
    optimizers = [sgd(module), sgd(reference)]
    for step in range(4):
        backward(module, reference, step)
        torch.testing.assert_close(clip_grad_norm_(module, None), experts_norm_of(reference))
        step_both(optimizers)
    with summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), dict(reference.named_parameters()))
    whole = full_optim_state_dict(module, optimizers[0], rank0_only=False)["state"]
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole[name]["momentum_buffer"], optimizers[1].state[parameter]["momentum_buffer"])


def summon(module: nn.Module) -> None:
    with summon_full_params(module):
        pass


def experts_refused(root: Path) -> None:
    """Full forms of a model on several meshes are refused on every rank, and the model trains on."""
    module, reference = nested_experts()
    optimizers = [sgd(module), sgd(reference)]
    backward(module, reference, 0)
    step_both(optimizers)
    rank = dist.get_rank()
    other_ranks = (
        rf"its mesh holds the ranks \(\({rank},\),\), and the process group \[0, 1, 2, 3\]: shard the module over"
    )
    other_meshes = r"parameters \['expert.weight', 'first.weight'\] lie on different meshes: shard the module over one"
    for call, message in (
        (lambda: full(module), rf"expert.weight: {other_ranks}"),
        (lambda: summon(module), rf"expert.weight: {other_ranks}"),
        (lambda: list(gather_state_dict(module)), rf"expert.weight: {other_ranks}"),
        (lambda: full_optim_state_dict(module, optimizers[0]), rf"expert.weight/momentum_buffer: {other_ranks}"),
        (lambda: save_checkpoint(module, root / "saved"), other_meshes),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not (root / "saved").exists()
    for step in (1, 2):
        backward(module, reference, step)
        assert_same_gradients(module, reference)
        step_both(optimizers)


class Layer(nn.Module):
    def __init__(self, *, here: bool) -> None:
        super().__init__()
        if here:
            self.net = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Layers(nn.Module):
    """Two layers, of which a rank has one, as in torch's test of expert parallelism with FSDP."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.index = index
        self.layers = nn.ModuleList([Layer(here=each == index) for each in range(2)])
        self.net = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.layers[self.index](x))


def layers_of_some_ranks(root: Path) -> None:
    """Layers that half of the ranks have are in torch's states on their mesh; the optimizer's by name are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["dp"]
    index = dist.get_rank() % 2
    module, reference = Layers(index), Layers(index)
    shard_module(module.layers[index], mesh, ROOT)
    shard_module(module, init_mesh("cpu"), ROOT)
    optimizer = adam(module)
    states: Any = get_state_dict(module, optimizer)
    values, state = states
    for name, ranks in (("net.weight", [0, 1, 2, 3]), (f"layers.{index}.net.bias", [index, index + 2])):
        assert values[name].device_mesh.mesh.tolist() == ranks
        assert state["state"][name]["exp_avg"].device_mesh.mesh.tolist() == ranks
    own = {f"{part}.{kind}" for part in ("net", f"layers.{index}.net") for kind in ("weight", "bias")}
    assert set(state["state"]) == set(values) == own
    with state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        module.load_state_dict(module.state_dict())
    with pytest.raises(PlanError, match=r"the optimizers of ranks 1, 3 hold other param groups or state than rank 0's"):
        sharded_optim_state_dict(module, optimizer)
    module.zero_grad()
    check_backward(module, reference, {"net": None, f"layers.{index}": mesh.get_group()})


def check_backward(module: nn.Module, reference: nn.Module, groups: dict[str, Any]) -> None:
    """Compare gradients with the reference's, averaged over the group of each part."""
    for each in (module, reference):
        each(rows(6, dist.get_rank())).square().mean().backward()
    for name, group in groups.items():
        for parameter in reference.get_submodule(name).parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)
    assert_same_gradients(module, reference)


def two_groups(root: Path) -> None:
    """Blocks on two axes inside a root on all ranks average over their own axis; the norm counts each copy once."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    module, reference = stack(6), stack(6)
    shard_module(module[1], whole["dp"], ROOT)
    shard_module(module[2], whole["other"], ROOT)
    shard_module(module, init_mesh("cpu"), ROOT)
    groups = {"0": None, "1": whole.get_group("dp"), "2": whole.get_group("other"), "3": None}
    check_backward(module, reference, groups)
    own = [*reference[1].parameters(), *reference[2].parameters()]
    for parameter in own:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5**0.5)  # both ranks of an axis have it: half of its square from each
    expected = norm_of([*reference[0].parameters(), *reference[3].parameters()], own)
    torch.testing.assert_close(clip_grad_norm_(module, None), expected)


def refused_groups(root: Path) -> None:
    """Groups that make no mesh are refused at once; a list of two is as good as a tuple."""
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
    half = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=rf"global rank {dist.get_rank()} is not in the process group"):
            init_mesh("cpu", group=half)


def refused_meshes(root: Path) -> None:
    """Meshes that FSDP2 does not take, and a group that is not the model's, are refused at once."""
    three = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh"):
        shard_module(stack(4), three)
    with pytest.raises(AssertionError, match="with mesh_dim_names specified"):  # torch's own error
        shard_module(stack(4), init_device_mesh("cpu", (2, 2)))
    shard, _ = pairs()
    mesh: DeviceMesh = init_mesh("cpu", group=shard)
    module = shard_module(stack(4), mesh)
    ranks = str(mesh.mesh.tolist()).replace("[", r"\[")
    with pytest.raises(ValueError, match=rf"the ranks \[0, 1, 2, 3\], and the model's mesh {ranks}"):
        full_optim_state_dict(module, adam(module), group=dist.group.WORLD)


def with_tensor_parallelism(root: Path) -> None:
    """With tensor parallelism on another axis a backward is that of DDP; the norm is refused and clips nothing."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = whole.get_group("dp")
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))
    module, reference = modules[0], ddp(modules[1], group)
    parallelize_module(module, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_module(module, whole["dp"], ROOT)
    for each in (module, reference):
        # The ranks of a tp group must have the same rows.
        each(rows(6, dist.get_rank(group))).square().mean().backward()
    ranks = rf"\[{dist.get_rank() % 2}, {dist.get_rank() % 2 + 2}\]"
    message = rf"a gradient is on the ranks \[0, 1, 2, 3\], and the module's mesh has {ranks}: clip models on several"
    for max_norm in (None, 1e-3):
        with pytest.raises(ValueError, match=message):
            clip_grad_norm_(module, max_norm)
    assert_same_gradients(module, reference)


def states_are_copies(root: Path) -> None:
    """Sharded optimizer state, offloaded to CPUs, stays as it was when the optimizer on CPUs goes on, as FSDP1's."""
    module = shard_module(stack(6), init_mesh("cpu"), LINEAR)
    optimizer = adam(module)
    train(module, optimizer, inputs_of(None, 6, 1))
    offloaded = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *offloaded):
        by_type = optim_state_dict(module, optimizer)
    for state in (by_type, sharded_optim_state_dict(module, optimizer)):
        held = optimizer_values(state)
        before = local_values(held)
        train(module, optimizer, inputs_of(None, 6, 1))
        torch.testing.assert_close(local_values(held), before, rtol=0, atol=0)


KINDS = {
    "experts": (experts_train, experts_norm, experts_ignored, experts_refused),
    "layers": (layers_of_some_ranks, two_groups),
    "refused": (refused_groups, refused_meshes, with_tensor_parallelism),
    "copies": (states_are_copies,),
}
"""Name → cases that run one after the other in one world of 4 ranks."""


@pytest.mark.parametrize("name", KINDS)
def test_torchs_cases_hold(name: str, tmp_path: Path) -> None:
    run_ranks(4, run_kinds, KINDS[name], tmp_path, timeout_s=120)
