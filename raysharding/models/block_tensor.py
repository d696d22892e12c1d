"""`BlockTensor`: a tensor without data that records which blocks of source tensors fill it.

transformers' conversion operations run unchanged on a `BlockTensor` (torch dispatches on `__torch_function__`): stack,
concatenate, chunk, split, transpose and reshape only move blocks, so the result is a list of contiguous ranges of the
files. Any other operation raises `UnsupportedOperationError`; such a conversion must run on real tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch


class UnsupportedOperationError(TypeError):
    """An operation that does more than move blocks."""


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
    """A rectangular part of the target, in all dims, filled from one source at constant strides."""

    source: str
    """Key in the checkpoint."""
    offset: int
    """Index of the element of the flattened source that fills the block's first element."""
    start: tuple[int, ...]
    """Index of the block's first element in the target, in each dim."""
    size: tuple[int, ...]
    """The block's size in each dim."""
    strides: tuple[int, ...]
    """Elements of the source for one step along each dim of the target."""


Shape: TypeAlias = tuple[int, ...]


def row_major_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


MAX_RUNS: Final = 1 << 16
"""Most ranges of one tensor: each costs microseconds and some hundred bytes on every rank."""


class BlockTensor:
    """A tensor without data, defined by the sources of its elements.

    Args:
        meta: Tensor on meta, on which torch checks each operation and computes the result's shape.
        blocks: Boxes that fill the tensor without overlap.
    """

    def __init__(self, meta: torch.Tensor, blocks: Iterable[Block]) -> None:
        self.meta = meta
        self.shape = meta.shape
        self.dtype = meta.dtype
        self.blocks = tuple(blocks)

    @classmethod
    def of_source(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> BlockTensor:
        """Return a tensor that is one whole source tensor."""
        sizes = tuple(shape)
        block = Block(name, 0, (0,) * len(sizes), sizes, row_major_strides(sizes))
        return cls(torch.empty(sizes, dtype=dtype, device="meta"), [block])

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
            raise UnsupportedOperationError(f"{getattr(func, '__name__', func)} does more than move blocks")
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
        """Return this tensor: blocks have no memory format."""
        return self

    clone = detach = contiguous

    def narrow(self, dim: int, start: int, length: int) -> BlockTensor:
        """Keep `length` positions of `dim`, from `start`."""
        meta = self.meta.narrow(dim, start, length)
        dim %= self.ndim
        blocks = []
        for block in self.blocks:
            first = max(block.start[dim], start)
            stop = min(block.start[dim] + block.size[dim], start + length)
            if first < stop:
                offset = block.offset + (first - block.start[dim]) * block.strides[dim]
                at, size = list(block.start), list(block.size)
                at[dim], size[dim] = first - start, stop - first
                blocks.append(Block(block.source, offset, tuple(at), tuple(size), block.strides))
        return BlockTensor(meta, blocks)

    def split(self, split_size: Any, dim: int = 0) -> tuple[BlockTensor, ...]:
        """Split as `torch.split` does."""
        return self._parted(self.meta.split(split_size, dim), dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[BlockTensor, ...]:
        """Chunk as `torch.chunk` does: the last chunk may be shorter, and there may be fewer than `chunks`."""
        return self._parted(self.meta.chunk(chunks, dim), dim)

    def _parted(self, parts: Sequence[torch.Tensor], dim: int) -> tuple[BlockTensor, ...]:
        sizes = [part.shape[dim] for part in parts]
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))

    def squeeze(self, dim: int | None = None) -> BlockTensor:
        """Drop `dim`, or all dims, if of length 1."""
        if dim is None:
            return self.squeeze(self.shape.index(1)).squeeze() if 1 in self.shape else self
        meta = self.meta.squeeze(dim)
        dim %= self.ndim
        return self if self.shape[dim] != 1 else self._moved(meta, lambda sizes, _: sizes[:dim] + sizes[dim + 1 :])

    def unbind(self, dim: int = 0) -> tuple[BlockTensor, ...]:
        """Unbind as `torch.unbind` does."""
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    def unsqueeze(self, dim: int) -> BlockTensor:
        """Insert a dim of length 1."""
        meta = self.meta.unsqueeze(dim)
        dim %= meta.ndim
        return self._moved(meta, lambda sizes, new: (*sizes[:dim], new, *sizes[dim:]))

    def _moved(self, meta: torch.Tensor, move: Callable[[Shape, int], Shape]) -> BlockTensor:
        """Return the tensor with `move(sizes, value of a new dim)` instead of start, size and strides of each block."""
        return BlockTensor(
            meta,
            [
                Block(block.source, block.offset, move(block.start, 0), move(block.size, 1), move(block.strides, 0))
                for block in self.blocks
            ],
        )

    def transpose(self, first: int, second: int) -> BlockTensor:
        """Exchange two dims."""
        meta = self.meta.transpose(first, second)
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self._moved(meta, lambda sizes, _: tuple(sizes[dim] for dim in order))

    def reshape(self, *shape: Any) -> BlockTensor:
        """Reshape as `Tensor.reshape` does, if the tensor is not too many contiguous ranges."""
        meta = self.meta.reshape(*shape)
        if meta.shape == self.shape:
            return self
        runs = self.runs(MAX_RUNS)
        if runs is None:
            raise UnsupportedOperationError(f"cannot reshape more than {MAX_RUNS} contiguous ranges")
        return BlockTensor(meta, [block for run in runs for block in _cut(run, tuple(meta.shape))])

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
        runs: list[Run] = []
        for block, outer, length in counted:
            base = sum(at * stride for at, stride in zip(block.start, strides, strict=True))
            for index in itertools.product(*(range(extent) for extent in block.size[:outer])):
                source = block.offset + sum(map(int.__mul__, index, block.strides))
                runs.append(Run(block.source, source, base + sum(map(int.__mul__, index, strides)), length))
        return _joined(sorted(runs, key=lambda run: run.target_start))

    def _run_dims(self, block: Block) -> tuple[int, int]:
        """Return (number of outer dims, elements of one run): the inner dims are contiguous in source and target."""
        outer, length = len(block.size), 1
        while outer > 0:
            dim = outer - 1
            # The stride of a dim of length 1 in the block does not matter.
            if block.size[dim] != 1 and block.strides[dim] != length:
                break
            outer, length = dim, length * block.size[dim]
            if block.size[dim] != self.shape[dim]:
                break
        return outer, length


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


