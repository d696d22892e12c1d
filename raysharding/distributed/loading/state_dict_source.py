"""A state dict in rank 0's memory, as a checkpoint for the planner and the stream.

Note: lazily read values.
    Values are not kept. The plan accesses each value once, for shape and dtype, and drops it; the stream accesses one
    value at a time and drops it before the next. A mapping whose items load on access can therefore be larger than
    memory: two buckets and the largest item are held at a time. Each item is loaded twice, or once per bucket of the
    item if other items are loaded in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.format import TensorInfo
from raysharding.distributed.transfer import Conversions, Extents, Request, overlaps
from raysharding.errors import PlanError
from raysharding.models import Target

NAME = "the state dict"
"""Name in messages and reports."""


@dataclass(frozen=True)
class Rank0StateDict:
    """A full state dict of rank 0; empty on the other ranks."""

    values: Mapping[str, torch.Tensor]
    """Key → full tensor, on any device; accessed again for each use."""
    skipped: Collection[str] = ()
    """Keys of extra state, which are not accessed here."""
    mismatches: Sequence[str] = ()
    """Mismatches of extra state under `strict`, a line each."""

    def as_checkpoint(self) -> Checkpoint:
        """Return a checkpoint without files, whose tensors follow each other.

        Raises:
            PlanError: Some values are no tensors, or have no values; the error lists all keys.
        """
        infos: dict[str, TensorInfo] = {}
        problems = []
        offset = 0
        for key in self.values:
            if key in self.skipped:
                continue
            value = self.values[key]
            if (problem := why_refused(value)) is None:
                infos[key] = TensorInfo(key, value.dtype, tuple(value.shape), 0, offset)
                offset += infos[key].num_bytes
            else:
                problems.append(f"{key}: {problem}")
            del value  # before the next one is loaded
        if problems:
            raise PlanError(f"{NAME} holds what cannot be distributed:", problems=problems)
        return Checkpoint(NAME, (), infos, None, {})


def why_refused(value: object) -> str | None:
    """Return why a value of a state dict cannot be sent to other ranks, or `None`."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, not a tensor: leave it out"
    if isinstance(value, DTensor):
        return "a DTensor, of which rank 0 holds one shard: pass value.full_tensor()"
    if value.is_meta:
        return "on meta, without a value: load it first"
    if value.layout != torch.strided:
        return f"of layout {value.layout}: pass value.to_dense()"
    return None


class StateDictSource:
    """An `ElementSource` over a `Rank0StateDict`, on rank 0 only.

    Args:
        state_dict: The values.
        tensors: Tensors of `Rank0StateDict.as_checkpoint`.
        extents: FQN → extents.
        targets: FQN → target; needed for conversions.
        cache_bytes: Size of the cache of converted targets.
    """

    def __init__(
        self,
        state_dict: Rank0StateDict,
        tensors: Mapping[str, TensorInfo],
        extents: Mapping[str, Extents],
        targets: Mapping[str, Target],
        cache_bytes: int,
    ) -> None:
        self._state_dict = state_dict
        self._tensors = tensors
        self._extents = extents
        self._conversions = Conversions(targets, lambda key: self._load(key).cpu(), cache_bytes)
        self._last: tuple[str, torch.Tensor] | None = None
        self._num_bytes = 0

    @property
    def num_bytes_read(self) -> int:
        """Bytes copied into buffers and shards."""
        return self._num_bytes

    def read(self, requests: Iterable[Request]) -> None:
        """See `ElementSource`. Accesses each key once per call, and keeps the last value for the next call.

        Raises:
            PlanError: Shape or dtype of a value changed since the plan.
        """
        wanted: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
        for request in requests:
            out = torch.frombuffer(request.memory, dtype=request.dtype)
            extents = self._extents[request.fqn]
            if extents is None:
                out.copy_(self._conversions.whole(request.fqn)[request.start : request.stop])
                self._num_bytes += out.nbytes
                continue
            for extent, start, stop in overlaps(extents, request.start, request.stop):
                first = (extent.offset - extent.key_offset) // extent.dtype.itemsize + start - extent.start
                part = out[start - request.start : stop - request.start]
                wanted.setdefault(extent.key, []).append((first, first + stop - start, part))
        for key, parts in wanted.items():
            flat = self._flat(key)
            for first, last, part in parts:
                part.copy_(flat[first:last])
                self._num_bytes += part.nbytes
            del flat  # before the next one is loaded

    def _flat(self, key: str) -> torch.Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._load(key).reshape(-1))
        return self._last[1]

    def _load(self, key: str) -> torch.Tensor:
        value = self._state_dict.values[key]
        info = self._tensors[key]
        if (problem := why_refused(value)) is None and (value.dtype, tuple(value.shape)) != (info.dtype, info.shape):
            problem = f"{value.dtype} {tuple(value.shape)} now, {info.dtype} {info.shape} when the load was planned"
        if problem is not None:
            raise PlanError(f"{NAME} changed under the load:", problems=[f"{key}: {problem}"])
        return value.detach()
