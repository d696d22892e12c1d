"""Optimizer state on real groups: FSDP1's four functions (rows C5 to C8), and what saves hold."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.config import Loading, Sharding
from raysharding.distributed import init_mesh, shard_module, state_dict_type
from raysharding.distributed.fully_shard import TensorTable
from raysharding.distributed.fully_shard.materialize import materialize
from raysharding.distributed.optim import adapt
from raysharding.distributed.saving.optimizer_state import OptimizerLoad
from raysharding.errors import CheckpointError, PlanError
from tests.distributed.checks import on_ranks
from tests.spawn import device_type, run_ranks

FULL = StateDictType.FULL_STATE_DICT

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Uneven(nn.Module):
    """Odd row counts, fewer rows than ranks, a tie, a 0-dim parameter, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.few = nn.Parameter(torch.rand(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Parameter(torch.rand(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * self.scale + self.few
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


def made(dtype: torch.dtype = torch.float32) -> Uneven:
    torch.manual_seed(0)
    return Uneven().to(dtype)


def sharded(sharding: Sharding | None = None, dtype: torch.dtype = torch.float32, device: str = "") -> nn.Module:
    return shard_module(made(dtype), init_mesh(device or device_type(), sharding), sharding)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two param groups, in another order than the module's."""
    decayed = [p for name, p in module.named_parameters() if name.startswith("blocks")]
    ids = {id(p) for p in decayed}
    rest = [p for p in module.parameters() if id(p) not in ids]
    return torch.optim.AdamW([{"params": decayed, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=torch.tensor(0.01), amsgrad=True, foreach=False)


def adafactor(module: nn.Module) -> torch.optim.Optimizer:
    """Means over rows and columns, whole on every rank; those of a vector, and of a matrix of one row, are cut."""
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.01)
    adapt(optimizer)
    return optimizer


NUM_STATE_TENSORS = {"adamw": 12, "sgd": 6, "plain_sgd": 0, "amsgrad": 18, "adafactor": 10}
"""Of the six parameters that are used and have dims; what a 0-dim one has lies in the outline."""

OPTIMIZERS: Mapping[str, OptimizerOf] = {one.__name__: one for one in (adamw, sgd, plain_sgd, amsgrad, adafactor)}


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> None:
    """Steps that are the same at every world size: every rank sees the same rows."""
    for step in range(first, first + num_steps):
        ids = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(ids).square().mean().backward()
        optimizer.step()


def shardings() -> list[Sharding]:
    """1-D, HSDP where the ranks make it, and shards in host memory where another device computes."""
    sizes = (1, 2) if dist.get_world_size() in (2, 4) else (1,)
    offloaded = [] if device_type() == "cpu" else [Sharding(cpu_offload=True)]
    return [*(Sharding(replicate_size=size) for size in sizes), *offloaded]


def same(one: Any, other: Any, exact: bool = True) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], exact) for key in one)
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = one.cpu(), other.cpu()
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    return bool(one == other)


def local_full(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """What one process's optimizer holds, by FQN."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": {names[p]: dict(held) for p, held in optimizer.state.items()}, "param_groups": groups}


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_full_against_one_process() -> None:
    for make in OPTIMIZERS.values():
        alone = made()
        expected_optimizer = make(alone)
        take_steps(alone, expected_optimizer, 3)
        expected = local_full(expected_optimizer, alone)
        for sharding in shardings():
            module = sharded(sharding)
            optimizer = make(module)
            assert rs.full_optim_state_dict(module, optimizer, rank0_only=False)["state"] == {}, "no step was taken yet"
            take_steps(module, optimizer, 3)
            full = rs.full_optim_state_dict(module, optimizer)
            if dist.get_rank():
                assert full == {}
            else:
                assert same(full["state"], expected["state"], exact=False)
                assert full["param_groups"] == expected["param_groups"]
                assert "idle" not in full["state"]
            everywhere = rs.full_optim_state_dict(module, optimizer, rank0_only=False)
            assert same(everywhere["state"], expected["state"], exact=False)
            kept = copy.deepcopy(everywhere["state"])
            take_steps(module, optimizer, 1, first=3)
            assert same(everywhere["state"], kept), "what was gathered does not follow later steps"


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_shards_continue() -> None:
    """Cut from a full one on every rank, scattered from rank 0: the next steps are those of one process."""
    rank = dist.get_rank()
    alone = made()
    expected_optimizer = adamw(alone)
    take_steps(alone, expected_optimizer, 3)
    full = copy.deepcopy(local_full(expected_optimizer, alone))
    weights = {name: value.clone() for name, value in alone.state_dict().items()}
    take_steps(alone, expected_optimizer, 2, first=3)
    for sharding in shardings():
        for scatter in (False, True):
            module = sharded(sharding)
            rs.load_full_state_dict(module, weights if rank == 0 else {})
            optimizer = adamw(module)
            if scatter:
                cut = rs.scatter_full_optim_state_dict(full if rank == 0 else None, module, optim=optimizer)
            else:
                cut = rs.shard_full_optim_state_dict(full, module, optim=optimizer)
            assert all(isinstance(key, int) for key in cut["state"])
            optimizer.load_state_dict(cut)
            weight = module.get_parameter("embed.weight")
            moment = optimizer.state[weight]["exp_avg"]
            assert isinstance(moment, DTensor)
            assert isinstance(weight, DTensor)
            assert moment.placements == weight.placements
            assert moment.to_local().device.type == ("cpu" if sharding.cpu_offload else device_type())
            assert optimizer.param_groups[0]["lr"] == 0.02
            take_steps(module, optimizer, 2, first=3)
            for name, parameter in module.named_parameters():
                is_equal = torch.allclose(whole(parameter), alone.get_parameter(name), atol=1e-6)
                assert is_equal, (name, scatter, sharding)
            again = rs.full_optim_state_dict(module, optimizer)
            if rank == 0:
                assert same(again["state"], local_full(expected_optimizer, alone)["state"], exact=False)


@pytest.mark.all_ranks
@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_against_fsdp1() -> None:
    """The same keys, groups and values as FSDP1's; its own with use_orig_params=True are wrong on torch 2.13."""

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def steps(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            module(rows).square().mean().backward()
            optimizer.step()
        return optimizer

    module = shard_module(plain(), init_mesh(device_type()))
    optimizer = steps(module)
    ours = rs.full_optim_state_dict(module, optimizer, rank0_only=False)
    cpu = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = FullyShardedDataParallel(plain(), device_id=cpu)
        theirs = FullyShardedDataParallel.full_optim_state_dict(flat, steps(flat), rank0_only=False)
        original = FullyShardedDataParallel(plain(), device_id=cpu, use_orig_params=True)
        broken = FullyShardedDataParallel.full_optim_state_dict(original, steps(original), rank0_only=False)
        assert ours.keys() == theirs.keys()
        assert same(ours["state"], theirs["state"], exact=False)
        assert ours["param_groups"] == broken["param_groups"]
        if torch.__version__.startswith("2.13") and dist.get_world_size() > 1:
            held = broken["state"]["0.weight"]
            assert torch.equal(held["exp_avg"], held["exp_avg_sq"]), "FSDP1 gathers both into one buffer"
        unsharded = plain()
        renamed = rs.rekey_optim_state_dict(ours, fsdp.OptimStateKeyType.PARAM_ID, unsharded)
        rekeyed = FullyShardedDataParallel.rekey_optim_state_dict(ours, fsdp.OptimStateKeyType.PARAM_ID, unsharded)
        assert same(renamed["state"], rekeyed["state"])
        alone = torch.optim.AdamW(unsharded.parameters())
        alone.load_state_dict(renamed)
        assert alone.param_groups[0]["lr"] == 0.01
        back = rs.rekey_optim_state_dict(alone.state_dict(), fsdp.OptimStateKeyType.PARAM_NAME, unsharded)
        by_name = (alone.state_dict(), fsdp.OptimStateKeyType.PARAM_NAME, unsharded)
        assert same(back["state"], FullyShardedDataParallel.rekey_optim_state_dict(*by_name)["state"])
    assert same(back["state"], ours["state"])
    assert back["param_groups"][0]["params"] == ours["param_groups"][0]["params"]
    # Ids are paired by position: in the optimizer's order, whatever the order was in the other one.
    backwards = torch.optim.AdamW(list(module.parameters())[::-1], lr=0.01)
    module.zero_grad()
    module(torch.ones(2, 5)).square().mean().backward()
    backwards.step()
    turned = rs.full_optim_state_dict(module, backwards, rank0_only=False)
    alone.load_state_dict(rs.rekey_optim_state_dict(turned, fsdp.OptimStateKeyType.PARAM_ID, unsharded, optim=alone))
    for name, parameter in unsharded.named_parameters():
        assert torch.equal(alone.state[parameter]["exp_avg"], turned["state"][name]["exp_avg"]), name
    # From the unsharded optimizer into the sharded one, which goes on from there.
    optimizer.load_state_dict(rs.scatter_full_optim_state_dict(back if dist.get_rank() == 0 else None, module))
    assert same(rs.full_optim_state_dict(module, optimizer, rank0_only=False)["state"], ours["state"])
    twice = rs.rekey_optim_state_dict(renamed, fsdp.OptimStateKeyType.PARAM_ID, unsharded)
    assert twice["state"].keys() == renamed["state"].keys()


@pytest.mark.all_ranks
@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_forms(root: Path) -> None:
    """`optim_state_dict` in the form that `state_dict_type` chose, as FSDP1 gives and takes it; through DCP, too."""
    rank, fsdp1 = dist.get_rank(), FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # with it FSDP1 gives DTensors

    def made_and_trained(num_steps: int) -> tuple[Any, Any, Any, Any]:
        models: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))
        shard_module(models[0], init_mesh(device_type()))
        models[1] = fsdp1(models[1], device_id=torch.device("cpu"), device_mesh=mesh)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01 * num_steps) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(torch.ones(4, 5)).square().mean().backward()
                optimizer.step()
        return models[0], optimizers[0], models[1], optimizers[1]

    module, optimizer, flat, flat_optimizer = made_and_trained(3)
    everything = rs.full_optim_state_dict(module, optimizer, rank0_only=False)
    for rank0_only, offload in itertools.product((False, True), repeat=2):
        of_optimizer = fsdp.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
        configs = fsdp.FullStateDictConfig(), of_optimizer
        other, fresh, flat_other, flat_fresh = made_and_trained(1)
        with contextlib.ExitStack() as stack:
            for each in (module, other):
                stack.enter_context(state_dict_type(each, FULL, *configs))
            for each in (flat, flat_other):
                stack.enter_context(fsdp1.state_dict_type(each, FULL, *configs))
            found = rs.optim_state_dict(module, optimizer)
            wanted = fsdp1.optim_state_dict(flat, flat_optimizer)
            assert found.keys() == wanted.keys() == (set() if rank0_only and rank else {"state", "param_groups"})
            if found:
                values = [value for held in found["state"].values() for value in held.values() if value.ndim]
                devices = {value.device.type for value in values}
                assert devices == {"cpu" if offload else device_type()}
                assert same(found["state"], wanted["state"], exact=False)
            given = optimizer.state_dict()
            given["param_groups"][0]["lr"] = 9.0
            if changed := rs.optim_state_dict(module, optimizer, given):
                assert changed["param_groups"][0]["lr"] == 9.0
            loaded = rs.optim_state_dict_to_load(other, fresh, found, load_directly=True)
            flat_loaded = fsdp1.optim_state_dict_to_load(flat_other, flat_fresh, wanted)
            named = rs.optim_state_dict_to_load(other, fresh, found, is_named_optimizer=True)
        assert set(loaded["state"]) == {0, 1, 2, 3}, "parameter ids, where FSDP1 has one for each flat parameter"
        assert set(flat_loaded["state"]) == {0}
        assert named["state"].keys() == everything["state"].keys()
        again = rs.full_optim_state_dict(other, fresh, rank0_only=False)
        assert same(again["state"], everything["state"])
        assert again["param_groups"] == everything["param_groups"]
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        path = root / f"{kind.name}-{dist.get_world_size()}"
        with state_dict_type(module, kind), fsdp1.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT):
            found = rs.optim_state_dict(module, optimizer)
            wanted = fsdp1.optim_state_dict(flat, flat_optimizer)
        assert same(found["state"], rs.sharded_optim_state_dict(module, optimizer)["state"])
        assert found["state"].keys() == wanted["state"].keys()
        for name, held in found["state"].items():
            for key, value in held.items():
                assert isinstance(value, DTensor) == bool(value.ndim)
                assert torch.allclose(whole(value), whole(wanted["state"][name][key])), (name, key)
        save_sharded({"optimizer": found}, checkpoint_id=path)
        dist.barrier()  # nobody reads before the files are whole
        other, fresh, *_ = made_and_trained(1)
        with state_dict_type(other, kind):
            state = {"optimizer": rs.optim_state_dict(other, fresh)}
            load_sharded(state, checkpoint_id=path)
            rs.optim_state_dict_to_load(other, fresh, state["optimizer"], load_directly=True)
            wrong = everything if rank == 0 else state["optimizer"]
            with pytest.raises(PlanError, match="no mesh"):
                rs.optim_state_dict_to_load(other, fresh, wrong)
        again = rs.full_optim_state_dict(other, fresh, rank0_only=False)
        assert same(again["state"], everything["state"])
        assert again["param_groups"] == everything["param_groups"]


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_mistakes(root: Path) -> None:
    """Every rank raises alike, and the next call works."""
    rank = dist.get_rank()
    module = sharded()
    optimizer = adamw(module)
    take_steps(module, optimizer, 1)
    full = rs.full_optim_state_dict(module, optimizer, rank0_only=False)
    with pytest.raises(ValueError, match="not the module's"):
        rs.full_optim_state_dict(module, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))
    size = dist.get_world_size()
    odd, half = sgd(module) if rank == size - 1 and rank else optimizer, root / f"half-{size}"
    if size > 1:
        for call in (
            lambda: rs.full_optim_state_dict(module, odd),
            lambda: rs.save_checkpoint(module, half, optimizer=None if rank else optimizer),
        ):
            with pytest.raises(PlanError, match="hold other param groups or state than rank 0's"):
                call()
        assert not half.exists()
    with pytest.raises(PlanError, match="rank 0 has no full_optim_state_dict"):
        rs.scatter_full_optim_state_dict(None, module)
    with pytest.raises(PlanError, match="no full optimizer state dict"):
        rs.scatter_full_optim_state_dict({"nothing": 1} if rank == 0 else None, module)
    strange = {"state": full["state"] | {"stranger": {"step": torch.tensor(1.0)}}, "param_groups": full["param_groups"]}
    with pytest.raises(PlanError, match="stranger"):
        rs.shard_full_optim_state_dict(strange, module)
    with pytest.raises(PlanError, match="stranger"):
        rs.scatter_full_optim_state_dict(strange if rank == 0 else None, module)
    bad = {"state": {"few": {"exp_avg": torch.zeros(3, 3)}}, "param_groups": full["param_groups"]}
    cut = rs.shard_full_optim_state_dict(bad, module)["state"]
    assert not isinstance(next(iter(cut.values()))["exp_avg"], DTensor), "of another shape: whole on every rank"
    with pytest.raises(PlanError, match="param groups of"):
        rs.shard_full_optim_state_dict(full, module, optim=sgd(module))
    with pytest.raises(ValueError, match="both given"):
        rs.shard_full_optim_state_dict(full, module, optim_input=list(module.parameters()), optim=optimizer)
    with pytest.raises(ValueError, match="optim_state_key_type"):
        rs.rekey_optim_state_dict(full, "names", module)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="99"):
        rs.rekey_optim_state_dict({"state": {99: {}}, "param_groups": []}, fsdp.OptimStateKeyType.PARAM_NAME, module)
    pairs = rs.shard_full_optim_state_dict(full, module, optim_input=optimizer.param_groups)
    assert pairs["param_groups"][0]["params"] == [0, 1, 2, 3]


