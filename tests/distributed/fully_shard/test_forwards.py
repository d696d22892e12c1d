"""What FSDP asks of a forward, and gives it: groups in one order, calls of blocks, inputs in any container, views."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from raysharding.batch import RankBatch, Split, deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.distributed.comm import init_mesh, rank_name
from raysharding.distributed.fully_shard.execution_order import check_execution_order
from raysharding.distributed.fully_shard.internals import reset_iteration, reshard
from raysharding.distributed.fully_shard.module_hooks import move_inputs, move_inputs_before_forward
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.step import train_step
from raysharding.errors import PlanError
from raysharding.worker import Worker
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import build, fsdp1, full, rows, sharded
from tests.distributed.training.training_cases import Scaled, token_mean
from tests.spawn import device_type


class Routed(nn.Module):
    """Each row goes to the expert that the sign of its first element picks."""

    recompute = False
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0).long() == index).nonzero()[:, 0]
            if len(rows):
                out[rows] = checkpoint(expert, x[rows], use_reentrant=False) if self.recompute else expert(x[rows])
        if self.fails:
            raise ValueError("after the experts")
        return self.head(out)


def recorded(wrap: str) -> Any:
    """`Routed`, cut over all ranks."""
    torch.manual_seed(0)
    sharding = Sharding(wrap=wrap)
    return shard_module(Routed(), init_mesh(device_type(), sharding), sharding)


@on_ranks(3)
def test_ranks_that_ran_other_groups_all_raise() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = recorded("auto")
    rows = torch.ones(2, 8) * (1 if rank == 0 else -1)
    with torch.no_grad():
        mixed = module(rows)
    with pytest.raises(PlanError, match=r"experts\.[01].*experts\.[01].*wrap='none'") as caught:
        check_execution_order(module)
    own, other = (1, 0) if rank == 0 else (0, 1)
    here, there = rank_name(rank), rank_name(int(rank == 0))
    assert f"rank {here} (this one) ran experts.{own} and rank {there} ran experts.{other}" in str(caught.value)
    torch.manual_seed(0)
    assert not torch.allclose(mixed, Routed()(rows)), "this is what the check is for"

    # Later forwards are judged by themselves, and one that was mixed before the last is found, too.
    same = torch.ones(2, 8) * torch.tensor([[1.0], [-1.0]])
    module(same).sum().backward()
    check_execution_order(module)
    with torch.no_grad():
        module(rows)
        module(same)
    with pytest.raises(PlanError, match="before the last"):
        check_execution_order(module)
    assert world_size == 3


@on_ranks(3)
def test_equal_orders_pass() -> None:
    module = recorded("auto")
    same = torch.ones(2, 8) * torch.tensor([[1.0], [-1.0]])
    # Forwards that activation checkpointing runs again inside backward do not count.
    module.recompute = dist.get_rank() == 0
    for _ in range(2):
        output = module(same)
        check_execution_order(module)
        output.sum().backward()
    # What an exception cut short says nothing about the next forward.
    module.fails = True
    with torch.no_grad(), pytest.raises(ValueError, match="after the experts"):
        module(same[dist.get_rank() % 2 :][:1])
    module.reshard()
    reset_iteration(module)
    module.fails = False
    module(same)
    check_execution_order(module)


@on_ranks(3)
def test_a_module_without_groups_is_not_checked() -> None:
    module = recorded("none")
    module(torch.ones(2, 8) * (1 if dist.get_rank() == 0 else -1))
    check_execution_order(module)
    check_execution_order(nn.Linear(2, 2))


NUM_TOKENS, WIDTH = 11, 8


class ScaledHead(nn.Module):
    """A `Linear` with a bias gives a view of an input of three dims. The scale is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids) * self.scale)


class Shorter(nn.Module):
    """Drops the first position."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden)))[:, 1:]


class Shorters(nn.Module):
    """Adds to the outputs of blocks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Shorter() for _ in range(3))
        self.position = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += self.position
        return self.head(hidden)


def entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels[:, -output.shape[1] :].flatten())


def divided(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output.div_(2.0)
    return entropy(output, labels)


def masked(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output[..., 0] = -1e9
    return entropy(output, labels)


def squeezed(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output.unsqueeze(0).squeeze(0).div_(2.0)
    return entropy(output, labels)


OF_BLOCKS = {"wrap": ["Shorter"]}
VIEWS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Mapping[str, Any]]] = {
    "divided": (ScaledHead, divided, {}),
    "masked": (ScaledHead, masked, {"wrap": "none"}),
    "squeezed": (ScaledHead, squeezed, {}),
    "blocks": (Shorters, divided, OF_BLOCKS),
    "blocks of the root": (Shorters, divided, {"wrap": "none"}),
    "checkpointed": (Shorters, divided, {**OF_BLOCKS, "activation_checkpointing": True}),
    "compiled": (Shorters, divided, {**OF_BLOCKS, "compile": "eager"}),
}


@on_ranks(2)
def test_views_that_are_changed_in_place_train_as_in_one_process() -> None:
    for name, (make, loss, options) in VIEWS.items():
        torch.manual_seed(0)
        twin = make()
        module = sharded(twin, Sharding(**options))
        optimizer, twin_optimizer = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (module, twin))
        batch = {"ids": torch.randint(NUM_TOKENS, (5, 6)), "labels": torch.randint(1, NUM_TOKENS, (5, 6))}
        for _ in range(3):
            metrics = train_step(module, optimizer, dealt(**batch), loss=loss)
            value = loss(twin(batch["ids"]), batch["labels"])
            twin_optimizer.zero_grad()
            value.backward()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
            twin_optimizer.step()
            assert metrics == pytest.approx({"loss": value.item(), "grad_norm": norm.item()}, abs=1e-5), name
        reshard(module)
        weights = dict(twin.named_parameters())
        assert all(torch.allclose(full(one), weights[fqn], rtol=0, atol=1e-5) for fqn, one in module.named_parameters())


