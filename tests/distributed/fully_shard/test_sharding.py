"""Rows A1 to A8 on real groups: `DistModule` and the distribution of rank 0's tensors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.tensor import DTensor

from raysharding import distributed as rs
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, load_state_dict, shard_module, state_dict_type
from raysharding.errors import CheckpointError, PlanError, RayshardingError
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import full, ours
from tests.distributed.models import Odd, filled, on_meta, require_equal, saved
from tests.spawn import device_type, part_of_ranks


def meshes() -> list[Any]:
    """1-D, and HSDP where the ranks make it."""
    sizes = [1] + ([2] if dist.get_world_size() in (2, 4) else [])
    return [init_mesh(device_type(), Sharding(replicate_size=size)) for size in sizes]


def apply_to(module: nn.Module, mesh: Any = None) -> Any:
    rs.apply_fsdp2(module, mesh or init_mesh(device_type()))
    return module


class Lazy(Mapping[str, torch.Tensor]):
    """Items load on access; counts how many are alive at once."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values_by_name = values
        self.num_loads = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.num_loads += 1
        return copy.deepcopy(self.values_by_name[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_a_module_and_its_wrapper() -> None:
    plain = filled()
    wrapped = rs.DistModule(plain)
    assert isinstance(wrapped, nn.Module)
    assert wrapped.module is plain
    assert rs.DistModule(wrapped).module is plain
    for name in ("parameters", "buffers", "modules", "children"):
        assert [id(item) for item in getattr(wrapped, name)()] == [id(item) for item in getattr(plain, name)()], name
    for name in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert dict(getattr(wrapped, name)()).keys() == dict(getattr(plain, name)()).keys(), name
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert list(wrapped.state_dict(prefix="x.")) == list(plain.state_dict(prefix="x."))
    wrapped.extra = 3
    assert plain.extra == 3
    wrapped.scale = nn.Parameter(torch.tensor(4.0))
    assert plain.scale.item() == 4.0
    del wrapped.extra
    assert not hasattr(plain, "extra")
    with pytest.raises(AttributeError, match="'Odd' object has no attribute 'nothing'"):
        wrapped.nothing  # noqa: B018
    with pytest.raises(ValueError, match=r"give a torch\.nn\.Module"):
        rs.DistModule(3)  # type: ignore[arg-type]
    assert wrapped.train() is wrapped
    assert (plain.training, wrapped.training) == (True, True)
    assert wrapped.eval() is wrapped
    assert (plain.training, wrapped.training, plain.norm.training) == (False, False, False)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(wrapped(ids), plain(ids))
    assert torch.equal(wrapped(ids=ids), plain(ids))
    assert wrapped.embed is plain.embed
    assert wrapped.get_parameter("embed.weight") is plain.embed.weight
    assert "Odd(" in repr(wrapped)
    assert {"embed", "load_state_dict"} <= set(dir(wrapped))
    seen: list[nn.Module] = []
    assert wrapped.apply(seen.append) is wrapped
    assert seen[-1] is plain
    twin = copy.deepcopy(wrapped)
    assert twin.module is not plain
    assert torch.equal(twin(ids), plain(ids))
    assert wrapped.to(torch.float64) is wrapped
    assert plain.scale.dtype == torch.float64
    assert wrapped.to_empty(device="meta") is wrapped
    assert plain.scale.is_meta
    assert rs.DistModule(nn.Sequential(nn.Linear(2, 3)))[0].out_features == 3


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_load_state_dict(root: Path) -> None:
    rank = dist.get_rank()
    source = filled(3)
    expected = source.state_dict()
    for mesh in meshes():
        for make in (on_meta, Odd, lambda: Odd().double()):
            model = rs.DistModule(apply_to(make(), mesh))
            assert isinstance(model.module, FSDPModule)
            assert sum(isinstance(item, FSDPModule) for item in model.modules()) == 4, "each block, and the root"
            dtype = model.embed.weight.dtype
            result = model.load_state_dict(Lazy(expected) if rank == 0 else {})
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert model.head.weight is model.embed.weight
            assert model.embed.weight.dtype == dtype
            require_equal(model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in expected.items()})
            ids = torch.arange(6).reshape(2, 3)
            with torch.no_grad():
                assert torch.allclose(model.eval()(ids).cpu().to(torch.float32), source(ids), atol=1e-5)
    plain = rs.DistModule(on_meta())
    with rs.using_group(part_of_ranks()):
        plain.load_state_dict(expected if rank == 0 else {})  # not sharded: every rank gets all
    assert all(torch.equal(plain.state_dict()[name].cpu(), value) for name, value in expected.items())


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_assign(root: Path) -> None:
    rank = dist.get_rank()
    half = {
        name: value.half() if value.is_floating_point() else value for name, value in filled(4).state_dict().items()
    }
    for mesh in meshes():
        model = rs.DistModule(apply_to(Odd(), mesh))
        before = model.embed.weight
        model.load_state_dict(half if rank == 0 else {}, assign=True)
        assert model.embed.weight is not before
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.requires_grad
        require_equal(model, half)
        model(torch.tensor([[1, 2]])).sum().backward()
        assert model.embed.weight.grad.dtype == torch.float16
        with pytest.raises(PlanError, match=r"from torch.float16 into torch.float32, but it ran already"):
            model.load_state_dict(filled(4).state_dict() if rank == 0 else {}, assign=True)
        model.load_state_dict(filled(4).half().state_dict() if rank == 0 else {}, assign=True)
        require_equal(model, half)
    model = rs.DistModule(apply_to(Odd()))
    before = model.embed.weight
    mixed = filled().state_dict() | {"narrow": torch.zeros(2, 64, dtype=torch.bfloat16)}
    with pytest.raises(PlanError, match="the FSDP group of the root"):
        model.load_state_dict(mixed if rank == 0 else {}, assign=True)
    assert model.embed.weight is before
    with pytest.raises(PlanError, match="narrow: the checkpoint's 'narrow' has shape"):
        model.load_state_dict(half | {"narrow": torch.zeros(3).half()} if rank == 0 else {}, assign=True)
    assert model.embed.weight is before


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_mismatches() -> None:
    """Every rank raises alike, before data moves, and the module is as it was."""
    rank = dist.get_rank()
    good = filled(5).state_dict()
    model = rs.DistModule(apply_to(filled(6)))
    before = filled(6).state_dict()
    cases = {
        "missing from the checkpoint: narrow": {k: v for k, v in good.items() if k != "narrow"},
        "unexpected in the checkpoint: other": good | {"other": torch.zeros(2)},
        r"narrow: the checkpoint's 'narrow' has shape \(3, 64\)": good | {"narrow": torch.zeros(3, 64)},
        r"narrow: the checkpoint's 'narrow' is torch.int64": good | {"narrow": torch.zeros(2, 64, dtype=torch.int64)},
        "other: a dict, not a tensor": good | {"other": {}},
        "narrow: on meta, without a value": good | {"narrow": torch.zeros(2, 64, device="meta")},
    }
    for message, state_dict in cases.items():
        with pytest.raises(PlanError, match=message):
            model.load_state_dict(state_dict if rank == 0 else {})
    require_equal(model, before)
    part = {k: v for k, v in good.items() if k != "narrow"} | {"other": torch.zeros(2)}
    result = model.load_state_dict(part if rank == 0 else {}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["narrow"], ["other"])
    require_equal(model, good | {"narrow": before["narrow"]})


class Failing(Lazy):
    """Its last item loads once: for the plan."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if self.num_loads >= len(self):
            raise OSError("the disk is gone")
        return super().__getitem__(name)


class Scaled(nn.Module):
    """A layer with extra state; to set it to an error raises that."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if state == f"wrong on rank {dist.get_rank()}":
            raise ValueError(state)
        self.state = state

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_extra_state(root: Path) -> None:
    """What `set_extra_state` is given is on every rank what one process gives it, from a file too; or all raise."""
    history = {"amax": [torch.ones(2, dtype=torch.bfloat16), 1.5, None], "seen": ("a", float("inf")), "step": 3}
    states = (torch.arange(6.0).reshape(2, 3).t(), history, torch.tensor([True, False]), torch.tensor(2), 7)
    source = nn.Sequential(*map(Scaled, states))
    alone = nn.Sequential(*(Scaled() for _ in states))
    state, rank = source.state_dict(), dist.get_rank()
    assert str(alone.load_state_dict(state)) == "<All keys matched successfully>"
    if rank == 0:
        torch.save(state, root / "extra.pt")
    for strict in (True, False):
        bare, wrapped = (apply_to(nn.Sequential(*(Scaled() for _ in states))) for _ in range(2))
        for result in (
            rs.load_full_state_dict(bare, Lazy(state) if rank == 0 else {}, strict=strict),
            rs.DistModule(wrapped).load_state_dict(load_state_dict(root / "extra.pt"), strict=strict),
        ):
            assert str(result) == "<All keys matched successfully>"
        for module in (bare, wrapped):
            for found, expected in zip(module, alone, strict=True):
                assert repr(found.state) == repr(expected.state)
    module = apply_to(nn.Sequential(Scaled(5), nn.Linear(4, 4)))
    wrong = module.state_dict() | {"1._extra_state": "more"}
    wrong = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in wrong.items()}
    del wrong["0._extra_state"]
    before = module[0].linear.weight.detach().clone()
    with pytest.raises(PlanError, match=r"(?s)missing.*0\._extra_state.*unexpected.*1\._extra_state"):
        rs.load_full_state_dict(module, wrong if rank == 0 else {})
    result = rs.load_full_state_dict(module, wrong if rank == 0 else {}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0._extra_state"], ["1._extra_state"])
    assert module[0].state == 5
    with pytest.raises(PlanError, match=r"0\._extra_state is a PosixPath"):
        rs.load_full_state_dict(module, {"0._extra_state": root} if rank == 0 else {}, strict=False)
    assert torch.equal(module[0].linear.weight.to_local(), before.to_local())
    last = dist.get_world_size() - 1
    with pytest.raises((ValueError, RayshardingError), match=f"wrong on rank {last}"):
        rs.load_full_state_dict(module, {"0._extra_state": f"wrong on rank {last}"} if rank == 0 else {}, strict=False)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_an_item_that_fails() -> None:
    model = rs.DistModule(apply_to(on_meta()))
    expected = (OSError, "the disk is gone") if dist.get_rank() == 0 else (RayshardingError, "the disk is gone")
    with pytest.raises(expected[0], match=expected[1]):
        model.load_state_dict(Failing(filled().state_dict()) if dist.get_rank() == 0 else {})
    assert all(item.is_meta for item in model.parameters()), "garbage must not be left to run on"
    model.load_state_dict(filled(1).state_dict() if dist.get_rank() == 0 else {})
    require_equal(model, filled(1).state_dict())


def distribute(
    state_dict: Mapping[str, torch.Tensor], spec: Mapping[str, torch.Tensor], out: dict[str, torch.Tensor]
) -> None:
    if dist.get_rank() == 0:
        rs.broadcast_and_shard_state_dict(state_dict, spec, out)
    else:
        rs.shard_broadcasted_state_dict(spec, out)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_halves() -> None:
    """`broadcast_and_shard_state_dict` and `shard_broadcasted_state_dict`."""
    rank = dist.get_rank()
    source = filled(7)
    for mesh in meshes():
        model = on_meta()
        rs.apply_fsdp2(model, mesh)
        spec = model.state_dict()
        sharded: dict[str, torch.Tensor] = {"old": torch.zeros(1)}
        distribute(Lazy(saved(source)), spec, sharded)  # without second names of ties
        if rank == 0:
            with pytest.raises(ValueError, match="call broadcast_and_shard_state_dict"):
                rs.shard_broadcasted_state_dict(spec, sharded)
        else:
            with pytest.raises(ValueError, match="call shard_broadcasted_state_dict"):
                rs.broadcast_and_shard_state_dict({}, spec, sharded)
        assert set(sharded) == {"old", *spec}
        del sharded["old"]
        for name, value in sharded.items():
            assert isinstance(value, DTensor) == isinstance(spec[name], DTensor), name
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole.cpu(), source.state_dict()[name]), name
        assert all(value.is_meta for value in spec.values())
        model.load_state_dict(sharded, assign=True)
        assert model.head.weight is model.embed.weight, "an optimizer holds it once"
        require_equal(model, source.state_dict())
        bad = {name: value for name, value in source.state_dict().items() if name != "narrow"}
        with pytest.raises(PlanError, match="missing from the checkpoint: narrow"):
            distribute(bad, spec, {})


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_files(root: Path) -> None:
    """`load_state_dict` of files, one after the other."""
    rank = dist.get_rank()
    source = saved(filled(8))
    names = sorted(source)
    folder = root / f"files-{dist.get_world_size()}"
    if rank == 0:
        folder.mkdir()
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, held in halves.items():
            save_file({name: source[name] for name in held}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        torch.save(source, folder / "old.bin")
        torch.save([1], folder / "list.bin")
    dist.barrier()
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    read = load_state_dict(files[0])
    assert (set(read) == set(names[::2])) if rank == 0 else read == {}
    mapped = load_state_dict(files[0], {"": "cpu", "blocks": "meta", "blocks.1": "cpu", "norm": "disk"})
    for name, value in mapped.items():
        assert value.is_meta == (name.startswith("blocks.") and not name.startswith("blocks.1.")), name
    assert all(value.is_meta for value in load_state_dict(files[0], "meta").values())
    if rank == 0:
        assert all(torch.equal(value, source[name]) for name, value in load_state_dict(folder / "old.bin").items())
        with pytest.raises(CheckpointError, match="holds a list"):
            load_state_dict(folder / "list.bin")
        with pytest.raises(CheckpointError):
            load_state_dict(folder / "none.safetensors")
        with pytest.raises(ValueError, match="device_map='nowhere'"):
            load_state_dict(files[0], "nowhere")
    expected = filled(8).state_dict()
    model = rs.DistModule(apply_to(on_meta()))
    first = model.load_state_dict(load_state_dict(files[0]), strict=False)
    assert set(first.missing_keys) == set(names[1::2])
    assert all(tensor.is_meta for name, tensor in model.named_parameters() if name in names[1::2])
    model.load_state_dict(load_state_dict(files[1]), strict=False)
    require_equal(model, expected)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_a_lazy_item_loads_twice() -> None:
    """For the plan, and to be sent; on rank 0 alone."""
    model = apply_to(on_meta())
    lazy = Lazy(saved(filled(9)))
    rs.load_full_state_dict(model, lazy if dist.get_rank() == 0 else {})
    assert lazy.num_loads == (2 * len(lazy) if dist.get_rank() == 0 else 0)
    require_equal(model, filled(9).state_dict())


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@on_ranks(3, full=(1, 2, 4))
def test_assign_that_differs() -> None:
    model = rs.DistModule(ours())
    if dist.get_world_size() > 1:
        with pytest.raises(PlanError, match="assign is True on some ranks"):
            model.load_state_dict(filled(1).state_dict() if dist.get_rank() == 0 else {}, assign=is_last())
    with pytest.raises(RayshardingError if dist.get_rank() else TypeError):
        model.load_state_dict(None)  # type: ignore[arg-type]
    model.load_state_dict(filled(1).state_dict() if dist.get_rank() == 0 else {})
    assert torch.equal(full(model.large), filled(1).large)


@on_ranks(3, full=(1, 2, 4))
def test_hooks_see_values() -> None:
    """A hook after `load_state_dict` runs once there are values, and not before."""
    for empty in (False, True):
        model = rs.DistModule(ours().to_empty(device="meta") if empty else ours())
        model.module.positions = torch.zeros(2, 5, dtype=torch.int64)
        seen: list[torch.Tensor] = []

        def note(module: nn.Module, keys: Any, seen: list[torch.Tensor] = seen) -> None:
            seen.append(full(module.get_parameter("large")))

        model.module.register_load_state_dict_post_hook(note)
        model.load_state_dict(filled(2).state_dict() if dist.get_rank() == 0 else {})
        assert len(seen) == 1
        assert torch.equal(seen[0], filled(2).large)


@on_ranks(3, full=(1, 2, 4))
def test_apply_that_changes_a_shape() -> None:
    """On one rank alone: it raises its own error, the others one that names it."""
    model = ours()

    def grow(module: nn.Module) -> None:
        if is_last() and isinstance(module, nn.Linear) and module.out_features == 64:
            module.weight = nn.Parameter(torch.zeros(65, 64))

    with pytest.raises(RuntimeError if is_last() else RayshardingError, match="keeps its shape"):
        rs.apply(model, grow)
    assert model.blocks[0].weight.shape == (64, 64)
    rs.apply(model, lambda module: None)


@on_ranks(3, full=(1, 2, 4))
def test_a_parameter_that_is_trained_later() -> None:
    model = filled()
    model.scale.requires_grad_(False)
    shard_module(model, init_mesh(device_type()))
    model.scale.requires_grad_(True)
    ids = torch.tensor([[dist.get_rank(), 3, 5]])
    model(ids).square().mean().backward()
    assert model.scale.grad is not None
    every = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, model.scale.grad)
    assert all(torch.equal(grad, every[0]) for grad in every)


@on_ranks(3, full=(1, 2, 4))
def test_state_dict_forms_after_a_forward() -> None:
    model = ours()
    for form in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with state_dict_type(model, form):
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            held = model.state_dict()
            model(torch.tensor([[1, 2]]))
            model.load_state_dict(kept)
            if form is StateDictType.FULL_STATE_DICT:
                with torch.no_grad():
                    model.scale.zero_()
                    model.norm.get_buffer("running_mean").zero_()
                assert held["scale"].item() != 0, "a full state dict does not follow the module"
                assert held["norm.running_mean"].abs().sum() > 0
        assert torch.equal(full(model.large), filled().large)
