"""`submit_copy`: copies of weights between two running groups."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial

from raysharding.distributed.comm import StoreAddress
from raysharding.distributed.weights import CopyReport, CopySpec
from raysharding.errors import GroupError
from raysharding.group.calls import Call, Client, Collect
from raysharding.group.cluster import actor_id
from raysharding.group.messages import GroupState
from raysharding.group.ranks import RankInfo
from raysharding.units import MIB

_ANSWER_S = 30.0
_BUCKET_BYTES = 16 * MIB
"""Bytes that a rank sends, or receives, in one round of a copy; `tests/bench/copy_weights.py` compares sizes."""
_RANK_SHARE = 0.8
"""Part of the deadline after which ranks give up their peers. The rest is theirs to agree and answer in."""


@dataclass(eq=False)
class WeightPath:
    """A source and a target of copies, for which the ranks of both keep connections and plan."""

    source: Client
    """Client of the source."""
    target: Client
    """Client of the target."""
    merge: bool
    """True if adapters are merged before they are sent."""
    address: StoreAddress
    """Store of the source."""
    ranks: tuple[tuple[RankInfo, ...], ...]
    """Where the ranks of both ran when the path was made; another driver may have restarted a group since."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies the path on the ranks."""
    is_closed: bool = False
    """True if a copy failed on it."""
    number: int = 0
    """Copies submitted so far."""

    def is_usable(self) -> bool:
        """Return True if the ranks of both groups can still have it."""
        gone = (GroupState.BROKEN, GroupState.CLOSED)
        clients = self.source, self.target
        is_there = self.ranks == tuple(one.ranks for one in clients) and not any(one.state in gone for one in clients)
        return is_there and not self.is_closed


_DRIVER = secrets.token_hex(8)
_paths: list[WeightPath] = []
"""Paths of this process. The ranks of a group keep the buffers of those that begin or end at it."""


def submit_copy(
    source: Client, target: Client, *, merge: bool, staged: bool, refused_beside: Mapping[str, str]
) -> Call:
    """Submit a copy of weights to both groups.

    Args:
        source: The group that the weights come from.
        target: The group that they go to.
        merge: True to merge adapters.
        staged: True to receive beside the old weights.
        refused_beside: Kind of a lock → why the target must not change beside it.
    """
    clients = source, target
    if len({actor_id(client.connection.controller) for client in clients}) == 1:
        raise ValueError(f"copy_to({target.name}): both handles are of one group: give another group")
    for client in clients:
        client.connection.refuse_if_unusable()
    _paths[:] = [path for path in _paths if path.is_usable()]
    existing = (one for one in _paths if (one.source, one.target, one.merge) == (source, target, merge))
    path = next(existing, None)
    if path is None:
        path = WeightPath(source, target, merge, _store_address(source), (source.ranks, target.ranks))
        _paths.append(path)
    path.number += 1
    spec = partial(
        CopySpec,
        token=path.token,
        number=path.number,
        driver=_DRIVER,
        pair=f"{actor_id(source.connection.controller)}/{actor_id(target.connection.controller)}/{merge}",
        address=path.address,
        num_sources=len(source.ranks),
        num_targets=len(target.ranks),
        rendezvous_s=min(client.timeouts.rendezvous_s for client in clients),
        limit_s=_RANK_SHARE * min(client.timeouts.call_s for client in clients),
        merge=merge,
        staged=staged,
        bucket_bytes=_BUCKET_BYTES,
    )
    kept = [tuple(path.token for path in _paths if one in (path.source, path.target)) for one in clients]
    specs = spec(is_source=True, kept=kept[0]), spec(is_source=False, kept=kept[1])
    return _Copy(path, specs, refused_beside).whole


def _store_address(client: Client) -> StoreAddress:
    replies = client.connection.probe("store_address", within_s=_ANSWER_S, ranks=[0]).replies
    if 0 not in replies:
        raise GroupError(f"{client.name}: rank 0 does not answer")
    address: StoreAddress = replies[0].unpack()
    return address


class _Copy:
    """One copy: a call in each group, and the call that the user gets, which ends when both have ended."""

    def __init__(self, path: WeightPath, specs: tuple[CopySpec, CopySpec], refused_beside: Mapping[str, str]) -> None:
        """Queue both calls; the controllers let them begin together, or not at all."""
        self._path = path
        self._clients = path.source, path.target
        self._spec = specs[0]
        self._lock = threading.Lock()
        self._num_ended = 0
        self.whole: Call[CopyReport] = Call("copy_to", 0, Collect(lambda _: self._report()), 0.0, path.source)
        self._calls = path.source.submit_pair(path.target, "copy_to", specs, self._spec.key, refused_beside)
        self.whole.on_raise = self._on_raise
        for number, call in enumerate(self._calls):
            call.when_done(partial(self._on_end, number))

    def _on_raise(self) -> None:
        for call in self._calls:
            call.on_raise()

    def _on_end(self, number: int, call: Call) -> None:
        """Handle the end of one group's call, on its callback thread."""
        error = call.error()
        if error is not None or any(one["lost"] is not None for one in call.values()):
            self._path.is_closed = True
            # Ranks that are in the copy, or about to begin it, wait for the other group's, which do not answer.
            self._clients[1 - number].connection.tell_ranks("stop_copy", self._spec.key)
        with self._lock:
            self._num_ended += 1
            is_last = self._num_ended == len(self._calls)
        if is_last:
            self.whole.end(self._error())

    def _error(self) -> BaseException | None:
        """Return the error of the copy, which is that of the group where the cause is; `None` if both calls succeeded.

        A target that has taken the weights has them, even if the source has not heard of it.
        """
        errors = [call.error() for call in self._calls]
        # A rank of the source that fails makes the target's raise; one of the target's leaves the source without error.
        causes = (one for one, call in zip(errors, self._calls, strict=True) if one is not None and not call.follows)
        error = next(causes, None)
        if error is None:
            return next((one for one in errors if one is not None), None)
        error, own = copy(error), error  # the group's queue gives the same error to other calls
        error.__cause__ = own.__cause__
        for what, client in zip(("source", "target"), self._clients, strict=True):
            primary = None if client.cause is None else client.cause.primary
            cause = "" if primary is None else f": rank {primary.rank} {primary.kind}: {primary.message}"
            holds = ", with the new weights" if what == "target" and errors[1] is None else ""
            error.add_note(f"the {what}, {client.name}, is {client.state.value}{holds}{cause}")
        return error

    def _report(self) -> CopyReport:
        source, target = (call.values() for call in self._calls)
        return CopyReport.of(source, target, is_merged=self._spec.merge, is_staged=self._spec.staged)
