"""`CallRunner`: runs one call on the ranks, and judges its outcome. All on the supervision thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import ray

from raysharding.config import Timeouts
from raysharding.errors import GroupError, RankFailure
from raysharding.group.calls import Sent
from raysharding.group.ranks import Member
from raysharding.group.rpc import NEXT_STEP, Command, Future, Packed, Response, number_of, pack, record_exception
from raysharding.group.supervision import failures
from raysharding.group.supervision.probes import POLL_S, Probes
from raysharding.group.supervision.running_call import QueuedCall, RunningCall
from raysharding.group.supervision.survivors import BUSY, TORN, RecoverableState


class CallSupervisor(Protocol):
    """The methods of the supervisor that a runner calls."""

    def watch(self, future: Future, then: Callable[[Future], None]) -> None:
        """Call `then(future)` on the supervision thread when the future completes."""

    def send(self, rank: int, message: bytes) -> bool:
        """Send a message to a rank; return True if it is connected. Other ranks die soon, or are stopped."""

    def has_ray(self) -> bool:
        """Return True if Ray is initialized, else break the group. Calls to Ray would start it anew."""

    def advance(self) -> None:
        """Do all that is due for the running call and the queue."""

    def rank_died(self, rank: int, error: BaseException) -> None:
        """Handle the death of a rank, with Ray's error."""

    def break_group(self, seen: Sequence[failures.Observed], error: GroupError, recoverable: RecoverableState) -> None:
        """Break the group, with its failures, error and recoverable state."""

    def why_not(self, lost: Collection[int]) -> str:
        """Return why the ranks cannot form a group again; empty if they can. `lost` are those that hang."""

    def remark(self) -> str:
        """Return a note on other problems, for the first line of an error; empty without problems."""


