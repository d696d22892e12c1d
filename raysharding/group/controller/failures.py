"""From the observed failures of ranks to one typed error, with the primary cause first."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from raysharding.errors import CallTimeoutError, FailureKind, GroupError, RankFailure, RendezvousError
from raysharding.group.cluster import ProcessSnapshot
from raysharding.group.messages import Outcome, RemoteError, Stacks, StateChange, in_step, one_model
from raysharding.group.ranks import RankInfo

_MAX_DEATH_CHARS = 600
_RENDEZVOUS_ERROR = f"{RendezvousError.__module__}.{RendezvousError.__qualname__}"


@dataclass(frozen=True, slots=True)
class Observed:
    """One failure, as the controller observed it."""

    failure: RankFailure
    """The failure."""
    raised: RemoteError | None = None
    """The exception, if the rank raised one."""
    follows: bool = False
    """True if the failure is only a consequence: the rank lost, waits for, or repeats the error of, another rank."""


def rank_raised(info: RankInfo, raised: RemoteError) -> Observed:
    """Describe a rank that raised."""
    plain = _plain(info, "raised", raised.phase, raised.message)
    failure = replace(plain, error_type=raised.error_type, traceback=raised.traceback, tensor=raised.tensor)
    return Observed(failure, raised, follows=raised.is_connection or raised.agreed_from not in (None, info.rank))


def rank_died(info: RankInfo, phase: str, error: BaseException, *, is_made: bool = True) -> Observed:
    """Describe a rank whose process died.

    Args:
        info: The rank.
        phase: Its phase.
        error: Ray's error.
        is_made: True if the caller has the group: `from_checkpoint` has returned.
    """
    # Ray names causes and no place to look: a rank that the kernel killed for its memory has written nothing.
    unmade = f"worker-*-{info.pid}.err in Ray's session_latest/logs on that node"
    log = f"group.logs({info.rank})" if is_made else unmade
    cure = f"; {log} shows its last lines, `raysharding plan` whether its memory suffices"
    said = textwrap.shorten(str(error), _MAX_DEATH_CHARS, placeholder="…")
    return Observed(_plain(info, "died", phase, said + cure))


def rank_hung(
    info: RankInfo,
    phase: str,
    deadline_s: float,
    stacks: Stacks | None,
    snapshot: ProcessSnapshot | None = None,
    *,
    is_missed: bool = False,
) -> Observed:
    """Describe a rank that did not finish in time.

    Args:
        info: The rank.
        phase: Its phase.
        deadline_s: Deadline that passed, in seconds.
        stacks: Stacks that the rank reported; `None` if it did not answer.
        snapshot: Snapshot of its process that another process made; `None` without one.
        is_missed: True if another rank is elsewhere, for which a device that does not finish waits.
    """
    what, where = f"not finished after {deadline_s:g} s", ""
    if stacks is None:
        what += ", and its process answers no questions" + (f"; {snapshot.state}" if snapshot else "")
        where = snapshot.stacks if snapshot else ""
    else:
        busy = ": its device computes, or waits for other ranks" if stacks.is_busy else ""
        what += ": waits in a collective for other ranks" if stacks.in_collective else busy
        where = stacks.text
    failure = replace(_plain(info, "hung", phase, what), traceback=where)
    return Observed(failure, follows=stacks is not None and (stacks.in_collective or (stacks.is_busy and is_missed)))


def rank_stopped(info: RankInfo, phase: str) -> Observed:
    """Describe a rank that was stopped because another one had failed."""
    return Observed(_plain(info, "collateral", phase, "stopped, because another rank had failed"), follows=True)


def all_alike(seen: Sequence[Observed], world_size: int) -> bool:
    """Return True if all ranks raised the same kind of error, and can run later calls."""
    raised = [observed.raised for observed in seen]
    # A rank whose result cannot be sent has run the call, and has not reset its module.
    kinds = {(one.error_type, one.stage) for one in raised if one is not None}
    return len(seen) == world_size and all_recovered(seen) and len(kinds) == 1


def all_agreed(seen: Sequence[Observed], world_size: int) -> bool:
    """Return True if all ranks agreed to raise, whatever each of them raised, and can run later calls."""
    are_agreed = all(one.raised is not None and one.raised.agreed_from is not None for one in seen)
    return len(seen) == world_size and all_recovered(seen) and are_agreed


def all_recovered(seen: Sequence[Observed]) -> bool:
    """Return True if every failure is an exception that left module and process group of the rank usable."""
    raised = [observed.raised for observed in seen]
    return all(one is not None and not one.lost_peers and one.recovered for one in raised)


def resets_some(seen: Sequence[Observed], world_size: int) -> bool:
    """Return True if some ranks have reset their modules and others have not."""
    return not (output_only(seen) or all_alike(seen, world_size) or all_agreed(seen, world_size))


def leaves_intact(call: str, seen: Sequence[Observed], changes: Collection[StateChange], world_size: int) -> bool:
    """Return True if the group is READY after these failures; all ranks have finished the call.

    Args:
        call: Name of the call.
        seen: The failures.
        changes: Reported changes of the call to the ranks.
        world_size: Number of ranks.
    """
    if output_only(seen):
        return True
    are_alike = all_alike(seen, world_size)
    if call != "call":
        return are_alike or all_agreed(seen, world_size)
    # A user's function may do different things on different ranks, and all have finished it. But some ranks may have
    # taken an optimizer step that the failed rank did not reach, or started a collective without it.
    are_equal = len(changes) == world_size and len(set(changes)) == 1 and in_step(changes)
    return are_equal and (are_alike or (all_recovered(seen) and one_model(changes)))


def output_only(seen: Sequence[Observed]) -> bool:
    """Return True if all ranks ran the call, and only packing a result failed."""
    return all(one.raised is not None and one.raised.stage == "output" for one in seen)


def judge(seen: Sequence[Observed], what: str, timed_out: bool, arrivals: str = "") -> GroupError:
    """Build the error from all failures, in the order of observation.

    Args:
        seen: At least one failure.
        what: Name of the call and the group, for the message.
        timed_out: True if the deadline of the call passed first.
        arrivals: Which ranks wait for which, as the end of a sentence.
    """
    # A dead rank, or one that cannot reach rank 0's store, is the cause of errors about missing ranks, even if those
    # were observed first.
    for is_cause in (_died, _misses_store):
        if any(map(is_cause, seen)):
            seen = [replace(one, follows=one.follows or (_misses_ranks(one) and not is_cause(one))) for one in seen]
    primary = next((one for one in seen if not one.follows), seen[0])
    failures = {one.failure.rank: _beside(one, primary) for one in seen}
    failures[primary.failure.rank] = primary.failure
    first = primary.failure
    count = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
    message = f"{what}: rank {first.rank} {first.kind}, {count} failed{arrivals}"
    cls = CallTimeoutError if timed_out else GroupError
    return cls(message, primary=first, failures=dict(sorted(failures.items())))


def _died(one: Observed) -> bool:
    return one.failure.kind == "died"


def _misses_ranks(one: Observed) -> bool:
    return one.raised is not None and one.raised.error_type == _RENDEZVOUS_ERROR


def _misses_store(one: Observed) -> bool:
    error = one.raised.exception() if one.raised is not None and _misses_ranks(one) else None
    return isinstance(error, RendezvousError) and error.missing_ranks == (0,)


def failed(seen: Sequence[Observed], error: GroupError, world_size: int) -> Outcome:
    """Return the outcome of a failed call, of which the driver's `raised_by` makes the caller's error."""
    own = next((one.raised for one in seen if one.failure is error.primary), None)
    kinds = {one.failure.error_type for one in seen}
    is_common = len(kinds) == 1 and len({one.failure.rank for one in seen}) == world_size
    return Outcome(error=error, raised=own, is_common=is_common)


def _plain(info: RankInfo, kind: FailureKind, phase: str, message: str) -> RankFailure:
    return RankFailure(rank=info.rank, node_ip=info.node_ip, pid=info.pid, kind=kind, phase=phase, message=message)


def _beside(one: Observed, primary: Observed) -> RankFailure:
    """Return a failure, as `collateral` if it is a consequence of the primary one."""
    is_own = one is primary or not one.follows or one.failure.kind == "hung" == primary.failure.kind
    return one.failure if is_own else replace(one.failure, kind="collateral")
