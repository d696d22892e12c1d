"""`WeightPaths`, `submit_copy`: copies of weights between two running groups."""

from __future__ import annotations

import secrets
import threading
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from raysharding.distributed.comm import StoreAddress
from raysharding.distributed.weights import CopyReport, CopySpec
from raysharding.errors import GroupError
from raysharding.group.calls import IN_ORDER, Call, Collect, JointStart, collect_all
from raysharding.group.supervision import Check, Client, GroupState
from raysharding.units import MIB

_ANSWER_S = 30.0
_BUCKET_BYTES = 16 * MIB
"""Bytes that a rank sends, or receives, in one round of a copy; `tests/bench/copy_weights.py` compares sizes."""
_RANK_SHARE = 0.8
"""Part of the deadline after which ranks give up their peers. The rest is theirs to agree and answer in."""


@dataclass(eq=False)
class WeightPath:
    """The way from one group to another, whose connections and plan the ranks of both keep."""

    source: Client
    """Client of the source."""
    target: Client
    """Client of the target."""
    merge: bool
    """True if adapters are merged on the way."""
    address: StoreAddress
    """Store of the source."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies the path on the ranks."""
    is_closed: bool = False
    """True if a copy failed on it."""
    number: int = 0
    """Copies submitted so far."""

    def is_usable(self) -> bool:
        """Return True if the ranks of both groups can still have it."""
        gone = (GroupState.BROKEN, GroupState.CLOSED)
        return not self.is_closed and not any(one.supervisor.state in gone for one in (self.source, self.target))


class WeightPaths:
    """The paths that begin, or end, at one group."""

    def __init__(self) -> None:
        self._paths: list[WeightPath] = []

    def find(self, source: Client, target: Client, merge: bool) -> WeightPath | None:
        """Return the path between two groups, if there is one that can be used."""
        for path in self._paths:
            if path.source is source and path.target is target and path.merge == merge and path.is_usable():
                return path
        return None

    def add(self, path: WeightPath) -> None:
        """Add a path."""
        self._paths.append(path)

    def usable(self) -> tuple[str, ...]:
        """Drop the paths whose other group is gone; return the tokens of the others."""
        self._paths = [path for path in self._paths if path.is_usable()]
        return tuple(path.token for path in self._paths)


def submit_copy(
    source: tuple[Client, WeightPaths],
    target: tuple[Client, WeightPaths],
    *,
    merge: bool,
    staged: bool,
    check: Check,
) -> Call:
    """Submit a copy to both groups; see `ShardedModelGroup.copy_to`.

    Args:
        source: The group that the weights come from.
        target: The group that they go to.
        merge: True to merge adapters.
        staged: True to receive beside the old weights.
        check: Raises if the target must not change.
    """
    clients = source[0], target[0]
    for client in clients:
        client.supervisor.status.refuse_if_unusable()
    check()  # before the source's call is queued; again when the target's is
    path = source[1].find(*clients, merge)
    if path is None:
        path = WeightPath(*clients, merge, _store_address(clients[0]))
        for _, paths in (source, target):
            paths.add(path)
    path.number += 1
    limit_s = _RANK_SHARE * min(client.timeouts.call_s for client in clients)
    spec = partial(
        CopySpec,
        token=path.token,
        number=path.number,
        address=path.address,
        num_sources=len(clients[0].members),
        num_targets=len(clients[1].members),
        rendezvous_s=min(client.timeouts.rendezvous_s for client in clients),
        limit_s=limit_s,
        merge=merge,
        staged=staged,
        bucket_bytes=_BUCKET_BYTES,
    )
    specs = (
        spec(is_source=True, kept=source[1].usable()),
        spec(is_source=False, kept=target[1].usable()),
    )
    both = _Copy(path, specs[0].key, merge, staged)
    with IN_ORDER:
        both.submit(specs, check)
    return both.whole


