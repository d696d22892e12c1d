"""`ModelLayout`: which rank of a group holds which elements of which tensor, for the ranks of another group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from raysharding.distributed.fully_shard import ShardMap, TensorLayout, by_mesh, tensor_layout

Holders = tuple[tuple[int, ...], ...]
"""Shard index → ranks of the group that hold the shard, first replica first."""


@dataclass(frozen=True)
class ModelLayout:
    """Layout of the tensors that a group sends, or receives, under the names that both groups have for them."""

    tensors: Mapping[str, TensorLayout]
    """Name → layout."""
    holders: Mapping[str, Holders]
    """Name → which ranks hold which shard; a replicated tensor has one shard, which every rank holds."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the layout of tensors of this rank's module; the same on every rank of the group. Not collective.

        Raises:
            ValueError: A tensor is sharded in a way that this library does not make.
        """
        layouts = {name: tensor_layout(name, tensor) for name, tensor in tensors.items()}
        holders: dict[str, Holders] = {}
        for part in by_mesh(tensors):
            shards = ShardMap.of(part)
            everywhere = (tuple(sorted(rank for ranks in shards.holders for rank in ranks)),)
            holders |= {name: shards.holders if layouts[name].num_shards else everywhere for name in part}
        return cls(layouts, holders)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as a JSON value; which ranks hold which shard stands once for all tensors alike."""
        kinds = list(dict.fromkeys(self.holders.values()))
        numbers = {kind: number for number, kind in enumerate(kinds)}
        tensors = {
            name: [one.shape, str(one.dtype).removeprefix("torch."), one.num_shards, numbers[self.holders[name]]]
            for name, one in self.tensors.items()
        }
        return {"holders": kinds, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the layout of which `to_json` made a value."""
        kinds = [tuple(map(tuple, kind)) for kind in value["holders"]]
        tensors: dict[str, TensorLayout] = {}
        holders: dict[str, Holders] = {}
        for name, (shape, dtype, num_shards, number) in value["tensors"].items():
            tensors[name] = TensorLayout(name, tuple(shape), getattr(torch, dtype), num_shards)
            holders[name] = kinds[number]
        return cls(tensors, holders)


def differences(source: ModelLayout, target: ModelLayout) -> Iterator[str]:
    """Yield why the tensors of one group cannot be copied into another: names, shapes, kinds of dtype."""
    for name in sorted(source.tensors.keys() - target.tensors.keys()):
        yield f"{name}: the source has it, the target does not"
    for name in sorted(target.tensors.keys() - source.tensors.keys()):
        yield f"{name}: the target has it, the source does not"
    for name in [name for name in source.tensors if name in target.tensors]:
        mine, theirs = source.tensors[name], target.tensors[name]
        if mine.shape != theirs.shape:
            yield f"{name}: shape {list(mine.shape)} in the source, {list(theirs.shape)} in the target"
        elif mine.dtype.is_floating_point != theirs.dtype.is_floating_point:
            yield f"{name}: {mine.dtype} in the source, {theirs.dtype} in the target"
