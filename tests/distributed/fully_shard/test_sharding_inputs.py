"""A root's inputs come to its device, in any container."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from raysharding.batch import RankBatch, Split
from raysharding.distributed.fully_shard.module_hooks import move_inputs, move_inputs_before_forward
from raysharding.distributed.training.step import train_step
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import build, fsdp1, rows, sharded
from tests.distributed.training.training_cases import Scaled, token_mean

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


def found(tree: Any) -> torch.Tensor:
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
        assert found(moved).device == META, name
        assert found(tree).device.type == "cpu", "the caller's own stays"
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
        self.devices = [found(first).device, found(second).device]
        return self.line(found(first)) if self.devices[0].type == "cpu" else None


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
    batch = RankBatch(
        (), {"tokens": Split(torch.ones(2, 3, dtype=torch.long)), "labels": Split(torch.ones(2, 4))}, 2, (2,)
    )
    # Numbers of a tensor without memory are what nobody can have: by then all of the batch has been moved.
    with Moves(), pytest.raises((RuntimeError, ValueError)):  # type: ignore[no-untyped-call]
        train_step(module, torch.optim.SGD(module.parameters(), lr=0.1), batch, loss=token_mean)
    assert Moves.shapes >= {(2, 3), (2, 4)}