CASES = [("adamw", torch.float32), ("adamw", torch.bfloat16), ("amsgrad", torch.float32), ("plain_sgd", torch.float32)]
CASES += [("adafactor", torch.float32)]


def save_all(root: Path, name: str, device: str = "") -> None:
    """Steps with some optimizers, saves, and what they held."""
    for key, dtype in CASES:
        module = sharded(dtype=dtype, device=device)
        optimizer = OPTIMIZERS[key](module)
        take_steps(module, optimizer, 2)
        rs.save_checkpoint(module, root / f"{key}-{dtype}-{name}", optimizer=optimizer)
        full = rs.full_optim_state_dict(module, optimizer)
        if dist.get_rank() == 0:
            torch.save(full, root / f"{key}-{dtype}.reference")


def load_all(root: Path, names: tuple[str, ...], save_as: str | None, device: str = "") -> None:
    """Load what other world sizes saved, compare it bit for bit, and save it again."""
    for key, dtype in CASES:
        for name in names:
            for sharding in shardings():
                module = sharded(sharding, dtype, device)
                optimizer = OPTIMIZERS[key](module)
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(5.0) if isinstance(group["lr"], torch.Tensor) else 5.0
                path = root / f"{key}-{dtype}-{name}"
                report = rs.load_optimizer_state(module, optimizer, path, loading=Loading(verify="full"))
                assert report.num_tensors == NUM_STATE_TENSORS[key]
                full = rs.full_optim_state_dict(module, optimizer)
                if dist.get_rank() == 0:
                    expected = torch.load(root / f"{key}-{dtype}.reference", weights_only=True)
                    assert same(full["state"], expected["state"]), (key, dtype, sharding)
                    assert full["param_groups"] == expected["param_groups"], (key, dtype, sharding)
                if save_as is not None and sharding == Sharding():
                    rs.save_checkpoint(module, root / f"{key}-{dtype}-{save_as}", optimizer=optimizer)
                take_steps(module, optimizer, 1)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_file_mistakes(root: Path) -> None:
    rank = dist.get_rank()
    path = root / f"saved-{dist.get_world_size()}"
    module = sharded()
    optimizer = adamw(module)
    take_steps(module, optimizer, 1)
    rs.save_checkpoint(module, root / f"bare-{dist.get_world_size()}")
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        rs.load_optimizer_state(module, optimizer, root / f"bare-{dist.get_world_size()}")
    report = rs.save_checkpoint(module, path, optimizer=optimizer)
    assert report.num_tensors == 8 + 2 * 6
    before = rs.full_optim_state_dict(module, optimizer, rank0_only=False)
    with pytest.raises(PlanError, match="2 param groups were saved, the optimizer has 1"):
        rs.load_optimizer_state(module, sgd(module), path)
    with pytest.raises(PlanError, match="the state of AdamW was saved, the optimizer is SGD"):
        rs.load_optimizer_state(module, torch.optim.SGD(optimizer.param_groups, lr=0.1), path)
    rs.load_optimizer_state(module, optimizer, path / "model.safetensors")
    swapped = torch.optim.AdamW([{"params": [p]} for p in list(module.parameters())[:2]])
    with pytest.raises(PlanError, match=r"param group 0: blocks\.0\.bias was saved, the optimizer has it not"):
        rs.load_optimizer_state(module, swapped, path)
    dist.barrier()
    outline = path / "optimizer" / "raysharding.optimizer.json"
    good = outline.read_bytes()
    fields = json.loads(good)
    tensors = {**fields["outline"]["tensors"], "few/exp_avg": [[1, 6], "load", True]}
    wrong: list[dict[str, Any]] = [{"tensors": tensors}, {"values": {"few": {"step": {"kind": "x"}}}}]
    hostile = [{**fields, "format_version": 2}, {**fields, "outline": {}}]
    hostile += [{**fields, "outline": {**fields["outline"], **one}} for one in wrong]
    for data in ("{", "[]", *map(json.dumps, hostile)):
        dist.barrier()
        if rank == 0:
            outline.write_text(data)
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"raysharding\.optimizer\.json"):
            rs.load_optimizer_state(module, optimizer, path)
    dist.barrier()
    if rank == 0:
        outline.write_bytes(good)
        weights = path / "optimizer" / "model.safetensors"
        held = bytearray(weights.read_bytes())
        held[-3] ^= 1
        weights.write_bytes(held)
    dist.barrier()
    assert same(rs.full_optim_state_dict(module, optimizer, rank0_only=False)["state"], before["state"])
    with pytest.raises(CheckpointError, match="crc32"):
        rs.load_optimizer_state(module, optimizer, path, loading=Loading(verify="full"))
    assert same(rs.full_optim_state_dict(module, optimizer, rank0_only=False)["state"], before["state"])


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_offloaded(root: Path) -> None:
    """State that is brought back lies where its parameter does; `meta` stands for the device that computes."""
    for offload in (False, True):
        sharding = Sharding(cpu_offload=offload)
        module = shard_module(made(), init_mesh(device_type(), sharding), sharding)
        optimizer = adamw(module)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        rs.save_checkpoint(module, root / f"offload-{offload}", optimizer=optimizer)
        load = OptimizerLoad.plan(module, optimizer, root / f"offload-{offload}")
        table = TensorTable(load.target.tensors, like=load.module)
        materialize(table, torch.device("meta"))
        shards = [tensor for tensor in table.tensors.values() if isinstance(tensor, DTensor)]
        assert {shard._local_tensor.device.type for shard in shards} == {"cpu" if offload else "meta"}
    # State of another shape than its parameter's is whole on every rank, and comes through the other device.
    with torch.device("meta"):
        skeleton = shard_module(Uneven(), init_mesh(device_type(), Sharding()), Sharding())
    optimizer = adamw(skeleton)
    load.target.apply(skeleton, optimizer, {f"{load.target.names[0]}/row": torch.zeros(3)})
    assert [state["row"].device.type for state in optimizer.state.values() if "row" in state] == ["meta"]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_saved_at_four_ranks_loads_at_any_and_back(tmp_path: Path) -> None:
    run_ranks(4, save_all, tmp_path, "4")
    for world_size in (1, 2, 3):
        run_ranks(world_size, load_all, tmp_path, ("4",), str(world_size))
    run_ranks(4, load_all, tmp_path, ("1", "2", "3"), None)


@on_ranks(sim=(2,))
def test_saved_on_one_device_loads_on_another(root: Path) -> None:
    for saves, loads in itertools.permutations(("cpu", "sim")):
        save_all(root, saves, saves)
        load_all(root, (saves,), None, loads)
