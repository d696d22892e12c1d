"""Outputs of a call's ranks (`RankOutput`), and how they are joined into one output for the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from raysharding.batch import Out, PerRank
from raysharding.tree import children, leaves, rebuild, rebuild_mapping

_CACHE_NAMES = ("past_key_values", "cache_params", "mems")


@dataclass(frozen=True, eq=False)
class RankOutput:
    """One rank's output of a forward, on the CPU, with the facts about its leaves that only the ranks can determine."""

    value: Any
    """The output, or `None` if the caller did not request this rank's output or the rank had only a dummy row."""
    reduced: tuple[str, ...] = ()
    """Paths of leaves that already hold the value of the whole batch, equal on every rank: the loss."""
    local: tuple[str, ...] = ()
    """Paths of leaves whose shape looks like rows but does not scale with them (CLIP's rows × rows logits)."""


def select_output(out: Out | None, outputs: Sequence[RankOutput], rows: Sequence[int], dim: int) -> Any:
    """Make a call's result from every rank's output. Called on the driver, never for `Out.refs()`.

    Args:
        out: What the caller requested. `None`: gather if the call had a `Split`, else rank 0.
        outputs: Outputs by rank.
        rows: `RankBatch.rows`: each rank's number of rows; empty if the call had no `Split`.
        dim: `RankBatch.dim`.
    """
    kind = out.kind if out is not None else ("gather" if rows else "rank0")
    if kind == "none":
        return None
    if kind == "per_rank":
        # A rank without rows ran a dummy row, whose output is not a result.
        return PerRank([None if rows and not rows[rank] else output.value for rank, output in enumerate(outputs)])
    if kind == "rank0":
        return outputs[0].value
    assert kind == "gather", kind
    return gather_outputs(outputs, rows, out.dim if out is not None and out.dim is not None else dim)


def gather_outputs(outputs: Sequence[RankOutput], rows: Sequence[int], dim: int = 0) -> Any:
    """Join the ranks' outputs into one output of the same type. Called on the driver.

    Tensors that have as many rows in `dim` as their rank and agree in all other dims are concatenated in row order. A
    loss already covers the whole batch. A leaf that is `None` on every rank stays `None`. Any other leaf becomes a
    `PerRank`, with `None` for the ranks that had no rows. If only one rank had rows, its output is the result.

    Args:
        outputs: Outputs by rank.
        rows: Each rank's number of rows. Empty: rank 0's output is the result.
        dim: The dim that holds rows; negative counts from each leaf's end.

    Returns:
        The joined output; concatenation takes the tensors' size in memory once more.
    """
    live = [rank for rank, num_rows in enumerate(rows) if num_rows]
    if len(live) <= 1:
        return outputs[0].value
    reduced, local = outputs[0].reduced, {path for output in outputs for path in output.local}
    live_rows = [rows[rank] for rank in live]

    def join(path: str, values: list[Any]) -> Any:
        """Join one subtree; `values` holds each live rank's copy of the subtree."""
        if path in reduced:
            return values[0]
        same_type = all(type(value) is type(values[0]) for value in values)
        if same_type and (type(values[0]) is dict or (isinstance(values[0], Mapping) and is_dataclass(values[0]))):
            # A model output lacks the key of what is `None`: a rank without an image has no states of images.
            keys = dict.fromkeys(key for value in values for key in value)
            return rebuild_mapping(
                values[0], {key: join(f"{path}[{key!r}]", [value.get(key) for value in values]) for key in keys}
            )
        nodes = [children(value) for value in values]
        names = [None if node is None else [name for name, _ in node] for node in nodes]
        if same_type and nodes[0] is not None and all(found == names[0] for found in names):
            columns = zip(*(node or [] for node in nodes), strict=True)
            return rebuild(values[0], [join(path + column[0][0], [item for _, item in column]) for column in columns])
        if all(value is None for value in values):
            return None
        if path not in local and _are_rows(values, live_rows, dim):
            return torch.cat(values, dim=dim)
        by_rank = dict(zip(live, values, strict=True))
        return PerRank([by_rank.get(rank) for rank in range(len(rows))])

    return join("", [outputs[rank].value for rank in live])


def _are_rows(values: Sequence[Any], rows: Sequence[int], dim: int) -> bool:
    """Return True if the ranks' values are tensors with `rows` in `dim` that agree in everything else."""
    if not all(isinstance(value, torch.Tensor) and _has_dim(value, dim) for value in values):
        return False
    others = {
        (value.dtype, *value.shape[: dim % value.ndim], None, *value.shape[dim % value.ndim + 1 :]) for value in values
    }
    return len(others) == 1 and [value.shape[dim] for value in values] == list(rows)


def ambiguous_leaves(value: Any, num_rows: int, dim: int) -> list[str]:
    """Return the paths of tensors whose size is `num_rows` in `dim` and in another dim too: such a shape may mean rows,
    or rows × rows.
    """  # noqa: D205
    found = []
    for path, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor) and _has_dim(leaf, dim) and leaf.shape[dim] == num_rows:
            others = [size for axis, size in enumerate(leaf.shape) if axis != dim % leaf.ndim]
            if num_rows in others:
                found.append(path)
    return found


def follows_rows(before: torch.Tensor, after: Any, num_rows: int, dim: int) -> bool:
    """Return True if a leaf's size changes with the rows in `dim` only.

    Args:
        before: The leaf from one forward.
        after: The leaf from a forward of `num_rows` rows.
        num_rows: Rows of the second forward.
        dim: The dim that holds rows.
    """
    if not isinstance(after, torch.Tensor) or after.ndim != before.ndim:
        return False
    expected = list(before.shape)
    expected[dim] = num_rows
    return list(after.shape) == expected


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    return -leaf.ndim <= dim < leaf.ndim


def without_caches(value: Any, name: str = "") -> Any:
    """Return the output with `None` in place of key-value caches, which stay on the rank.

    Args:
        value: The output, or the part of it that `name` names.
        name: As in `children`.
    """
    if any(name in (f"[{cache!r}]", f".{cache}") for cache in _CACHE_NAMES) or _is_cache(value):
        return None
    nodes = children(value)
    if not nodes:
        return value
    return rebuild(value, [without_caches(item, child) for child, item in nodes])


def _is_cache(value: Any) -> bool:
    """Return True if a value is a transformers `Cache`; checks base-class names, so transformers is not imported."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(value).__mro__)