def _store_address(client: Client) -> StoreAddress:
    try:
        address: StoreAddress = ray.get(client.members[0].actor.store_address.remote(), timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        raise GroupError(f"{client.supervisor.name}: rank 0 does not answer: {type(error).__name__}") from error
    return address


class _Copy:
    """One copy: a call in each group, and the call that the user gets, which ends when both have ended."""

    def __init__(self, path: WeightPath, key: str, merge: bool, staged: bool) -> None:
        self._path = path
        self._key = key
        self._clients = path.source, path.target
        self._joint = JointStart()
        self._calls: tuple[Call, ...] = ()
        self._consequence: GroupError | None = None
        self._lock = threading.Lock()
        self._num_ended = 0
        self._options = {"is_merged": merge, "is_staged": staged}
        supervisor = path.source.supervisor
        collect = Collect(lambda _: self._report())
        self.whole: Call[CopyReport] = Call("copy_to", 0, collect, path.source.timeouts.call_s, supervisor)

    def submit(self, specs: tuple[CopySpec, CopySpec], check: Check) -> None:
        """Queue both calls, or none."""
        source, target = self._clients
        options: dict[str, Any] = {"collect": collect_all, "joint": self._joint}
        first = source.submit_same("copy_to", specs[0], **options)
        try:
            second = target.submit_same("copy_to", specs[1], check=check, **options)
        except BaseException as error:
            self._joint.cancel(source.supervisor, first, self._withdrawn(target, str(error)))
            raise
        self._calls = first, second
        for number, call in enumerate(self._calls):
            call.when_done(partial(self._on_end, number))

    def _withdrawn(self, failed: Client, why: str) -> GroupError:
        """Return the error of a call that was withdrawn because the other group's cannot run."""
        self._consequence = GroupError(f"copy_to did not begin: {failed.supervisor.name} cannot run it: {why}")
        return self._consequence

    def _on_end(self, number: int, call: Call) -> None:
        """Handle the end of one group's call, on its supervision thread."""
        error, other = _error_of(call), 1 - number
        client = self._clients[other]
        if error is not None:
            why = self._withdrawn(self._clients[number], str(error).partition("\n")[0])
            self._joint.cancel(client.supervisor, self._calls[other], why)
        if error is not None or any(one["lost"] is not None for one in call.values()):
            self._path.is_closed = True
            self._stop(client)
        with self._lock:
            self._num_ended += 1
            is_last = self._num_ended == len(self._calls)
        if is_last:
            self.whole.end(self._error())

    def _stop(self, client: Client) -> None:
        """Make ranks that are in the copy, or about to begin it, end it: the other group's do not answer."""
        if ray.is_initialized():  # a remote call would start another Ray
            for member in client.members:
                member.actor.stop_copy.remote(member.epoch, self._key)

    def _error(self) -> BaseException | None:
        """Return the error of the copy, which is that of the group where the cause is; `None` if both calls succeeded.

        A target that has taken the weights has them, even if the source has not heard of it.
        """
        errors = [_error_of(call) for call in self._calls]
        # A rank of the source that fails makes the target's raise; one of the target's leaves the source without error.
        error = next((one for one in errors if one is not None and one is not self._consequence), None)
        if error is None:
            return next((one for one in errors if one is not None), None)
        error, own = copy(error), error  # the group's queue gives the same error to other calls
        error.__cause__ = own.__cause__
        for what, client in zip(("source", "target"), self._clients, strict=True):
            status = client.supervisor.status
            primary = None if status.cause is None else status.cause.primary
            cause = "" if primary is None else f": rank {primary.rank} {primary.kind}: {primary.message}"
            holds = ", with the new weights" if what == "target" and errors[1] is None else ""
            error.add_note(f"the {what}, {client.supervisor.name}, is {client.supervisor.state.value}{holds}{cause}")
        return error

    def _report(self) -> CopyReport:
        source, target = (call.values() for call in self._calls)
        return CopyReport.of(source, target, **self._options)


def _error_of(call: Call) -> Exception | None:
    """Return the error of a call that has ended; `None` if it succeeded."""
    try:
        call.result()
    except Exception as error:  # noqa: BLE001 - raised to the user, as the copy's
        return error
    return None
