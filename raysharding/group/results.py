"""From what the ranks sent to what the caller gets: one collector for each kind of result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch

from raysharding.batch import Out, PerRank
from raysharding.errors import GroupError
from raysharding.group.call import Call, Collect
from raysharding.outputs import select_output


def collect_rank0(call: Call) -> Any:
    """Return what rank 0 sent."""
    return call.value(0)


def collect_ranks(call: Call) -> list[Any]:
    """Return what every rank sent, by rank."""
    return call.per_rank()


def collect_refs(call: Call) -> PerRank:
    """Return references to what the ranks sent; `ray.get` gives the values."""
    return PerRank(call.refs())


def collect_outputs(out: Out | None, rows: Sequence[int], dim: int) -> Collect:
    """Join the ranks' outputs of a forward."""

    def collect(call: Call) -> Any:
        return select_output(out, call.per_rank(), rows, dim)

    return collect


class FullStateDict:
    """Full tensors, kept on the driver bucket by bucket as rank 0 sends them."""

    def __init__(self, fetch_s: float) -> None:
        """Empty.

        Args:
            fetch_s: Longest wait for one bucket to cross from the object store.
        """
        self._fetch_s = fetch_s
        self._tensors: dict[str, torch.Tensor] = {}
        self._lost: GroupError | None = None

    def keep(self, ref: Any) -> None:
        """Take the next bucket."""
        try:
            packed = ray.get(ref, timeout=self._fetch_s)
        except ray.exceptions.RayError as error:
            self._lost = GroupError(f"a bucket of the state dict did not reach the driver: {error}")
            return
        if packed is not None:
            self._tensors.update(packed.unpack())

    def collect(self, call: Call) -> dict[str, torch.Tensor]:
        """Return the whole of it."""
        if self._lost is not None:
            raise self._lost
        return self._tensors
