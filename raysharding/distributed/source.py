"""Where rank 0's bytes come from: ranges of checkpoint files, read straight into the buffer that is sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import prod
from typing import Protocol

import torch

from raysharding.checkpoint import Checkpoint, FileReader
from raysharding.models import Target

SCRATCH_BYTES = 4 << 20
"""Size of the scratch through which values pass whose dtype in the file is wider than on the wire."""


class ElementSource(Protocol):
    """Anything that can produce ranges of full tensors."""

    def read(self, fqn: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with elements `start` to `stop` of the flattened tensor `fqn`.

        Args:
            fqn: Canonical FQN of the target.
            start: First element.
            stop: One past the last element.
            out: 1-D CPU tensor of `stop - start` elements in the wire's dtype.
        """


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D contiguous tensor's memory as uint8."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The dtype that travels: the narrower of the file's and the module's; the file's if they are equally wide."""
    return target if target.itemsize < source.itemsize else source


class CheckpointSource:
    """Reads targets from checkpoint files through their runs, or through transformers' own operations.

    A target with runs is read range by range, never whole. A target without (a transpose, a RoPE permutation) is
    converted whole, on this rank only, once: it is kept until its bucket is full, and a bucket's worth with it.

    Args:
        checkpoint: What is in the files.
        reader: Reads them.
        targets: FQN → what feeds it.
        cache_bytes: How much of converted targets to keep: those of one bucket, since its sections ask in turn.
    """

    def __init__(
        self, checkpoint: Checkpoint, reader: FileReader, targets: Mapping[str, Target], cache_bytes: int
    ) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._targets = targets
        self._run_starts: dict[str, list[int]] = {}
        self._cache_bytes = cache_bytes
        self._converted: dict[str, torch.Tensor] = {}

    def read(self, fqn: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `ElementSource.read`; raises `CheckpointError` when a file cannot be read to the end."""
        target = self._targets[fqn]
        if target.runs is None:
            out.copy_(self._whole(target)[start:stop])
            return
        starts = self._run_starts.get(fqn)
        if starts is None:
            starts = self._run_starts[fqn] = [run.target_start for run in target.runs]
        position = start
        index = bisect_right(starts, start) - 1
        while position < stop:
            run = target.runs[index]
            within = position - run.target_start
            length = min(stop - position, run.num_elements - within)
            piece = out[position - start : position - start + length]
            self._read_source(run.source, run.source_start + within, piece)
            position += length
            index += 1

    def _read_source(self, name: str, first: int, out: torch.Tensor) -> None:
        """Read `out.numel()` elements of checkpoint tensor `name`, from element `first` on."""
        info = self._checkpoint.tensors[name]
        offset = info.offset + first * info.dtype.itemsize
        if info.dtype == out.dtype:
            self._reader.read_into(info.file, offset, as_bytes(out))
            return
        step = SCRATCH_BYTES // info.dtype.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=info.dtype)
        for done in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - done)]
            self._reader.read_into(info.file, offset + done * info.dtype.itemsize, as_bytes(part))
            out[done : done + part.numel()].copy_(part)

    def _whole(self, target: Target) -> torch.Tensor:
        if target.fqn not in self._converted:
            num_bytes = prod(target.shape) * target.source_dtype.itemsize
            # Oldest first, and before the next one is made.
            while self._converted and num_bytes + self._kept_bytes() > self._cache_bytes:
                del self._converted[next(iter(self._converted))]
            value = target.convert(lambda name: self._reader.read_tensor(self._checkpoint.tensors[name]))
            self._converted[target.fqn] = value.reshape(-1)
        return self._converted[target.fqn]

    def _kept_bytes(self) -> int:
        return sum(value.numel() * value.itemsize for value in self._converted.values())
