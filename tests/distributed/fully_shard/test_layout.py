"""Where tensors lie, in names and ranges, and how much of them each rank holds under each of FSDP1's strategies."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raysharding import distributed as rs
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm import all_gather_json
from raysharding.distributed.footprint import gathered_bytes
from raysharding.distributed.fully_shard.internals import fsdp_groups, reshard
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
from raysharding.models import build_module, wrap_groups
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    Block,
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    gradients,
    mine,
    rows,
)
from tests.distributed.models import Odd, filled, require_equal, saved
from tests.distributed.training.training_cases import llama
from tests.spawn import device_type, part_of_ranks


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
    expected = [f"{name}." if name else "" for name, _ in root.named_modules()]
    assert [name for name, _ in named_submodules(root)] == expected
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
            with rs.using_group(part_of_ranks()):
                found.append(weights_fingerprint(module))
        assert found[0] == found[1] != found[2], (one, other)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def wide() -> nn.Module:
    """Four blocks that hold nearly all parameters, in sizes that need no padding."""
    return nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 4))


def held_bytes(module: nn.Module) -> int:
    """Parameters that this rank holds between steps."""
    return sum(local_tensor(item).nbytes for item in module.parameters())


def full_bytes(module: nn.Module) -> int:
    """Full parameters that this rank holds beside its shards, now."""
    outputs = [out for group in fsdp_groups(module) for item in group.fsdp_params for out in item.all_gather_outputs]
    return sum(output.untyped_storage().nbytes() for output in outputs)


def fsdp1_bytes(module: Any) -> tuple[int, int]:
    """The same two figures of FSDP1."""
    flats = [handle.flat_param for handle in module._all_handles]
    local = sum(flat._local_shard.untyped_storage().nbytes() for flat in flats if hasattr(flat, "_local_shard"))
    padded = [flat._full_param_padded for flat in flats if hasattr(flat, "_full_param_padded")]
    if not padded:  # NO_SHARD: the one parameter is the full one
        return sum(flat.untyped_storage().nbytes() for flat in flats), 0
    return local, sum(tensor.untyped_storage().nbytes() for tensor in padded)


def measure(strategy: str) -> dict[str, tuple[float, float]]:
    """Bytes held, and full bytes between forward and backward, in parts of the whole model; ours and FSDP1's."""
    world_size = dist.get_world_size()
    ranks_per_node = world_size // 2 if "HYBRID" in strategy else None
    sharding = Sharding.from_strategy(strategy, world_size, ranks_per_node, wrap=["Block"])
    mesh = init_mesh(device_type(), sharding)
    total = sum(item.nbytes for item in build(wide).parameters())
    module = shard_module(build(wide), mesh, sharding)
    options: dict[str, Any] = {"device_mesh": mesh} if "HYBRID" in strategy else {}
    oracle = fsdp1(build(wide), sharding_strategy=ShardingStrategy[strategy], **options)
    batch = mine(rows(8, 64))
    held = held_bytes(module)
    loss, expected = module(batch).square().mean(), oracle(batch).square().mean()
    live, theirs = full_bytes(module), fsdp1_bytes(oracle)
    loss.backward()
    expected.backward()
    assert full_bytes(module) == 0
    # Without sharding FSDP1's own method is torch's; ours counts copies once.
    assert torch.allclose(rs.clip_grad_norm_(module, 0.01), oracle.clip_grad_norm_(0.01), rtol=1e-5)
    assert_same(gradients(module), fsdp1_gradients(oracle), rtol=1e-4)
    return {"ours": (held / total, live / total), "fsdp1": (theirs[0] / total, theirs[1] / total)}


@on_ranks(4)
def test_memory_of_each_strategy() -> None:
    """Ours is FSDP1's, within the padding of a flat parameter."""
    root = 0.005  # the head: the root's group keeps it until backward
    expected = {
        "FULL_SHARD": (0.25, root),
        "SHARD_GRAD_OP": (0.25, 1.0),
        "NO_SHARD": (1.0, 0.0),
        "HYBRID_SHARD": (0.5, root),
        "_HYBRID_SHARD_ZERO2": (0.5, 1.0),
    }
    for name, figures in expected.items():
        for who, found in measure(name).items():
            assert found == pytest.approx(figures, abs=0.02), (name, who)


@on_ranks(1, 4, sim=(4,))
def test_replicas_load_train_and_save(root: Path) -> None:
    """A replica on each rank, and a replica for each half: every way in and out works on a shard axis of 1 and 2."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = filled().state_dict()
    if rank == 0:
        save_file(saved(filled()), root / "odd.safetensors")
    dist.barrier()
    for strategy, ranks_per_node in (("NO_SHARD", None), ("hybrid_shard", world_size // 2 or 1)):
        sharding = Sharding.from_strategy(strategy, world_size, ranks_per_node)
        module: Any = build_module(Odd, open_checkpoint(root / "odd.safetensors"), None)
        shard_module(module, init_mesh(device_type(), sharding), sharding)
        rs.load_checkpoint(module, root / "odd.safetensors")
        if strategy == "NO_SHARD":
            held = {name: local_tensor(item).cpu() for name, item in module.named_parameters()}
            assert all(torch.equal(item, expected[name]) for name, item in held.items())
        require_equal(module, expected)
        ids = torch.arange(8).view(2, 4)
        twin = filled()
        for each in (module, twin):
            each.train()(ids).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        assert torch.allclose(rs.clip_grad_norm_(module, 0.5).cpu(), norm, rtol=1e-5)
        assert_same(gradients(module), gradients(twin), rtol=1e-4)
        folder = root / f"{strategy}-{world_size}"
        rs.save_checkpoint(module, folder)
        again: Any = shard_module(build_module(Odd, open_checkpoint(folder), None), init_mesh(device_type()))
        rs.load_checkpoint(again, folder)
        before, after = (dict(item.named_parameters()) for item in (module, again))
        assert all(torch.equal(before[name].full_tensor(), after[name].full_tensor()) for name in ("large", "narrow"))


def test_names_and_enums_are_taken() -> None:
    for name, theirs in ShardingStrategy.__members__.items():
        ours = Sharding.from_strategy(theirs, 4, 2)
        assert ours == Sharding.from_strategy(name.lower(), 4, 2)
        assert name in STRATEGIES
    assert Sharding.from_strategy("NO_SHARD", 6).replicate_size == 6
    assert Sharding.from_strategy("HYBRID_SHARD", 6, 2, wrap="none") == Sharding(wrap="none", replicate_size=3)
    with pytest.raises(ValueError, match=r"strategy='zero3'.*FULL_SHARD"):
        Sharding.from_strategy("zero3", 4)
    for ranks_per_node in (None, 3, 0):
        with pytest.raises(ValueError, match=r"ranks_per_node=.*needs the number of ranks on each node"):
            Sharding.from_strategy("HYBRID_SHARD", 4, ranks_per_node)


def test_what_is_not_freed_counts_as_gathered_all_along() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model: Any = llama()

    def size(*parts: nn.Module) -> int:
        return sum(parameter.nbytes for part in parts for parameter in part.parameters())

    def gathered(**fields: Any) -> int:
        sharding = Sharding(**fields)
        return gathered_bytes(model, sharding, wrap_groups(model, sharding))

    head, layers = size(model.model.norm, model.lm_head), size(*model.model.layers)
    assert len(model.model.layers) == 2
    assert gathered() == head + layers
    assert gathered(reshard_after_forward=True) == sum(sorted((head, layers // 2, layers // 2))[1:])
    assert gathered(reshard_after_forward=False) == size(model)
