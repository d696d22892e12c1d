"""`ShardedModelGroup.plan`: what it says is what a group then holds, and what is short is named."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import save_file
from torch import nn

from raysharding import Loading, Placement, PlanError, ShardedModelGroup, Sharding, Split
from raysharding.group.cluster.nodes import NodeCapacity, assign
from raysharding.group.launch.memory_plan import GroupPlan
from raysharding.units import GIB
from tests.group.conftest import make_group, make_mlp

pytestmark = pytest.mark.usefixtures("cluster", "nothing_left")


def uneven_model() -> Callable[[], nn.Module]:
    """Rows that no number of ranks divides, a 0-dim parameter, a part to ignore, a frozen one, and a buffer."""

    def build() -> nn.Module:
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 17)
                self.plain = nn.Linear(17, 17)
                self.last = nn.Linear(17, 5)
                self.scale = nn.Parameter(torch.ones(()))
                self.register_buffer("shift", torch.zeros(3))
                self.first.bias.requires_grad_(False)

            def forward(self, x: Any) -> Any:
                return self.last(self.plain(self.first(x))) * self.scale + self.get_buffer("shift").sum()

        return Model()

    return build


def held_bytes() -> Callable[[], dict[str, int]]:
    """A function for `call` that counts what its rank holds."""

    def count() -> dict[str, int]:
        import raysharding
        from raysharding.distributed.fully_shard.internals import reshard
        from raysharding.distributed.fully_shard.layout import local_tensor

        worker = raysharding.current_worker()
        assert worker.optimizer is not None
        reshard(worker.module)
        tensors = [value for state in worker.optimizer.state.values() for value in state.values()]
        return {
            "parameter": sum(local_tensor(tensor).nbytes for tensor in worker.module.parameters()),
            "buffer": sum(tensor.nbytes for tensor in worker.module.buffers()),
            "optimizer": sum(local_tensor(tensor).nbytes for tensor in tensors if tensor is not None),
        }

    return count


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `uneven_model`."""
    path = tmp_path_factory.mktemp("uneven") / "model.safetensors"
    save_file(uneven_model()().state_dict(), path)
    return path


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
HSDP = Sharding(replicate_size=2, ignored_modules="plain")
IN_BF16 = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.* trained parameters are stored in torch.bfloat16")]
CASES: list[Any] = [
    pytest.param(3, Sharding(), None, torch.optim.AdamW, id="uneven"),
    pytest.param(4, HSDP, torch.bfloat16, torch.optim.AdamW, id="hsdp", marks=IN_BF16),
    pytest.param(2, Sharding(wrap=["Linear"]), torch.float64, SGD, id="sgd", marks=pytest.mark.full),
    pytest.param(7, Sharding(), torch.bfloat16, torch.optim.Adagrad, id="empty-shards", marks=IN_BF16),
]


@pytest.mark.parametrize(("world_size", "sharding", "dtype", "optimizer"), CASES)
def test_a_group_holds_what_its_plan_says(
    uneven: Path, world_size: int, sharding: Sharding, dtype: torch.dtype | None, optimizer: Any
) -> None:
    options: dict[str, Any] = {
        "model": uneven_model(),
        "world_size": world_size,
        "sharding": sharding,
        "loading": Loading(dtype=dtype),
        "optimizer": optimizer,
        "placement": Placement(cpus_per_rank=0.5),
    }
    plan = ShardedModelGroup.plan(uneven, device="cpu", **options)
    rows = torch.randn(world_size, 8, dtype=dtype or torch.float32)
    with make_group(uneven, **options) as group:
        group.train_step(Split(rows), loss=mean_of_output())
        held = group.call(held_bytes())
    parts = ("parameter", "buffer", "optimizer")
    assert [{part: getattr(one.footprint, f"{part}_bytes") for part in parts} for one in plan.ranks] == held
    assert plan.fits, plan


def mean_of_output() -> Callable[..., Any]:
    """A loss that pickles by value."""

    def loss(output: Any, *_: Any) -> Any:
        return output.square().mean()

    return loss


def test_a_plan_says_which_resource_is_short_where(checkpoint: Path) -> None:
    nodes = [NodeCapacity("a", cpus=2, host_bytes=1 << 20), NodeCapacity("b", cpus=1, host_bytes=64 * GIB)]
    plan = ShardedModelGroup.plan(checkpoint, model=make_mlp(), world_size=4, nodes=nodes)
    assert not plan.fits
    assert [node.ranks for node in plan.nodes] == [(0, 1), (2,)]
    cpus, memory = plan.shortages
    expected = "4 ranks need 1 CPU each, but there is space for 3 under strategy='PACK' (a has 2 CPU; b has"
    assert cpus.startswith(expected)
    assert memory.startswith("a: host memory: its 2 ranks need 700.00 MiB, 1.00 MiB are free: short by 699.0")
    assert all(text in repr(plan) for text in ("does not fit", "activations", cpus, memory, "no space"))
    assert "<table>" in plan._repr_html_()


