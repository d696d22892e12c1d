"""Modules on a part of the ranks: FSDP1's `process_group`, an axis of a mesh, groups side by side and overlapping."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from raysharding import Sharding
from raysharding import distributed as rs
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm import current_group
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.distributed.models import gathered as full
from tests.spawn import device_type

ROOT = Path(__file__).resolve().parents[3]
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def own_rows(group: dist.ProcessGroup) -> torch.Tensor:
    return ROWS.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def trained(seed: int, num_steps: int) -> dict[str, torch.Tensor]:
    """One process on all rows."""
    module = model(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss(module(ROWS)).backward()
        optimizer.step()
    return module.state_dict()


def steps(module: nn.Module, group: dist.ProcessGroup, num_steps: int) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(num_steps):
        told = rs.train_step(module, optimizer, {"input": own_rows(group)}, loss=loss)
        assert set(told) == {"loss", "grad_norm"}
        assert current_group() is None
    return optimizer


def use_everything(mesh: DeviceMesh, group: dist.ProcessGroup, seed: int, folder: Path) -> None:
    """Load, train, save, gather and load again, as all ranks do: rank 0 is the group's first."""
    first = dist.get_rank(group) == 0
    if first:
        folder.mkdir()
        save_file(model(seed).state_dict(), folder / "model.safetensors")
    dist.barrier(group=group)
    with torch.device("meta"):
        module = shard_module(model(0), mesh)
    report = rs.load_checkpoint(module, folder)
    assert len(report.shard_bytes) == dist.get_world_size(group)
    optimizer = steps(module, group, 2)
    expected = trained(seed, 2)
    torch.testing.assert_close(full(module), expected if first else {})
    with rs.summon_full_params(module):
        torch.testing.assert_close(dict(module.named_parameters()), expected, check_dtype=True)
    with rs.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        torch.testing.assert_close(dict(module.state_dict()), expected)
    state = rs.full_optim_state_dict(module, optimizer, group=group)
    assert set(state.get("state", ())) == (set(expected) if first else set())
    assert set(rs.optim_state_dict(module, optimizer, group=group)["state"]) == set(expected)
    assert rs.clip_grad_norm_(module, None).item() > 0
    rs.save_checkpoint(module, folder / "saved", optimizer=optimizer)
    again = shard_module(model(0), mesh)
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    rs.load_checkpoint(again, folder / "saved")
    rs.load_optimizer_state(again, other, folder / "saved")
    for one, two in ((module, optimizer), (again, other)):
        rs.train_step(one, two, {"input": own_rows(group)}, loss=loss)
    torch.testing.assert_close(full(again), full(module), rtol=0, atol=0)
    third = rs.DistModule(shard_module(model(0), mesh))
    third.load_state_dict(rs.load_state_dict(folder / "model.safetensors", group=group))
    torch.testing.assert_close(full(third.module), model(seed).state_dict() if first else {}, rtol=0, atol=0)


@on_ranks(4)
def test_side_by_side(root: Path) -> None:
    """Two models, on ranks 0 and 1 and on 2 and 3, at the same time; nobody waits for the other half."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    mesh = init_mesh("cpu", group=halves[half])
    for number in range(1 + half):  # one of them takes twice as long
        use_everything(mesh, halves[half], 1 + half, root / f"{half}-{number}")


@on_ranks(4)
def test_axis_of_a_mesh(root: Path) -> None:
    """Data parallel along one axis of a user's mesh, whose other axis is another parallelism's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["dp"]
    use_everything(mesh, mesh.get_group(), 3, root / f"axis-{mesh.mesh.tolist()[0]}")


