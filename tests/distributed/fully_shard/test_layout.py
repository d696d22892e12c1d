"""Where tensors lie: names as torch gives them, ranges as `torch.chunk` does, and no module kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module, using_group
from raysharding.distributed.comm import all_gather_json
from raysharding.distributed.fully_shard.internals import reshard
from raysharding.distributed.fully_shard.layout import (
    TensorLayout,
    compute_device,
    local_tensor,
    module_tensors,
    named_submodules,
    persistent_names,
    shard_index_of,
)
from raysharding.distributed.fully_shard.same_parameters import weights_fingerprint
from tests.distributed.checks import on_ranks
from tests.distributed.models import Odd
from tests.spawn import part_of_ranks


def odd_tree() -> nn.Module:
    """Shared submodules, ties, tensors that are not there, and a buffer that is not saved."""
    root, shared = nn.Module(), nn.Linear(3, 2)
    root.first = nn.Sequential(shared, nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    root.second = nn.ModuleDict({"again": shared, "deep": nn.Sequential(nn.Sequential(shared))})
    root.register_module("absent", None)
    root.register_buffer("nothing", None)
    root.register_buffer("kept", torch.ones(()))
    root.register_buffer("scratch", torch.ones(0, 4), persistent=False)
    root.tied = root.first[2].weight
    return root


def test_names_and_order_are_those_of_torch() -> None:
    root = odd_tree()
    expected = [*root.named_parameters(), *root.named_buffers()]
    found = list(module_tensors(root).items())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(found, expected, strict=True))
    for aliases in (False, True):
        every = list(root.named_modules(remove_duplicate=not aliases))
        mine = [(name.rstrip("."), item) for name, item in named_submodules(root, aliases=aliases)]
        assert mine == every
    assert persistent_names(root) == set(root.state_dict()) | {"nothing"}


def test_a_tree_in_a_cycle_is_walked_once() -> None:
    root = odd_tree()
    root.get_submodule("first").add_module("parent", root)
    assert [name for name, _ in named_submodules(root)] == [
        f"{name}." if name else "" for name, _ in root.named_modules()
    ]
    assert list(module_tensors(root)) == [name for name, _ in (*root.named_parameters(), *root.named_buffers())]


def test_a_walk_keeps_no_module_alive() -> None:
    root = odd_tree()
    alive = weakref.ref(root)
    gc.disable()
    try:
        module_tensors(root)
        persistent_names(root)
        del root
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 0), (5, 2), (7,), (8, 3, 2), (64, 2)])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
def test_ranges_are_those_of_torch_chunk(shape: tuple[int, ...], num_shards: int) -> None:
    layout = TensorLayout("x", shape, torch.float32, num_shards)
    values = torch.arange(layout.num_elements).view(shape)
    chunks = list(values.chunk(num_shards))
    expected = [chunks[index].reshape(-1).tolist() if index < len(chunks) else [] for index in range(num_shards)]
    found = layout.ranges()
    assert [values.view(-1)[start:stop].tolist() for start, stop in found] == expected
    assert found == [layout.local_range(index) for index in range(num_shards)]


def test_what_every_rank_holds_is_one_range() -> None:
    assert TensorLayout("x", (), torch.float32, 0).ranges() == [(0, 1)]
    assert TensorLayout("x", (3, 4), torch.float32, 0).ranges() == [(0, 12)]


def test_a_module_computes_where_its_mesh_is_not_where_its_shards_lie() -> None:
    def on_mesh(kind: str) -> nn.Module:
        mesh = DeviceMesh(kind, [0], _init_backend=False, _rank=0)
        local = torch.zeros(3)  # host memory, as under Sharding(cpu_offload=True)
        spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(local.shape, local.stride(), local.dtype))
        module = nn.Module()
        module.weight = nn.Parameter(DTensor(local, spec, requires_grad=True))
        return module

    # `meta` stands for a GPU: a type of its own, and here without the index that a real device would be asked for.
    assert compute_device(on_mesh("meta")).type == "meta"
    assert compute_device(on_mesh("cpu")).type == "cpu"
    assert compute_device(odd_tree()).type == "cpu"


@pytest.mark.all_ranks
@on_ranks(4)
def test_weights_have_one_fingerprint_whatever_the_number_of_ranks() -> None:
    """Equal models have one, sharded in every way; after one element of any tensor has changed they have another."""
    groups = [dist.new_group(list(range(size))) for size in (1, 3)]
    meshes = [init_mesh("cpu", group=group) for group in groups if dist.get_rank(group) >= 0]
    meshes += [init_mesh("cpu"), init_mesh("cpu", Sharding(replicate_size=2))]
    every = []
    for mesh in meshes:
        torch.manual_seed(0)
        module = shard_module(Odd(), mesh, Sharding(wrap=["Linear"]))
        first = weights_fingerprint(module)
        with torch.no_grad():
            module.eval()(torch.arange(8).reshape(4, 2))
        assert weights_fingerprint(module) == first  # full parameters of the root are registered
        reshard(module)
        changed = []
        for tensor in [tensor for name, tensor in module_tensors(module).items() if name != "positions"]:  # not saved
            local = local_tensor(tensor).reshape(-1)
            is_held = local.numel() and (not isinstance(tensor, DTensor) or shard_index_of(tensor) == 0)
            kept = local[:1].clone()
            if is_held:
                local[:1] = kept.logical_not()
            changed.append(weights_fingerprint(module))
            if is_held:
                local[:1] = kept
        assert weights_fingerprint(module) == first
        every.append([first, *changed])
        assert len(set(every[-1])) == len(every[-1])
    assert every == every[:1] * len(every)
    assert all(found == every[0] for found in all_gather_json(every[0])), "on any rank"


@on_ranks(1)
def test_weights_that_differ_have_other_fingerprints() -> None:
    """By their places and signs, too; what a forward may write into a buffer that is not saved does not count."""
    square = torch.arange(9.0).reshape(3, 3)
    for one, other in (
        (torch.zeros(768), torch.ones(768)),
        (torch.full((4,), 0.5), torch.full((4,), 0.25)),
        (square, -square),
        (square, square.T.contiguous()),
        (square, square[[1, 0, 2]]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([2.0, 1.0], dtype=torch.bfloat16)),
    ):
        found = []
        for value in (one, one.clone(), other):
            module = nn.Module()
            module.weight = nn.Parameter(value)
            module.register_buffer("scratch", torch.rand(3), persistent=False)
            with using_group(part_of_ranks()):
                found.append(weights_fingerprint(module))
        assert found[0] == found[1] != found[2], (one, other)
