"""What is checked on the ranks of `test_accelerate_on_ranks.py`: rank 0's values into sharded models."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Before any patch, as scripts do.
from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.utils import fsdp_utils as oracle
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.config import Sharding
from raysharding.distributed import fsdp2_prepare_model, init_mesh, shard_module
from raysharding.distributed.fully_shard.internals import is_offloaded
from raysharding.errors import CheckpointError, PlanError
from tests.distributed.accelerate_compat.accelerate_checks import full
from tests.distributed.loading.load_checks import full_state
from tests.distributed.models import Odd, filled, on_meta, require_equal, saved
from tests.spawn import device_type, part_of_ranks


@contextmanager
def kept_environment() -> Iterator[None]:
    """Plugins write into it."""
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


def accelerator_with(plugin: Any, mixed_precision: str = "no", replicate_size: int = 1) -> Any:
    """What the functions look at of an `Accelerator`."""
    mesh, config = None, None
    if replicate_size > 1:
        shape = (replicate_size, dist.get_world_size() // replicate_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard_cp"))
        config = SimpleNamespace(fsdp_dim_names=["dp_replicate", "dp_shard_cp"])
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision=mixed_precision,
        is_main_process=dist.get_rank() == 0,
        torch_device_mesh=mesh,
        parallelism_config=config,
    )


def shards_of(model: nn.Module) -> dict[str, tuple[str, torch.dtype, torch.Tensor]]:
    """FQN, tied ones under each → how it is cut, and this rank's part."""
    return {
        name: (str(tensor.placements), tensor.dtype, tensor._local_tensor)
        if isinstance(tensor, DTensor)
        else ("", tensor.dtype, tensor.detach())
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }


