"""Agreement on failure: all ranks raise, or none does.

Note: which waits this ends.
    An error on one rank is raised there before the rank's next collective, in which the other ranks then wait until the
    group's timeout. A block that may fail on some ranks alone (files, memory, user code) therefore has no collective
    inside, and ends in one that every rank enters, failed or not: `agree` and `agreeing`, `from_rank_0`,
    `FailureFlag.check`. Its result is the same on every rank: all stop there, or all go on to the same collective.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raysharding import errors
from raysharding.distributed.comm.current_group import current_group, get_world_size, global_ranks, rank_name
from raysharding.distributed.comm.json_collectives import all_gather_json, any_rank, broadcast_json, metadata_device
from raysharding.distributed.comm.waiting import to_host, wait_for
from raysharding.errors import RayshardingError, said


def _describe(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: our own errors with their fields, all others as type and message."""
    if isinstance(error, RayshardingError):
        fields = {name: getattr(error, name) for name in inspect.signature(type(error)).parameters}
        try:
            json.dumps(fields)
        except TypeError:
            fields = {"message": said(error)}
        return {"type": type(error).__name__, "fields": fields}
    return {"type": "", "fields": {"message": f"{type(error).__name__}: {said(error)}"}}


def _rebuild(rank: str, description: dict[str, Any]) -> RayshardingError:
    cls = getattr(errors, description["type"], RayshardingError)
    fields = dict(description["fields"])
    fields["message"] = f"{fields['message']} (on rank {rank})"
    error: RayshardingError = cls(**fields)
    return error


def agree(error: BaseException | None, value: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Exchange the outcome of a step, an error or a value; collective over `group`.

    Args:
        error: Error of this rank, or `None`.
        value: JSON value to share if no rank has an error.
        group: Process group. Default: the current group.

    Returns:
        The values of all ranks, in rank order.

    Raises:
        Exception: On a rank with an error: `error` itself. On the other ranks: the same error with the number of the
            first failed rank (a `RayshardingError` if `error` is not an error of this package). Its
            attribute `raysharding_agreed_from` is the global rank whose error it is.
    """
    # Every rank calls this, with an error too: the others would wait in the all-gather for a rank that raised earlier.
    outcomes = all_gather_json({"error": None if error is None else _describe(error), "value": value}, group)
    failed = next((rank for rank, outcome in enumerate(outcomes) if outcome["error"] is not None), None)
    if failed is None:
        return [outcome["value"] for outcome in outcomes]
    source = dist.get_rank()
    if error is None:
        error, source = _rebuild(rank_name(failed, group), outcomes[failed]["error"]), global_ranks(group)[failed]
    if getattr(error, "raysharding_agreed_from", None) is None:  # else it is a copy, by an earlier agreement
        error.raysharding_agreed_from = source  # type: ignore[attr-defined]
    raise error


@contextmanager
def agreeing(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank, and raise on all ranks if it raises on one; collective over `group` at the end.

    The block itself must not be collective. Costs one small all-reduce without errors.

    Raises:
        Exception: As from `agree`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - `agree` raises it on all ranks
        error = raised
    # Every rank calls this, with an error too: the others would wait in the all-reduce.
    if any_rank(error is not None, group):  # the same on every rank: all enter the second collective, or none does
        agree(error, group=group)


def from_rank_0(make: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Make a JSON value on rank 0 and broadcast it; collective over `group`.

    Args:
        make: Called on rank 0 only.
        group: Process group of all ranks. Default: the current group.

    Raises:
        Exception: On rank 0: the error of `make`. On the other ranks: as from `agree`.
    """
    value: Any = None
    with agreeing(group):
        value = make() if dist.get_rank(group or current_group()) == 0 else None
    return broadcast_json(value, group)  # not reached after an error, on any rank


BUCKETS_PER_CHECK = 8
"""Number of buckets between two checks for failures on other ranks."""


class FailureFlag:
    """Stops all ranks of a stream soon after one of them fails. Every rank makes one and makes the same calls.

    Costs an all-reduce of one byte per `BUCKETS_PER_CHECK` buckets. A rank waits for it only when it is that many
    buckets ahead of another rank. After a failure, all ranks stop within twice that many buckets.

    Args:
        num_buckets: Number of buckets of the stream. The last one is not checked: the ranks exchange outcomes next.
        timeout_s: Longest time for one bucket on any rank. Ranks that exchange no data can be many buckets apart.
    """

    def __init__(self, num_buckets: int, timeout_s: float) -> None:
        self._num_buckets = num_buckets
        self._timeout = timedelta(seconds=timeout_s * 2 * BUCKETS_PER_CHECK)
        self._work: dist.Work | None = None
        self._flag = torch.zeros(1, dtype=torch.uint8, device=metadata_device())

    def check(self, index: int, failed: bool) -> bool:
        """Return True if all ranks stop after bucket `index`; the same on every rank.

        Args:
            index: The bucket that is done.
            failed: True from the first error of this rank on: the all-reduce that it went into is read at the next
                check.
        """
        if get_world_size() == 1:
            return failed
        if (index + 1) % BUCKETS_PER_CHECK or index + 1 == self._num_buckets:
            return False
        # One all-reduce is in flight at a time, from one check to the next, in which its messages overlap with those of
        # the buckets: the wait here is short, and the flag may be written after it.
        self.close()
        if to_host(self._flag).item():
            return True  # the all-reduce of this check starts on no rank
        self._flag.fill_(failed)
        # Every rank starts this at the same buckets, failed or not: the others would wait for one that stopped early.
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=current_group(), async_op=True)
        return False

    def close(self) -> None:
        """Wait for the last check to complete, so that no message of it is pending in the group."""
        if self._work is not None:
            wait_for(self._work, self._timeout)
            self._work = None