class CallRunner:
    """Runs one call at a time on the ranks."""

    def __init__(self, name: str, members: Sequence[Member], timeouts: Timeouts, supervisor: CallSupervisor) -> None:
        """Start without a call.

        Args:
            name: Name of the group in errors.
            members: Members, by rank.
            timeouts: Deadlines.
            supervisor: Supervisor of this runner.
        """
        self.run: RunningCall | None = None
        self._resets_next = False
        self._name = name
        self._members = members
        self._timeouts = timeouts
        self._supervisor = supervisor
        self._probes = Probes(members, supervisor.watch, lambda: self.run, supervisor.advance)
        # Numbers of no other driver: the number also identifies late messages of an earlier driver.
        self._numbers = members[0].epoch << 32
        self._last_number: int | None = None
        self.leaving: set[int] = set()

    def check(self, dead: Collection[int]) -> None:
        """Do what is due: end the step, probe late ranks, give up the call."""
        run, now = self.run, time.monotonic()
        if run is None:
            return
        everyone = len(run.finished) == len(self._members)
        if run.drain_until is not None:
            if everyone or now >= run.drain_until:
                self._conclude(run)
            elif run.neighbours_at is not None and now >= run.neighbours_at:
                self._probes.neighbours(run)
        elif everyone:
            self._step_done(run)
        elif now >= run.deadline:
            self._probes.stacks(run)
        elif run.task.watch_progress and now >= run.next_poll:
            self._probes.progress(run, dead)

    def begin(self, task: QueuedCall, command: Command) -> None:
        """Send one step to all ranks."""
        now = time.monotonic()
        self._numbers += 1
        self.run = run = RunningCall(task, self._numbers, deadline=now + task.deadline_s, next_poll=now + POLL_S)
        try:
            # Large arguments are stored before any message is sent: if the store is full, no rank runs the call.
            messages = self._encode(task, replace(command, number=run.number, resets=self._resets_next))
        except ray.exceptions.RayError as error:
            self.run = None
            task.call.end(GroupError(f"cannot store the arguments of {task.call.name}: {error}"))
            return
        self._resets_next = False
        for rank, (message, stored) in enumerate(messages):
            self._send(run.number, rank, message, stored)

    def leave(self) -> None:
        """Send `close` to idle ranks; `leaving` has the ranks that have not responded. No call follows."""
        self._numbers += 1
        self._last_number = self._numbers
        no_args = pack(((), {}), "close")
        message, _ = Command("close", no_args, epoch=self._members[0].epoch, number=self._numbers).encode()
        self.leaving = {rank for rank in range(len(self._members)) if self._supervisor.send(rank, message)}

    def _send(self, number: int, rank: int, message: bytes, stored: Sequence[ray.ObjectRef]) -> None:
        if stored:
            # Ray delivers the large arguments to the rank, together with the message.
            delivered = self._members[rank].actor.deliver.remote(message, *stored).future()
            self._supervisor.watch(delivered, partial(self._on_delivered, number, rank))
        else:
            self._supervisor.send(rank, message)

    def _encode(self, task: QueuedCall, command: Command) -> Sequence[tuple[bytes, Sequence[ray.ObjectRef]]]:
        """Return the message and the stored arguments for each rank."""
        command = replace(command, epoch=self._members[0].epoch)  # the same for all members of one driver
        if isinstance(task.args, Packed):
            return [replace(command, args=task.args).stored().encode()] * len(self._members)
        command = command.stored()  # shared arguments are stored once
        return [replace(command, args=args).stored().encode() for args in task.args]

    def on_message(self, rank: int, message: bytes) -> None:
        """Handle the response of a rank."""
        number = number_of(message)
        if number == self._last_number:
            self.leaving.discard(rank)
            return
        response = Response.decode(message)
        if not response.is_stored:
            self._on_response(number, rank, response, response.value)
            return
        if not self._supervisor.has_ray():
            return
        # The rank has packed the result; it is complete when Ray has stored it.
        stored, result = self._members[rank].actor.take.remote(self._members[rank].epoch, number)
        self._supervisor.watch(stored.future(), partial(self._on_stored, number, rank, response, result))

    def _on_stored(self, number: int, rank: int, response: Response, result: ray.ObjectRef, future: Future) -> None:
        error, run = future.exception(), self._run_of(number)
        if isinstance(error, ray.exceptions.RayActorError):
            self._supervisor.rank_died(rank, error)
        elif error is not None and run is not None:
            raised = record_exception(error, stage="output", phase=run.task.call.name, tensor=None, recovered=True)
            self._on_response(number, rank, replace(response, error=raised), None)
        else:
            self._on_response(number, rank, response, result)

    def _on_delivered(self, number: int, rank: int, future: Future) -> None:
        error, run = future.exception(), self._run_of(number)
        if error is not None and run is not None:
            self._on_task_error(run, rank, error)

    def _run_of(self, number: int) -> RunningCall | None:
        run = self.run
        return run if run is not None and run.number == number else None

    def _on_response(self, number: int, rank: int, response: Response, sent: Sent) -> None:
        run = self._run_of(number)
        if run is None:
            return
        run.finished.add(rank)
        run.changes[rank] = response.change
        if run.is_freed:
            pass  # errors after the call was given up are consequences of that
        elif response.error is not None:
            self.see(run, failures.saw_raise(self._members[rank].info, response.error), self._timeouts.drain_s)
        else:
            run.more = response.more if rank == 0 else run.more
            if run.task.keep_step is None:
                run.task.call.rank_finished(rank, sent)
            elif rank == 0:
                run.task.keep_step(sent)
        self._supervisor.advance()

    def _on_task_error(self, run: RunningCall, rank: int, error: BaseException) -> None:
        """Handle that Ray could not deliver arguments: the actor is dead, or the arguments are lost."""
        if isinstance(error, ray.exceptions.RayActorError):
            self._supervisor.rank_died(rank, error)
            return
        run.finished.add(rank)
        info = self._members[rank].info
        message = f"Ray could not deliver the arguments to the rank: {error}"
        one = RankFailure(
            info.rank, info.node_ip, info.pid, "raised", run.task.call.name, type(error).__name__, message
        )
        self.see(run, failures.Observed(one), self._timeouts.drain_s)
        self._supervisor.advance()

    def see(self, run: RunningCall, observed: failures.Observed, patience_s: float) -> None:
        """Record a failure. The other ranks get time to finish: their outcome tells a bad input from a broken rank."""
        run.seen.append(observed)
        until = time.monotonic() + patience_s
        run.drain_until = until if run.drain_until is None else min(run.drain_until, until)

    def _step_done(self, run: RunningCall) -> None:
        task = run.task
        if run.more and task.keep_step is not None:
            self.begin(task, replace(task.command, method=f"{task.command.method}{NEXT_STEP}"))
            return
        if task.keep_step is not None:
            for rank in range(len(self._members)):
                task.call.rank_finished(rank, None)
        self.run = None
        task.call.end(None)

    def _conclude(self, run: RunningCall) -> None:
        """End a call that failed or is late: leave the group READY if that is safe, else break it."""
        everyone = len(run.finished) == len(self._members)
        if everyone and not run.seen:
            self._step_done(run)  # the call finished before the late ranks were stopped
            return
        if not run.is_freed and not everyone:
            run.describe_late(self._members)
            if not self._supervisor.why_not(self._hung(run)):
                self._probes.free(run)
                return
        what = f"{run.task.call.name} on {self._name}{self._supervisor.remark()}"
        error = failures.judge(run.seen, what, run.is_late, run.arrived)
        is_intact = failures.leaves_intact(run.task.call.name, run.seen, run.changes.values(), len(self._members))
        if everyone and is_intact and not run.is_freed:
            self.run = None
            # Gathered parameters or gradients on some ranks only would make the next call's collectives differ.
            self._resets_next = failures.resets_some(run.seen, len(self._members))
            run.task.call.end(failures.typed_error(run.seen, error, len(self._members)))
        else:
            self._supervisor.break_group(run.seen, error, self._remains(run))

    def _hung(self, run: RunningCall) -> set[int]:
        """Return the late ranks that are not known to wait for other ranks."""
        if run.stacks is None:
            return set()
        return {rank for rank in run.unfinished(self._members) if not run.waits(rank)}

    def _remains(self, run: RunningCall) -> RecoverableState:
        """Return what is left of the group after a call that broke it."""
        why_not = self._supervisor.why_not(self._hung(run))
        if not why_not and run.unfinished(self._members):
            why_not = BUSY
        if not why_not and not run.holds_one_model():
            why_not = TORN
        changed = any(change.num_changes for change in run.changes.values())
        return RecoverableState(why_not, done=run.task.call.name if changed else "")