@on_ranks(5)
def test_replicas(root: Path) -> None:
    """Replicas on ranks 1 to 4 of 5: cut from one group, and from FSDP1's pair of groups; rank 0 has no part."""
    group = dist.new_group([1, 2, 3, 4])
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((1, 2), (3, 4), (1, 3), (2, 4))}
    rank = dist.get_rank()
    if rank == 0:
        return
    if rank == 4:
        dist.new_group([4], use_local_synchronization=True)  # torch counts a rank's groups when it names a new one
    shard, replicate = pairs[(1, 2) if rank < 3 else (3, 4)], pairs[(1, 3) if rank % 2 else (2, 4)]
    meshes = [init_mesh("cpu", Sharding(replicate_size=2), group), init_mesh("cpu", group=(shard, replicate))]
    for number, mesh in enumerate(meshes):
        assert mesh.mesh.tolist() == [[1, 2], [3, 4]]
        use_everything(mesh, group, 5, root / f"hsdp-{number}")
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    oracle = FullyShardedDataParallel(model(5), process_group=group, **options)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(oracle(own_rows(group))).backward()
        optimizer.step()
    module = shard_module(model(5), meshes[1])
    steps(module, group, 2)
    with FullyShardedDataParallel.summon_full_params(oracle), rs.summon_full_params(module):
        for (_, ours), theirs in zip(module.named_parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@on_ranks(3)
def test_overlapping_groups(root: Path) -> None:
    """Rank 1 has a part in a model on ranks 0 and 1, and in another one on ranks 1 and 2."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for index, group in enumerate(groups):
        if dist.get_rank(group) >= 0:
            use_everything(init_mesh("cpu", group=group), group, 7 + index, root / f"both-{index}")
    mine = [(index, group) for index, group in enumerate(groups) if dist.get_rank(group) >= 0]
    modules = [shard_module(model(7 + index), init_mesh("cpu", group=group)) for index, group in mine]
    for module, (index, group) in zip(modules, mine, strict=True):
        steps(module, group, 1)
        expected = trained(7 + index, 1)
        torch.testing.assert_close(full(module), expected if dist.get_rank(group) == 0 else {})


@on_ranks(3)
def test_a_rank_outside(root: Path) -> None:
    """A rank that is not in the group hears it at once; the others' errors name it and the file's rank."""
    group = dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]))
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"global rank 0 is not in the process group"):
            init_mesh("cpu", group=group)
        with pytest.raises(ValueError, match=r"global rank 0 is not in the mesh of ranks \[1, 2\]"):
            shard_module(model(0), mesh)
        with pytest.raises(ValueError, match=r"global rank 0 is not in the process group"):
            rs.load_state_dict(root / "nothing", group=group)
        return
    module = shard_module(model(0), mesh)
    told = "nothing" if dist.get_rank() == 1 else r"on rank 0 \(global rank 1\)"
    with pytest.raises(ValueError, match=told):
        rs.load_checkpoint(module, root / "nothing")
    with pytest.raises(ValueError, match=r"the process group has the ranks \[0, 1, 2\], and the model's mesh \[1, 2\]"):
        rs.full_optim_state_dict(module, torch.optim.SGD(module.parameters()), group=dist.group.WORLD)


def accelerator_with(efficient: bool = True, **fields: Any) -> Any:
    """What `fsdp2_prepare_model` looks at of an `Accelerator`."""
    plugin = rs.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=efficient)
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), **fields)


@on_ranks(3)
def test_accelerates_functions(root: Path) -> None:
    """accelerate's functions on the accelerator's mesh, and a merge by the group alone."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    accelerator = accelerator_with(torch_device_mesh=init_mesh("cpu", group=group))
    module = rs.fsdp2_prepare_model(accelerator, model(9) if dist.get_rank() == 1 else model(0))
    torch.testing.assert_close(full(module), model(9).state_dict() if dist.get_rank() == 1 else {})
    rs.fsdp2_load_full_state_dict(group, module, model(8).state_dict() if dist.get_rank() == 1 else {})
    torch.testing.assert_close(full(module), model(8).state_dict() if dist.get_rank() == 1 else {})
    with rs.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        save({"model": module.state_dict()}, checkpoint_id=root / "dcp", process_group=group)
    rs.merge_fsdp_weights(root / "dcp", root / "merged", process_group=group)
    torch.testing.assert_close(load_file(root / "merged" / "model.safetensors"), dict(model(8).state_dict()))


@on_ranks(4)
def test_ranks_out_of_order() -> None:
    """torch sorts the ranks of a mesh's groups, and would shard by other numbers than those of the mesh."""
    for ranks in ([1, 0, 2, 3], [[2, 3], [0, 1]], [[1, 0], [3, 2]]):
        names = ("replicate", "shard")[-len(torch.tensor(ranks).shape) :]
        with pytest.raises(ValueError, match="must ascend along each axis"):
            shard_module(model(0), DeviceMesh("cpu", ranks, mesh_dim_names=names))


@on_ranks(4)
def test_several_meshes() -> None:
    """A module inside keeps its mesh when the root gets one, and a root keeps it when another one is refused."""
    half = init_mesh("cpu", group=[dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2])
    whole, module = init_mesh("cpu"), model(0)
    shard_module(module[2], half)
    shard_module(module, whole)
    loss(module(ROWS)).backward()
    with rs.summon_full_params(module[2]):
        torch.testing.assert_close(module[2].weight, model(0)[2].weight)
    other = shard_module(model(1), half)
    with pytest.raises(PlanError, match="shard"):
        shard_module(other, whole)
    if dist.get_rank() < 2:
        loss(other(ROWS)).backward()
        assert rs.clip_grad_norm_(other, None).item() > 0


@on_ranks(3)
def test_within_a_group() -> None:
    """`using_group` gives its ranks to what has no mesh: `init_mesh`, a model that is prepared, a plain module."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    accelerator = accelerator_with(mixed_precision="bf16")
    with rs.using_group(group), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert init_mesh("cpu").mesh.tolist() == [1, 2]
        module: Any = rs.fsdp2_prepare_model(accelerator, model(dist.get_rank()).bfloat16())
        parts = rs.gather_state_dict(model(4))
    assert module[0].weight.device_mesh.mesh.tolist() == [1, 2]
    assert any("kept in float32" in str(one.message) for one in warned) == (dist.get_rank() == 1)
    found = {name: value for part in parts for name, value in part.items()}
    torch.testing.assert_close(found, dict(model(4).state_dict()) if dist.get_rank() == 1 else {})
    with pytest.raises(TypeError, match=r"clip_grad_norm_\(\) got an unexpected keyword argument 'max_nrm'"):
        rs.clip_grad_norm_(module, max_nrm=1.0)  # type: ignore[call-arg]


@on_ranks(sim=(3,))
def test_replicas_on_devices() -> None:
    """The groups of an HSDP mesh are no splits of the default group: NCCL splits in a call of all its ranks."""
    group, world, made = dist.new_group([1, 2]), dist.group.WORLD, []
    assert world is not None
    assert world.bound_device_id is not None, "torch would split it"

    def new_group(*args: Any, **kwargs: Any) -> Any:
        made.append(world.bound_device_id)
        return torch_new_group(*args, **kwargs)

    if dist.get_rank() > 0:
        with pytest.MonkeyPatch.context() as patched:
            torch_new_group = dist.new_group
            patched.setattr(dist, "new_group", new_group)
            mesh = init_mesh(device_type(), Sharding(replicate_size=2), group)
        assert made == [None, None]
        module = shard_module(model(0).to(device_type()), mesh)
        rows = own_rows(group).to(device_type())
        loss(module(rows)).backward()
        assert rs.clip_grad_norm_(module, None).item() > 0
    assert world.bound_device_id is not None, "it is bound again"


COLLECTIVES = re.compile(
    r"\b(?:dist|torch\.distributed)\.(all_reduce|all_gather\w*|broadcast\w*|reduce\w*|scatter\w*|gather\w*|barrier|"
    r"P2POp|new_group|get_rank|get_world_size|send|recv|isend|irecv)\((?![^\n#]*group\b|[^\n]*# all ranks)"
)


def test_collectives_outside_comm_name_their_group() -> None:
    """Without one they go to all ranks, and hang where a module is on a part of them."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "raysharding").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "comm" not in path.parts and COLLECTIVES.search(line)
    ]
    assert not found, "\n".join(found)
