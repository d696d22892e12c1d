"""`BlockTensor`: a tensor without data that records the boxes of source tensors that fill it.

transformers' conversion operations run unchanged on a `BlockTensor` (torch dispatches on `__torch_function__`): stack,
concatenate, chunk, split and reshape only move boxes, so the result is a list of contiguous ranges of the files. Any
other operation raises `UnsupportedOperationError`; such a conversion must run on real tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


class UnsupportedOperationError(TypeError):
    """An operation that does more than move boxes."""


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a source tensor that is also a range of the target, both flattened row-major."""

    source: str
    """Key in the checkpoint."""
    source_start: int
    """First element in the flattened source."""
    target_start: int
    """First element in the flattened full target."""
    num_elements: int
    """Length of the range, in elements."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the target, filled from one source at constant strides."""

    source: str
    """Key in the checkpoint."""
    offset: int
    """Index of the element of the flattened source that fills the box's first corner."""
    start: tuple[int, ...]
    """The box's first corner in the target."""
    size: tuple[int, ...]
    """The box's extent in each dim."""
    strides: tuple[int, ...]
    """Elements of the source for one step along each dim of the target."""


Shape: TypeAlias = tuple[int, ...]


def row_major_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class BlockTensor:
    """A tensor without data, defined by the sources of its elements.

    Args:
        shape: Shape of the tensor.
        dtype: dtype of all sources.
        blocks: Boxes that fill the tensor without overlap.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, blocks: Sequence[Block]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.blocks = tuple(blocks)

    @classmethod
    def of_source(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> BlockTensor:
        """Return a tensor that is one whole source tensor."""
        shape = tuple(shape)
        return cls(shape, dtype, (Block(name, 0, (0,) * len(shape), shape, row_major_strides(shape)),))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Implement torch's own functions, so code written for tensors runs on this class."""
        moves = _MOVES.get(func)
        if moves is None:
            raise UnsupportedOperationError(f"{getattr(func, '__name__', func)} does more than move boxes")
        return moves(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return True if the dtype is floating."""
        return self.dtype.is_floating_point

    def contiguous(self) -> BlockTensor:
        """Return this tensor: boxes have no memory format."""
        return self

    clone = detach = contiguous

    def narrow(self, dim: int, start: int, length: int) -> BlockTensor:
        """Keep `length` positions of `dim`, from `start`."""
        dim = self._dim(dim)
        blocks = []
        for block in self.blocks:
            first = max(block.start[dim], start)
            stop = min(block.start[dim] + block.size[dim], start + length)
            if first < stop:
                offset = block.offset + (first - block.start[dim]) * block.strides[dim]
                at, size = list(block.start), list(block.size)
                at[dim], size[dim] = first - start, stop - first
                blocks.append(Block(block.source, offset, tuple(at), tuple(size), block.strides))
        shape = list(self.shape)
        shape[dim] = length
        return BlockTensor(shape, self.dtype, blocks)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[BlockTensor, ...]:
        """Split as `torch.split` does."""
        length = self.shape[self._dim(dim)]
        if isinstance(split_size, int):
            sizes = [min(split_size, length - start) for start in range(0, length, split_size)]
        else:
            sizes = list(split_size)
        if sum(sizes) != length:
            raise ValueError(f"split sizes {sizes} do not add up to {length}, the length of dim {dim}")
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[BlockTensor, ...]:
        """Chunk as `torch.chunk` does: the last chunk may be shorter, and there may be fewer than `chunks`."""
        return self.split(max(1, -(-self.shape[self._dim(dim)] // chunks)), dim)

    def squeeze(self, dim: int) -> BlockTensor:
        """Drop `dim` if its length is 1."""
        dim = self._dim(dim)
        return self if self.shape[dim] != 1 else self._without(dim)

    def unbind(self, dim: int = 0) -> tuple[BlockTensor, ...]:
        """Unbind as `torch.unbind` does."""
        return tuple(self.narrow(dim, index, 1).squeeze(dim) for index in range(self.shape[self._dim(dim)]))

    def unsqueeze(self, dim: int) -> BlockTensor:
        """Insert a dim of length 1."""
        dim = dim + self.ndim + 1 if dim < 0 else dim

        def put(values: Shape, value: int) -> Shape:
            return (*values[:dim], value, *values[dim:])

        blocks = [
            Block(block.source, block.offset, put(block.start, 0), put(block.size, 1), put(block.strides, 0))
            for block in self.blocks
        ]
        return BlockTensor(put(tuple(self.shape), 1), self.dtype, blocks)

    def reshape(self, *shape: Any) -> BlockTensor:
        """Reshape as `Tensor.reshape` does, if the tensor is one contiguous range of one source."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        known = math.prod(length for length in wanted if length != -1)
        wanted = tuple(self.numel() // max(known, 1) if length == -1 else length for length in wanted)
        if math.prod(wanted) != self.numel():
            raise ValueError(f"shape {tuple(self.shape)} cannot become {wanted}")
        if wanted == tuple(self.shape):
            return self
        runs = self.runs(max_runs=1)
        if runs is None or len(runs) != 1:
            raise UnsupportedOperationError("cannot reshape more than one contiguous range")
        block = Block(runs[0].source, runs[0].source_start, (0,) * len(wanted), wanted, row_major_strides(wanted))
        return BlockTensor(wanted, self.dtype, (block,))

    view = reshape

    def flatten(self) -> BlockTensor:
        """Flatten to one dim."""
        return self.reshape(-1)

    def runs(self, max_runs: int) -> tuple[Run, ...] | None:
        """Return the tensor as contiguous ranges, ascending in the target; `None` if more than `max_runs`."""
        counted = [(block, *self._run_dims(block)) for block in self.blocks]
        if sum(math.prod(block.size[:outer]) for block, outer, _ in counted) > max_runs:
            return None
        strides = row_major_strides(self.shape)
        found: list[Run] = []
        for block, outer, length in counted:
            base = sum(at * stride for at, stride in zip(block.start, strides, strict=True))
            for index in itertools.product(*(range(extent) for extent in block.size[:outer])):
                source = block.offset + sum(map(int.__mul__, index, block.strides))
                found.append(Run(block.source, source, base + sum(map(int.__mul__, index, strides)), length))
        return _joined(sorted(found, key=lambda run: run.target_start))

    def _run_dims(self, block: Block) -> tuple[int, int]:
        """Return (number of outer dims, elements of one run): the inner dims are contiguous in source and target."""
        outer, length = len(block.size), 1
        while outer > 0:
            dim = outer - 1
            # The stride of a dim of length 1 in the box does not matter.
            if block.size[dim] != 1 and block.strides[dim] != length:
                break
            outer, length = dim, length * block.size[dim]
            if block.size[dim] != self.shape[dim]:
                break
        return outer, length

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise ValueError(f"dim {dim} is out of range for shape {tuple(self.shape)}")
        return dim % self.ndim

    def _without(self, dim: int) -> BlockTensor:
        def drop(values: Shape) -> Shape:
            return values[:dim] + values[dim + 1 :]

        blocks = [
            Block(block.source, block.offset, drop(block.start), drop(block.size), drop(block.strides))
            for block in self.blocks
        ]
        return BlockTensor(drop(tuple(self.shape)), self.dtype, blocks)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Join runs that are adjacent in both source and target."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source == run.source
            and last.target_start + last.num_elements == run.target_start
            and last.source_start + last.num_elements == run.source_start
        ):
            joined[-1] = Run(run.source, last.source_start, last.target_start, last.num_elements + run.num_elements)
        elif run.num_elements:
            joined.append(run)
    return tuple(joined)


def _cat(tensors: Sequence[Any], dim: int = 0) -> BlockTensor:
    first = _same_kind(tensors)
    dim = first._dim(dim)
    blocks: list[Block] = []
    length = 0
    for tensor in tensors:
        rest = [extent for index, extent in enumerate(tensor.shape) if index != dim]
        if tensor.ndim != first.ndim or rest != [extent for index, extent in enumerate(first.shape) if index != dim]:
            raise ValueError(f"shapes {tuple(first.shape)} and {tuple(tensor.shape)} differ outside dim {dim}")
        for block in tensor.blocks:
            start = list(block.start)
            start[dim] += length
            blocks.append(Block(block.source, block.offset, tuple(start), block.size, block.strides))
        length += tensor.shape[dim]
    shape = list(first.shape)
    shape[dim] = length
    return BlockTensor(shape, first.dtype, blocks)


def _stack(tensors: Sequence[Any], dim: int = 0) -> BlockTensor:
    first = _same_kind(tensors)
    for tensor in tensors:
        if tensor.shape != first.shape:
            raise ValueError(f"shapes {tuple(first.shape)} and {tuple(tensor.shape)} cannot be stacked")
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _same_kind(tensors: Sequence[Any]) -> BlockTensor:
    first = tensors[0]
    if not all(isinstance(tensor, BlockTensor) and tensor.dtype == first.dtype for tensor in tensors):
        raise UnsupportedOperationError("some parts have different dtypes, or hold data")
    assert isinstance(first, BlockTensor)
    return first


_MOVES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.stack: _stack,
    torch.split: BlockTensor.split,
    torch.chunk: BlockTensor.chunk,
    torch.unbind: BlockTensor.unbind,
    torch.squeeze: BlockTensor.squeeze,
    torch.unsqueeze: BlockTensor.unsqueeze,
    torch.narrow: BlockTensor.narrow,
    torch.reshape: BlockTensor.reshape,
    torch.flatten: BlockTensor.flatten,
}
