"""A state dict in rank 0's memory, as a checkpoint for the planner and the stream.

Note: lazily read values.
    Values are not kept. The plan accesses each value once, for shape and dtype, and drops it; the stream accesses one
    value at a time and drops it before the next. A mapping whose items load on access can therefore be larger than
    memory: two buckets and the largest item are held at a time. Each item is loaded twice, or once per bucket of the
    item if other items are loaded in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.format import EXTRA_STATE_NAME, TensorInfo
from raysharding.distributed.transfer import Extent, Job, Request, TensorSource
from raysharding.errors import PlanError

NAME = "the state dict"
"""Name in messages and reports."""


@dataclass(frozen=True)
class Rank0StateDict:
    """A full state dict of rank 0; empty on the other ranks."""

    values: Mapping[str, torch.Tensor]
    """Key → full tensor, on any device; accessed again for each use. Extra state is not accessed here."""
    mismatches: Sequence[str] = ()
    """Mismatches of extra state under `strict`, a line each."""

    def dtypes(self) -> dict[str, str]:
        """Return key → name of the dtype of its tensor; raises as `as_checkpoint`."""
        return {key: str(info.dtype).removeprefix("torch.") for key, info in self.as_checkpoint().tensors.items()}

    def as_checkpoint(self) -> Checkpoint:
        """Return a checkpoint without files, whose tensors follow each other.

        Raises:
            PlanError: Some values are no tensors, or have no values; the error lists all keys.
        """
        infos: dict[str, TensorInfo] = {}
        problems = []
        offset = 0
        for key in self.values:
            if is_extra_state(key):
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


def is_extra_state(key: str) -> bool:
    """Return True if the value of a key in a state dict is for `set_extra_state`."""
    return key.rpartition(".")[2] == EXTRA_STATE_NAME


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


@dataclass
class StateDictSource(TensorSource):
    """A `TensorSource` over a `Rank0StateDict`, on rank 0 only. One job at a time: a thread accesses the items."""

    state_dict: Rank0StateDict
    """The values."""
    num_bytes_read: int = field(default=0, init=False)
    """Bytes copied into buffers and shards."""
    _last: tuple[str, torch.Tensor] | None = field(default=None, init=False)

    def _part_jobs(
        self, parts: Sequence[tuple[Extent, Request]], filled: Callable[[Sequence[Request]], None]
    ) -> list[Job]:
        return [partial(self._read_parts, parts, filled)] if parts else []

    def _read_parts(self, parts: Sequence[tuple[Extent, Request]], filled: Callable[[Sequence[Request]], None]) -> None:
        """Access each key once, and keep the last value for the next call."""
        by_key: dict[str, list[tuple[Extent, Request]]] = {}
        for extent, part in parts:
            by_key.setdefault(extent.key, []).append((extent, part))
        for key, wanted in by_key.items():
            flat = self._flat(key)
            for extent, part in wanted:
                first = (extent.offset - extent.key_offset) // extent.dtype.itemsize + part.start - extent.start
                out = torch.frombuffer(part.memory, dtype=part.dtype)
                out.copy_(flat[first : first + out.numel()])
                self.num_bytes_read += out.nbytes
            del flat  # before the next one is loaded
        filled([part for _, part in parts])

    def _read_whole(self, key: str) -> torch.Tensor:
        value = self._load(key).cpu()
        self.num_bytes_read += value.nbytes
        return value

    def _flat(self, key: str) -> torch.Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._load(key).reshape(-1))
        return self._last[1]

    def _load(self, key: str) -> torch.Tensor:
        value = self.state_dict.values[key]
        info = self.tensors[key]
        if (problem := why_refused(value)) is None and (value.dtype, tuple(value.shape)) != (info.dtype, info.shape):
            problem = f"{value.dtype} {tuple(value.shape)} now, {info.dtype} {info.shape} when the load was planned"
        if problem is not None:
            raise PlanError(f"{NAME} changed under the load:", problems=[f"{key}: {problem}"])
        return value.detach()