def _cut(run: Run, shape: Shape) -> Iterator[Block]:
    """Cut a range of a flattened tensor into blocks of a shape, the largest that begin where the last one ended."""
    strides = row_major_strides(shape)
    if not shape:
        yield Block(run.source, run.source_start, (), (), ())
        return
    at, left = run.target_start, run.num_elements
    while left:
        dim = next(dim for dim, stride in enumerate(strides) if at % stride == 0 and left >= stride)
        start = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min(left // strides[dim], shape[dim] - start[dim])
        size = (*(1,) * dim, count, *shape[dim + 1 :])
        yield Block(run.source, run.source_start + at - run.target_start, start, size, strides)
        at, left = at + count * strides[dim], left - count * strides[dim]


def _cat(tensors: Sequence[Any], dim: int = 0) -> BlockTensor:
    if not all(isinstance(tensor, BlockTensor) and tensor.dtype == tensors[0].dtype for tensor in tensors):
        raise UnsupportedOperationError("some parts have different dtypes, or hold data")
    meta = torch.cat([tensor.meta for tensor in tensors], dim)
    dim %= meta.ndim
    blocks: list[Block] = []
    length = 0
    for tensor in tensors:
        for block in tensor.blocks:
            start = list(block.start)
            start[dim] += length
            blocks.append(replace(block, start=tuple(start)))
        length += tensor.shape[dim]
    return BlockTensor(meta, blocks)


def _stack(tensors: Sequence[BlockTensor], dim: int = 0) -> BlockTensor:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


_METHODS = ("split", "chunk", "unbind", "squeeze", "unsqueeze", "narrow", "transpose", "reshape", "flatten")
_MOVES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.stack: _stack,
    **{getattr(torch, name): getattr(BlockTensor, name) for name in _METHODS},
}
