"""Collectors, one for each kind of result, that turn the ranks' values into the caller's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch

from raysharding.batch import Out, PerRank
from raysharding.errors import GroupError
from raysharding.group.calls.call import Call, Collect, Sent, fetched
from raysharding.group.rpc import Packed
from raysharding.outputs import RankOutput, select_output

collect_all = Collect(lambda call: call.values())
"""The values of all ranks, by rank."""
collect_rank0 = Collect(lambda call: call.value(0))
"""The value of rank 0."""


def collect_outputs(out: Out | None, rows: Sequence[int], dim: int) -> Collect:
    """Join the ranks' outputs of a forward; `rows` and `dim` are those of `RankBatch`."""
    if out is not None and out.kind == "refs":
        return _collect_refs(rows)
    return Collect(lambda call: select_output(out, call.values(), rows, dim), _own_output)


def collect_generated(out: Out | None, rows: Sequence[int]) -> Collect:
    """Join the ranks' token ids; several sequences of one row are adjacent, as in one process."""
    if out is not None and out.kind == "refs":
        return _collect_refs(rows)

    def join(call: Call) -> Any:
        ids = select_output(out, call.values(), rows, 0)
        return PerRank([_flat(own) for own in ids]) if isinstance(ids, PerRank) else _flat(ids)

    return Collect(join, lambda rank, sent: _flat(_own_output(rank, sent)))


def _flat(ids: Any) -> Any:
    return ids.flatten(0, 1) if isinstance(ids, torch.Tensor) and ids.ndim == 3 else ids


def collect_returns(out: Out | None, rows: Sequence[int]) -> Collect:
    """Return the return values of the user's function on the ranks: a list, unless `out` says otherwise.

    Raises:
        ValueError: `out` is `Out.gather()`: it is not known which of the returned values are rows.
    """
    kind = None if out is None else out.kind
    if kind == "gather":
        raise ValueError(
            "out=Out.gather(): return values of fn are not gathered; omit out= for a list by rank, and torch.cat it"
        )
    if kind == "refs":
        return _collect_refs(rows)
    if kind == "rank0":
        return collect_rank0
    if kind == "none":
        return Collect(lambda _: None)
    return Collect(lambda call: call.values() if kind is None else PerRank(call.values()))


def _collect_refs(rows: Sequence[int]) -> Collect:
    """Collect references to the values of the ranks with rows; `ray.get` fetches the values."""

    def join(call: Call) -> PerRank:
        return PerRank([None if rows and not rows[rank] else ref for rank, ref in enumerate(call.sent())])

    return Collect(join)


def _own_output(_: int, sent: RankOutput) -> Any:
    return sent.value


class LastValue:
    """The value that rank 0 sent with the last step of a command in steps."""

    def __init__(self) -> None:
        """Begin without a value."""
        self._sent: Sent = None

    def keep(self, sent: Sent) -> None:
        """Keep the next value in place of the previous one."""
        self._sent = sent

    def collect(self, call: Call) -> Any:
        """Return the last value."""
        assert isinstance(self._sent, Packed), "small values are sent directly, not through the object store"
        return self._sent.unpack()


class FullStateDict:
    """Full tensors, collected on the driver bucket by bucket as rank 0 sends them."""

    def __init__(self, fetch_s: float) -> None:
        """Begin without tensors.

        Args:
            fetch_s: Longest wait for one bucket to arrive from the object store.
        """
        self._fetch_s = fetch_s
        self._tensors: dict[str, torch.Tensor] = {}
        self._lost: GroupError | None = None

    def keep(self, sent: Sent) -> None:
        """Add the next bucket."""
        try:
            packed = fetched(sent, self._fetch_s)
        except ray.exceptions.RayError as error:
            self._lost = GroupError(f"a bucket of the state dict did not reach the driver: {error}")
            return
        if packed is not None:
            self._tensors.update(packed.unpack())

    def collect(self, call: Call) -> dict[str, torch.Tensor]:
        """Return all tensors.

        Raises:
            GroupError: A bucket did not reach the driver.
        """
        if self._lost is not None:
            raise self._lost
        return self._tensors