def dealt(**batch: torch.Tensor) -> RankBatch:
    return deal((), {key: Split(value) for key, value in batch.items()}, dist.get_world_size())[dist.get_rank()]


class Detached(ScaledHead):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).detach().requires_grad_()


@on_ranks(2)
def test_a_step_without_any_gradient_is_refused() -> None:
    module = sharded(Detached(), Sharding())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    ids = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="gave none of the 4 trainable parameters of Detached a gradient"):
        train_step(module, optimizer, dealt(ids=ids, labels=ids), loss=entropy)


META = torch.device("meta")
Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    value: torch.Tensor
    note: str = "kept"


def containers() -> dict[str, Any]:
    """Name → a container that holds `rows(2)` somewhere."""
    value = rows(2)
    return {
        "tensor": value,
        "list": [value, 3],
        "tuple": (value, None),
        "namedtuple": Pair(value, "right"),
        "dict": {"deep": [{"deeper": (value,)}]},
        "dataclass": Record(value),
        "UserDict": UserDict(value=value),
        "packed": pack_sequence([value]),
    }


def inside(tree: Any) -> torch.Tensor:
    """The tensor inside."""
    while not isinstance(tree, torch.Tensor):
        if isinstance(tree, dict | UserDict):
            tree = next(iter(tree.values()))
        else:
            tree = tree.value if isinstance(tree, Record) else tree[0]
    return tree


def test_every_container_moves() -> None:
    for name, tree in containers().items():
        moved = move_inputs(tree, META)
        assert type(moved) is type(tree), name
        assert inside(moved).device == META, name
        assert inside(tree).device.type == "cpu", "the caller's own stays"
        assert move_inputs(tree, torch.device("cpu")) is tree, "nothing is made anew where nothing moves"
    assert move_inputs(Pair(rows(2), "right"), META).right == "right"
    assert move_inputs(Record(rows(2)), META).note == "kept"
    assert move_inputs(pack_sequence([rows(2)]), META).batch_sizes.device.type == "cpu", "torch wants them there"
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": rows(2), "length": 2})
    moved = move_inputs(encoding, META)
    assert type(moved) is type(encoding)
    assert (moved["input_ids"].device, moved["length"]) == (META, 2)


class Taker(nn.Module):
    """Takes any of the containers, by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.devices: list[torch.device] = []

    def forward(self, first: Any, *, second: Any) -> Any:
        self.devices = [inside(first).device, inside(second).device]
        return self.line(inside(first)) if self.devices[0].type == "cpu" else None


def test_hook_moves_arguments_and_keywords() -> None:
    module = Taker()
    move_inputs_before_forward(module, META)
    module([rows(2)], second=Record(rows(2)))
    assert module.devices == [META, META]


@on_ranks(2)
def test_fsdp1_takes_the_same() -> None:
    module, oracle = sharded(build(Taker), wrap="none"), fsdp1(build(Taker), wrap=())
    for name, tree in containers().items():
        assert torch.equal(module(tree, second=tree), oracle(tree, second=tree)), name


class Moves(TorchDispatchMode):
    """Notes the shapes of tensors that are copied to meta."""

    shapes: ClassVar[set[tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_meta:
            Moves.shapes.add(tuple(result.shape))
        return result


@on_ranks(1)
def test_labels_that_the_loss_function_alone_takes_move_with_the_batch() -> None:
    module = Scaled().to(META)  # stands for a GPU
    columns = {"tokens": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 4)}
    batch = RankBatch((), {name: Split(column) for name, column in columns.items()}, 2, (2,))
    # Numbers of a tensor without memory are what nobody can have: by then all of the batch has been moved.
    with Moves(), pytest.raises((RuntimeError, ValueError)):  # type: ignore[no-untyped-call]
        train_step(module, torch.optim.SGD(module.parameters(), lr=0.1), batch, loss=token_mean)
    assert Moves.shapes >= {(2, 3), (2, 4)}


class Bypassing(nn.Module):
    """Calls `forward` of its block by hand, past the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4] to [N, 4]."""
        return self.blocks[0].forward(x)


@pytest.mark.all_ranks
@on_ranks(2)
def test_the_error_of_a_block_that_is_not_called_names_a_cure_that_helps(root: Path) -> None:
    torch.manual_seed(0)
    reference, path = Bypassing(), root / "bypassing.safetensors"
    if dist.get_rank() == 0:
        save_file(reference.state_dict(), path)
    dist.barrier()
    for wrap in ("auto", "none"):
        worker = Worker(dist.get_rank(), 2, dist.get_rank(), "cpu")
        worker.build(Bypassing, open_checkpoint(path), Sharding(wrap=wrap))
        worker.load()
        batch = deal((torch.ones(2, 4),), {}, 2)[dist.get_rank()]
        if wrap == "none":
            torch.testing.assert_close(worker.forward(batch).value, reference(torch.ones(2, 4)).detach())
            continue
        with pytest.raises(RuntimeError) as caught:
            worker.forward(batch)
        assert 'Sharding(wrap="none")' in " ".join(caught.value.__notes__)