def test_a_plan_adds_up_the_ranks_of_a_gpu(tmp_path: Path) -> None:
    save_header_only(tmp_path / "model.safetensors", {"weight": (1_750_000, 4000)})

    def planned(gpus_per_rank: float, gpus: float = 2, **options: Any) -> GroupPlan:
        nodes = [NodeCapacity("a", 64, gpus, 512 * GIB, 24 * GIB)]
        options |= {"model": one_linear(), "sharding": Sharding(wrap="none")}
        placement = Placement(gpus_per_rank=gpus_per_rank)
        return ShardedModelGroup.plan(tmp_path, nodes=nodes, placement=placement, **options)

    part = planned(0.4, 0.4, world_size=1)
    assert (part.device, len(part.nodes[0].ranks)) == ("cuda", 1), "what others left of a GPU counts"
    whole, shared = planned(1.0), planned(0.4)
    assert (whole.world_size, shared.world_size) == (2, 4)
    assert whole.fits, whole
    assert whole.nodes[0].device_bytes == whole.ranks[0].device_bytes
    assert shared.nodes[0].device_bytes == sum(one.device_bytes for one in shared.ranks[:2])
    (short,) = shared.shortages
    assert short.startswith("a: GPU memory: 2 ranks that share a GPU need "), short


def test_a_plan_for_gpus_that_nobody_has_yet(tmp_path: Path) -> None:
    # 7 B parameters in bf16 with AdamW: 7 × (2 + 2 + 2 + 2) GB over 8 ranks fit 24 GiB each, but not over 2.
    save_header_only(tmp_path / "model.safetensors", {"weight": (1_750_000, 4000)})
    options: dict[str, Any] = {"model": one_linear(), "optimizer": torch.optim.AdamW, "sharding": Sharding(wrap="none")}

    def planned(num_nodes: int, gpus: int) -> GroupPlan:
        nodes = [NodeCapacity(f"node {number}", 64, gpus, 512 * GIB, 24 * GIB) for number in range(num_nodes)]
        return ShardedModelGroup.plan(tmp_path, nodes=nodes, **options)

    wide, narrow = planned(2, 8), planned(1, 2)
    assert (wide.world_size, wide.device, narrow.world_size) == (16, "cuda", 2)
    parameters = 1_750_000 * 4000 * 2
    assert sum(one.footprint.parameter_bytes for one in wide.ranks) == parameters
    assert sum(one.footprint.optimizer_bytes or 0 for one in narrow.ranks) == 2 * parameters + 2 * 4
    assert [line.split(":")[1] for line in narrow.shortages] == [" GPU memory"]
    assert "0-15" not in repr(wide)  # ranks of two nodes are not one row
    assert "0-7" in repr(wide)


def save_header_only(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """A valid file whose payload is a hole."""
    header, position = {}, 0
    for name, shape in shapes.items():
        num_bytes = shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + position)


def one_linear() -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torch
        from torch import nn

        with torch.device("meta"):
            return nn.Linear(4000, 1_750_000, bias=False, dtype=torch.bfloat16)

    return build


def test_a_plan_refuses_what_does_not_fit_the_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(PlanError, match=r"missing from the checkpoint: 4\.weight"):
        ShardedModelGroup.plan(checkpoint, model=another_mlp(), world_size=2, nodes=[])

    def broken(_: Any) -> Any:
        raise KeyError("lr")

    with pytest.raises(PlanError, match=r"optimizer=.*broken raised KeyError: 'lr'"):
        ShardedModelGroup.plan(checkpoint, model=make_mlp(), world_size=2, nodes=[], optimizer=broken)
    with pytest.raises(ValueError, match="give world_size"):
        ShardedModelGroup.plan(checkpoint, model=make_mlp(), device="cuda", nodes=[NodeCapacity("a", 4)])
    for cpus, world_size in ((4, 2), (1, 1)):  # as a group chooses
        plan = ShardedModelGroup.plan(checkpoint, model=make_mlp(), nodes=[NodeCapacity("a", cpus)])
        assert plan.world_size == world_size


def another_mlp() -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))

    return build


class NeedsValues(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].grad.norm().item()
        return super().step(closure)


def test_an_optimizer_whose_step_needs_values_is_said_to_be_unknown(checkpoint: Path) -> None:
    plan = ShardedModelGroup.plan(
        checkpoint, model=make_mlp(), world_size=2, nodes=[NodeCapacity("a", 4)], optimizer=NeedsValues
    )
    assert [one.footprint.optimizer_bytes for one in plan.ranks] == [None, None]
    assert any("NeedsValues is unknown" in note for note in plan.notes)
    assert any("free host memory is unknown" in note for note in plan.notes)


def test_the_clusters_own_nodes_are_looked_at_and_no_actor_is_started(checkpoint: Path) -> None:
    plan = ShardedModelGroup.plan(checkpoint, model=make_mlp(), world_size=2)
    assert plan.fits, plan
    (node,) = plan.nodes
    assert node.room.name == ray.util.get_node_ip_address()
    assert node.room.cpus == ray.available_resources()["CPU"]
    assert node.room.host_bytes is not None
    assert node.room.host_bytes > GIB / 4
    assert node.ranks == (0, 1)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("PACK", [1, 1, 1, 0]),
        ("STRICT_PACK", [1, 1, 1]),
        ("SPREAD", [1, 1, 0, 2]),
        ("STRICT_SPREAD", [1, 0, 2]),
    ],
)
def test_ranks_are_assigned_as_the_strategy_says(strategy: str, expected: list[int]) -> None:
    rooms = [NodeCapacity("a", 1), NodeCapacity("b", 3), NodeCapacity("c", 1)]
    assert assign(4, rooms, {"CPU": 1.0}, strategy) == expected
