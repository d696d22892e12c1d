"""Boxes that make up a tensor: do they cover it, and which of them lie in a part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from operator import add

Size = tuple[int, ...]
Box = tuple[Size, Size]
"""First index in each dimension, and shape."""


def tiling_problem(shape: Size, boxes: Sequence[Box]) -> str:
    """Say what is wrong where the boxes do not cover every element of `shape` once; empty where they do.

    Costs about 1 µs for each box where they are cut along one dimension, and that times the boxes in a row where they
    are cut along more.

    Args:
        shape: Of the whole.
        boxes: Each with elements, and of as many dimensions as `shape`.
    """
    for offsets, sizes in boxes:
        if any(end > dim for end, dim in zip(map(add, offsets, sizes), shape, strict=True)):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} reaches out of shape {list(shape)}"
    # A sweep along the dimension with most cuts: few boxes are open at a time.
    dims = range(len(shape))
    along = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}), default=None)
    if along is not None:
        open_boxes: list[Box] = []
        for box in sorted(boxes, key=lambda box: box[0][along]):
            open_boxes = [other for other in open_boxes if other[0][along] + other[1][along] > box[0][along]]
            for other in open_boxes:
                if intersection(box, other) is not None:
                    return f"two chunks overlap: at {list(other[0])} of shape {list(other[1])}, and at {list(box[0])}"
            open_boxes.append(box)
    elif len(boxes) > 1:
        return f"{len(boxes)} chunks hold its only element"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"its chunks hold {covered} of the {math.prod(shape)} elements of shape {list(shape)}: one is missing"
    return ""


def intersection(first: Box, second: Box) -> Box | None:
    """The box that two boxes share; `None` where they share no element."""
    begins = tuple(map(max, first[0], second[0]))
    ends = (
        min(b + s for b, s in pair) for pair in zip(zip(*first, strict=True), zip(*second, strict=True), strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def _ends(box: Box) -> Iterator[int]:
    return map(add, *box)


def slabs(shape: Size, max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are contiguous in a row-major tensor of `shape`, in their order there.

    Args:
        shape: Of the tensor; nothing comes where it has no element.
        max_elements: In each box, at least 1.
    """
    if not math.prod(shape):
        return
    along = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= max_elements), None)
    if along is None:
        yield (), ()
        return
    rows = max(1, max_elements // math.prod(shape[along + 1 :]))
    zeros = (0,) * (len(shape) - along - 1)
    for before in product(*map(range, shape[:along])):
        for first in range(0, shape[along], rows):
            count = min(rows, shape[along] - first)
            yield (*before, first, *zeros), (*(1,) * along, count, *shape[along + 1 :])


def is_contiguous(sizes: Size, shape: Size) -> bool:
    """Whether a box of `sizes` is one run of elements in a row-major tensor of `shape`."""
    inner = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[inner + 1 :] == shape[inner + 1 :]


def offset_of(index: Size, shape: Size) -> int:
    """Elements before `index` in a row-major tensor of `shape`."""
    position = 0
    for place, dim in zip(index, shape, strict=True):
        position = position * dim + place
    return position
