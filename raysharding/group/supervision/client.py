"""`Client`: packs commands for the ranks and submits them to the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raysharding.batch import RankBatch
from raysharding.config import Timeouts
from raysharding.errors import GroupBrokenError
from raysharding.group.calls import Asking, BegunSave, Call, Collect, JointStart, PendingSaves, collect_rank0
from raysharding.group.ranks import Member, RankInfo
from raysharding.group.rpc import Command, OutputMode, Packed, pack_batches, pack_same
from raysharding.group.supervision.group_state import GroupState
from raysharding.group.supervision.running_call import Check, Continue, QueuedCall
from raysharding.group.supervision.supervisor import Supervisor


@dataclass(frozen=True)
class Client:
    """Submits commands to the ranks. All methods raise `GroupBrokenError` on a broken or closed group."""

    members: tuple[Member, ...]
    """Members, by rank."""
    supervisor: Supervisor
    """Runs the calls."""
    timeouts: Timeouts
    """Deadlines."""
    max_output_bytes: int
    """Largest result of one rank, in bytes."""

    pending: PendingSaves = field(default_factory=PendingSaves)
    """Saves in the background."""

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Where each rank runs, by rank."""
        return tuple(member.info for member in self.members)

    def submit_batches(
        self,
        method: str,
        batches: Sequence[RankBatch],
        *extra: Any,
        collect: Collect,
        as_refs: bool = False,
        check: Check | None = None,
    ) -> Call:
        """Submit a command with a batch per rank, under `Timeouts.call_s`.

        Args:
            method: Name of the command, whose first argument is the batch.
            batches: Batches, by rank.
            extra: Arguments that follow the batch, the same on every rank.
            collect: Makes the result.
            as_refs: True to leave the results in the object store as plain objects.
            check: See `submit_same`.
        """
        self._refuse()
        if len(batches) != len(self.members):
            raise GroupBrokenError(f"{method}: the number of ranks changed while the call was made; call again")
        values = (value for one in batches for value in (*one.wrapped_args, *one.wrapped_kwargs.values()))
        if any(isinstance(value, ray.ObjectRef) for value in values):
            # Shorter than the call's deadline, after which ranks that still wait would count as hung.
            batches = [replace(batch, fetch_s=self.timeouts.call_s / 2) for batch in batches]
        args, shared = pack_batches(method, batches, *extra)
        output: OutputMode = "ref" if as_refs else "value"
        command = Command(method, shared=shared, output=output, max_output_bytes=self.max_output_bytes)
        return self._submit(command, args, collect, check, self.timeouts.call_s)

    def submit_same(
        self,
        method: str,
        *args: Any,
        deadline_s: float | None = None,
        watch: bool = False,
        keep_step: Continue | None = None,
        collect: Collect = collect_rank0,
        is_last: bool = False,
        check: Check | None = None,
        joint: JointStart | None = None,
    ) -> Call:
        """Submit a command with the same arguments on every rank.

        Args:
            method: Name of the command.
            args: Its arguments.
            deadline_s: Deadline, in seconds. Default `Timeouts.call_s`.
            watch: True if progress extends the deadline.
            keep_step: Receives the values of a command with several steps; see `NEXT_STEP`.
            collect: Makes the result. Default: the value of rank 0.
            is_last: True if the command cleans up after a failure: it does not raise the error of a failed save.
            check: Called at the moment the call is queued; raises if the call must not be queued.
            joint: Lets the call begin together with one of another group.
        """
        if not is_last:
            self._refuse()
        deadline_s = self.timeouts.call_s if deadline_s is None else deadline_s
        options = (deadline_s, watch, keep_step, joint)
        return self._submit(Command(method), pack_same(method, *args), collect, check, *options)

    def submit_each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, deadline_s: float, collect: Collect = collect_rank0
    ) -> Call:
        """Submit a command with different arguments for each rank.

        Args:
            method: Name of the command.
            args: Arguments, by rank.
            deadline_s: Deadline, in seconds.
            collect: Makes the result. Default: the value of rank 0.
        """
        return self._submit(Command(method), [pack_same(method, *one) for one in args], collect, None, deadline_s)

    def follow(self, save: BegunSave, call: Call, on_saved: Callable[[], None]) -> None:
        """Follow a background save to its end, on a thread.

        Args:
            save: The save.
            call: The call that began it.
            on_saved: Called on the thread when the save is committed.
        """
        supervisor = self.supervisor

        def why_lost() -> str:
            if not ray.is_initialized():  # a remote call would start another Ray
                return "Ray was shut down under the group"
            if supervisor.state is GroupState.CLOSED:
                return "the group was shut down"
            cause = supervisor.status.cause
            # Ranks that are kept may continue writing; ranks that are restarted in place report the outcome themselves.
            return "" if cause is None or supervisor.survivors.is_kept else str(cause).partition("\n")[0]

        self.pending.begin(save, call, Asking(self.members[0].actor.save_status.remote, why_lost, on_saved))

    def _refuse(self) -> None:
        """Raise if the group is unusable or a save in the background has failed."""
        self.supervisor.status.refuse_if_unusable()
        self.pending.raise_failed()

    def _submit(
        self, command: Command, args: Packed | Sequence[Packed], collect: Collect, check: Check | None, *options: Any
    ) -> Call:
        """Queue a call; `options` are the other fields of `QueuedCall`."""
        call = Call(command.method, len(self.members), collect, self.timeouts.call_s, self.supervisor)
        self.supervisor.submit(QueuedCall(call, command, args, *options), check)
        return call
