"""`BlockTensor` against torch: the same operations on boxes and on tensors that number their elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.models.blocks import BlockTensor, UnsupportedOperationError


def rebuilt(result: BlockTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the runs of `result` say, read from the sources."""
    flat = torch.full((result.numel(),), -1, dtype=torch.int64)
    runs = result.runs(10**6)
    assert runs is not None
    assert [run.target_start for run in runs] == sorted(run.target_start for run in runs)
    for run in runs:
        stop = run.target_start + run.num_elements
        assert bool((flat[run.target_start : stop] == -1).all()), "ranges overlap"
        flat[run.target_start : stop] = sources[run.source].flatten()[run.source_start :][: run.num_elements]
    return flat.reshape(tuple(result.shape))


def numbered(count: int, shape: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[Any]]:
    size = torch.Size(shape).numel()
    tensors = [torch.arange(index * size, (index + 1) * size).reshape(shape) for index in range(count)]
    sources = {str(index): tensor for index, tensor in enumerate(tensors)}
    blocks = [BlockTensor.of_source(name, tensor.shape, tensor.dtype) for name, tensor in sources.items()]
    return sources, tensors, blocks


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_chain_of_moves_equals_torchs(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    sources, tensors, blocks = numbered(data.draw(st.integers(1, 4)), shape)
    many: Any = tensors
    boxes: Any = blocks
    for _ in range(data.draw(st.integers(1, 4))):
        dims = many[0].dim()
        dim = data.draw(st.integers(-dims, dims - 1)) if dims else 0
        move = data.draw(st.sampled_from(["cat", "stack", "chunk", "unbind", "split", "unsqueeze", "squeeze", "turn"]))
        if move in ("cat", "stack") and (dims or move == "stack"):
            function = torch.cat if move == "cat" else torch.stack
            many, boxes = [function(many, dim=dim)], [function(boxes, dim=dim)]
        elif move == "turn" and dims:
            many, boxes = ([item.transpose(0, dim).reshape(-1) for item in items] for items in (many, boxes))
            size = many[0].numel()
            if shapes := [(part, size // part) for part in (2, 3) if size % part == 0]:
                shape = data.draw(st.sampled_from(shapes))
                many, boxes = ([item.reshape(shape) for item in items] for items in (many, boxes))
        elif move == "squeeze":
            many, boxes = [item.squeeze() for item in many], [item.squeeze() for item in boxes]
        elif move == "unsqueeze":
            many, boxes = [item.unsqueeze(dim) for item in many], [item.unsqueeze(dim) for item in boxes]
        elif dims:
            argument = {"chunk": (2,), "split": (1,), "unbind": ()}[move if move != "cat" else "unbind"]
            function = getattr(torch, move if move != "cat" else "unbind")
            many = [part for item in many for part in function(item, *argument, dim=dim)]
            boxes = [part for item in boxes for part in function(item, *argument, dim=dim)]
            uniform = {tuple(item.shape) for item in many}
            if len(uniform) > 1:
                many, boxes = many[:1], boxes[:1]
    assert [tuple(item.shape) for item in many] == [tuple(item.shape) for item in boxes]
    for item, box in zip(many, boxes, strict=True):
        assert torch.equal(rebuilt(box, sources), item)


def test_neighbouring_ranges_are_joined() -> None:
    _, _, (whole,) = numbered(1, (6, 4))
    joined: Any = torch.cat(list(torch.chunk(whole, 3, dim=0)), dim=0)
    runs = joined.runs(10)
    assert [(run.source_start, run.target_start, run.num_elements) for run in runs or ()] == [(0, 0, 24)]


def test_too_many_ranges_are_not_listed() -> None:
    _, _, (whole,) = numbered(1, (6, 4))
    halves: Any = torch.chunk(whole, 2, dim=1)
    assert len(halves[0].runs(6) or ()) == 6
    assert halves[0].runs(5) is None


def test_a_reshape_of_one_range_keeps_it() -> None:
    sources, tensors, (whole,) = numbered(1, (4, 2, 3))
    part = whole.narrow(0, 1, 2).reshape(2, -1)
    assert torch.equal(rebuilt(part, sources), tensors[0][1:3].reshape(2, 6))
    assert len(part.blocks) == 1


def test_a_reshape_of_too_many_ranges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, (whole,) = numbered(1, (4, 2, 3))
    monkeypatch.setattr("raysharding.models.blocks.MAX_RUNS", 3)
    with pytest.raises(UnsupportedOperationError, match="more than 3 contiguous ranges"):
        whole.narrow(1, 0, 1).reshape(-1)


@pytest.mark.parametrize(
    "function",
    [lambda box: torch.flip(box, (0,)), lambda box: torch.add(box, 1)],
    ids=["flip", "add"],
)
def test_other_operations_are_refused(function: Any) -> None:
    _, _, (whole,) = numbered(1, (2, 2))
    with pytest.raises(UnsupportedOperationError):
        function(whole)


def test_mixed_dtypes_and_shapes_are_refused() -> None:
    one: Any = BlockTensor.of_source("a", (2, 2), torch.float32)
    half: Any = BlockTensor.of_source("b", (2, 2), torch.float16)
    wide: Any = BlockTensor.of_source("b", (2, 3), torch.float32)
    with pytest.raises(UnsupportedOperationError):
        torch.cat([one, half])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([one, wide])