def check_rank_0_values(root: Path) -> None:
    """Buffers of both kinds, ties, 0-dim parameters and odd rows come from rank 0; others may be on meta."""
    for how in ("real", "meta"):
        model = filled()
        model.positions.add_(3)
        expected = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        if dist.get_rank():
            with torch.device("meta" if how == "meta" else "cpu"):
                model = Odd()
        with kept_environment():
            plugin = rs.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
        fsdp2_prepare_model(accelerator_with(plugin), model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            assert torch.equal(full(tensor), expected[name]), (how, name)
        assert model.head.weight is model.embed.weight
        assert model.twin is model.table
        assert isinstance(model.scale, nn.Parameter)
        model.eval()
        model(torch.zeros(2, 3, dtype=torch.long))


def odd_on_meta() -> Any:
    with torch.device("meta"):
        sharding = Sharding(replicate_size=2) if dist.get_world_size() == 4 else None
        return shard_module(Odd(), init_mesh(device_type(), sharding), sharding)


def on_rank_0(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state if dist.get_rank() == 0 else {}


def check_full_state_dict(root: Path) -> None:
    """Onto meta and onto real values, from another dtype, by any name of a tie, for any kind of accelerator."""
    expected = filled()
    state = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    without_second_names = {name: tensor for name, tensor in state.items() if name not in ("embed.weight", "twin")}
    doubles = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    accelerator = accelerator_with(None)
    group = part_of_ranks() or dist.group.WORLD
    for given, owner in ((state, None), (without_second_names, group), (doubles, accelerator)):
        model = odd_on_meta()
        for _ in range(2):
            assert id(rs.fsdp2_load_full_state_dict(owner, model, on_rank_0(given))) == id(model)
            assert model.head.weight is model.embed.weight
            assert not any(tensor.is_meta for tensor in model.parameters())
            found = full_state(model)
            if dist.get_rank() == 0:
                for name, tensor in state.items():
                    assert found[name].dtype == tensor.dtype
                    assert torch.equal(found[name], tensor), name
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.zero_()
    offloaded = odd_on_meta()
    rs.fsdp2_load_full_state_dict(None, offloaded, on_rank_0(state), cpu_offload=True)
    assert is_offloaded(offloaded)
    if dist.get_rank() == 1:
        others = dist.new_group(dist.get_process_group_ranks(group)[1:2], use_local_synchronization=True)
        with pytest.raises(ValueError, match="give that of the mesh"):
            rs.fsdp2_load_full_state_dict(others, offloaded, {})


def check_bad_state_dict(root: Path) -> None:
    """What is missing or does not fit raises on every rank, and the model is on meta again; extras are a warning."""
    state = dict(filled().state_dict())
    lacking = {name: tensor for name, tensor in state.items() if name != "large"}
    wrong = state | {"narrow": torch.zeros(3, 64)}
    for given, message in ((lacking, "large"), (wrong, "narrow"), ({}, "narrow"), (None, "NoneType")):
        model = odd_on_meta()
        with pytest.raises(Exception, match=message) as caught:
            rs.fsdp2_load_full_state_dict(None, model, given if dist.get_rank() == 0 else {})  # type: ignore[arg-type]
        assert given is None or caught.type is PlanError
        assert all(parameter.is_meta for parameter in model.parameters())
    rs.fsdp2_load_full_state_dict(None, model, on_rank_0(state))  # nobody was left behind
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rs.fsdp2_load_full_state_dict(None, model, on_rank_0(state | {"extra": torch.zeros(1)}))
    said = [str(one.message) for one in warned if "no place for: extra" in str(one.message)]
    assert len(said) == (dist.get_rank() == 0)


def check_beside_accelerate(root: Path) -> None:
    """Equal shards where accelerate's works: parameters only, all of one dtype."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    results = []
    for load in (oracle.fsdp2_load_full_state_dict, rs.fsdp2_load_full_state_dict):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert load(accelerator_with(None), model, on_rank_0(reference.state_dict())) is model
        model(torch.rand(2, 5)).sum().backward()
        results.append(model)
    theirs, ours = map(shards_of, results)
    assert theirs.keys() == ours.keys()
    for name, (cut, dtype, local) in theirs.items():
        assert ours[name][:2] == (cut, dtype), name
        assert torch.equal(ours[name][2], local), name


def save_in_files(values: dict[str, torch.Tensor], folder: Path, num_files: int) -> str:
    """On rank 0 a checkpoint that accelerate reads; its path on every rank."""
    if dist.get_rank() == 0:
        folder.mkdir()
        where = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(sorted(values))}
        for file in set(where.values()):
            held = {name: values[name] for name in values if where[name] == file}
            save_file(held, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    dist.barrier()
    return str(folder)


def check_patched_accelerate(root: Path) -> None:
    """All ranks load a `DistModule` together, whatever accelerate is told of rank 0."""
    folder = save_in_files(saved(filled(8)), root / f"patched-{dist.get_world_size()}", 2)
    cases: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        (load_checkpoint_in_model, on_meta, {}),
        (load_checkpoint_in_model, Odd, {"broadcast_from_rank0": True}),
        (load_checkpoint_and_dispatch, Odd, {}),
        (load_checkpoint_and_dispatch, on_meta, {"broadcast_from_rank0": True}),
    )
    for load, make, options in cases:
        model = rs.DistModule(make())
        rs.apply_fsdp2(model, init_mesh(device_type()))
        with rs.patch_accelerate():
            load(model=model, checkpoint=folder, **options)
        require_equal(model, filled(8).state_dict())
    with rs.patch_accelerate():
        with pytest.raises(ValueError, match="leave it out"):
            load_checkpoint_in_model(model, folder, device_map={"": "cpu"})
        empty = Path(folder) / "empty.safetensors"
        empty.write_text("")
        with pytest.raises(CheckpointError, match=r"empty\.safetensors"):
            load_checkpoint_in_model(model, str(empty), broadcast_from_rank0=True)


def small(seed: int, kind: str) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))) if kind == "fsdp2" else module


def check_patched_accelerate_on_other_modules(root: Path) -> None:
    """They are loaded as without the patch."""
    folder = save_in_files(dict(small(1, "").state_dict()), root / f"others-{dist.get_world_size()}", 1)
    cases: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        (load_checkpoint_in_model, "", {}),
        (load_checkpoint_and_dispatch, "", {"device_map": {"": "cpu"}, "dtype": "float16"}),
        (load_checkpoint_in_model, "fsdp2", {}),
        (load_checkpoint_and_dispatch, "fsdp2", {"broadcast_from_rank0": True}),
    )
    for load, kind, options in cases:
        theirs, ours = small(2, kind), small(2, kind)
        load(theirs, folder, **options)
        with rs.patch_accelerate():
            load(ours, folder, **options)
        for name, (_, dtype, local) in shards_of(theirs).items():
            assert shards_of(ours)[name][1] == dtype
            assert torch.equal(shards_of(ours)[name][2], local), (kind, options, name)
    function = load_checkpoint_in_model
    before = function.__code__, function.__defaults__
    first, second = rs.patch_accelerate(), rs.patch_accelerate()
    assert function.__code__ is not before[0]
    for patch in (first, first, second):
        patch.restore()
    assert (function.__code__, function.__defaults__) == before


def show_where_accelerate_waits(root: Path) -> None:
    """Load dicts of another dtype, and without a key, by both functions; leave in a file what came of it.

    accelerate's gets a deadline of 3 s. The process group is of no use afterwards.
    """
    group: Any = dist.group.WORLD
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    state = {name: tensor.bfloat16() for name, tensor in nn.Sequential(nn.Linear(4, 4)).state_dict().items()}
    lacking = {name: tensor.float() for name, tensor in state.items() if name != "0.weight"}
    rows = [tensor.chunk(dist.get_world_size())[dist.get_rank()].float() for tensor in state.values()]
    outcomes = []
    for given in (state, lacking):
        for load in (rs.fsdp2_load_full_state_dict, oracle.fsdp2_load_full_state_dict):
            with torch.device("meta"):
                model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
            start = time.monotonic()
            try:
                load(accelerator_with(None), model, on_rank_0(given))
                found = [local for _, _, local in shards_of(model).values()]
                said = "right" if all(map(torch.equal, found, rows)) else "wrong"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            outcomes.append((said, time.monotonic() - start))
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    time.sleep(4)  # a rank that ends would let the other's wait end early
