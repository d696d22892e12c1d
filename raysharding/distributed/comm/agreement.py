"""Ranks agree on whether a step went well, so that all of them raise or none does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from raysharding import errors
from raysharding.distributed.comm.json_collectives import all_gather_json, broadcast_json, metadata_device
from raysharding.errors import RayshardingError


def _describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON: one of ours with its fields, any other by type and message."""
    if isinstance(error, RayshardingError):
        fields = {name: getattr(error, name) for name in error._fields}
        try:
            json.dumps(fields)
        except TypeError:
            fields = {"message": str(error)}
        return {"type": type(error).__name__, "fields": fields}
    return {"type": "", "fields": {"message": f"{type(error).__name__}: {error}"}}


def _rebuild(rank: int, description: dict[str, Any]) -> RayshardingError:
    cls = getattr(errors, description["type"], RayshardingError)
    fields = dict(description["fields"])
    fields["message"] = f"{fields['message']} (on rank {rank})"
    error: RayshardingError = cls(**fields)
    return error


def agree(error: BaseException | None, value: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Exchange outcomes; collective over `group`.

    Args:
        error: What went wrong on this rank, or `None`.
        value: JSON value to share when all went well.
        group: Process group, the default group if `None`.

    Returns:
        Every rank's value, in rank order.

    Raises:
        Exception: `error` itself on a rank that has one; on the others an equal error of ours that names the first
            failing rank (`RayshardingError` if the original is not one of ours).
    """
    # Every rank comes here whatever happened to it: a rank that raised before would leave the others waiting.
    outcomes = all_gather_json({"error": None if error is None else _describe(error), "value": value}, group)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise _rebuild(rank, outcome["error"])
    return [outcome["value"] for outcome in outcomes]


def agree_all_went_well(error: BaseException | None) -> None:
    """As `agree`, of nothing but whether; collective over the default group. One small all-reduce where all is well.

    Args:
        error: What went wrong on this rank, or `None`.

    Raises:
        Exception: As from `agree`.
    """
    failed = torch.tensor([error is not None], dtype=torch.uint8, device=metadata_device())
    # For steps that are many: every rank comes here, whatever happened to it.
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed.item():
        agree(error)


def from_rank_0(make: Callable[[], Any]) -> Any:
    """Make a JSON value on rank 0 alone, and give it to every rank; collective over the default group.

    Args:
        make: Called on rank 0.

    Raises:
        Exception: What `make` raised; on the other ranks as from `agree`.
    """
    value: Any = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            value = make()
        except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
            error = raised
    agree(error)
    return broadcast_json(value)


def wait_for(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for the other ranks' part in a collective that was begun earlier, where a supervisor sees that one waits.

    Args:
        work: What has been begun.
        timeout: Longest wait. Default: the process group's.
    """
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread waits in a collective for other ranks, by its innermost Python frame."""
    return frame.f_code is wait_for.__code__ or f"torch{os.sep}distributed" in frame.f_code.co_filename


BUCKETS_PER_CHECK = 8
"""Buckets between two looks at whether another rank has failed."""


class FailureFlag:
    """Lets the ranks of a stream stop together soon after one has failed. Every rank makes one and calls it alike.

    Costs an all-reduce of one byte for every `BUCKETS_PER_CHECK` buckets, and nobody waits for it but a rank that is so
    many buckets ahead. A failure stops all ranks within twice as many.

    Args:
        num_buckets: Of the stream. Nobody asks after the last one: the outcome of all is exchanged next.
        timeout_s: Longest time of one bucket on any rank. Ranks that send each other nothing may be many apart.
        group: Process group, the default group if `None`.
    """

    def __init__(self, num_buckets: int, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        self._num_buckets = num_buckets
        self._timeout = timedelta(seconds=timeout_s * 2 * BUCKETS_PER_CHECK)
        self._group = group
        self._work: dist.Work | None = None
        self._flag = torch.zeros(1, dtype=torch.uint8, device=metadata_device(group))

    def check(self, index: int, failed: bool) -> bool:
        """After bucket `index`: whether all ranks stop here; the same answer on every rank."""
        if dist.get_world_size(self._group) == 1:
            return failed
        if (index + 1) % BUCKETS_PER_CHECK or index + 1 == self._num_buckets:
            return False
        self.close()
        if self._flag.item():
            return True
        self._flag.fill_(failed)
        # Every rank comes here at the same buckets, failed or not: one that left early would hold the others.
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def close(self) -> None:
        """Wait for the other ranks' part in the last check, so that no message of it is left in the group."""
        if self._work is not None:
            wait_for(self._work, self._timeout)
            self._work = None
