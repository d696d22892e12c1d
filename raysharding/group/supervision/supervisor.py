"""`Supervisor`: sends the calls of a group to the ranks one at a time, and judges their outcome."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import ray

from raysharding.config import Timeouts
from raysharding.errors import CallCancelledError, GroupBrokenError, GroupError
from raysharding.group.calls import Call, DeferredInterrupts, MaskedInterrupts, Stopping
from raysharding.group.cluster import GCS_GONE_S, GcsMonitor, Lifetime, head_address, tell
from raysharding.group.ranks import Member
from raysharding.group.rpc import DriverConnections, EventLoop, Future, accept_ranks, refuse_to_wait, taken_over
from raysharding.group.supervision import failures
from raysharding.group.supervision.call_metrics import CallMetrics
from raysharding.group.supervision.call_runner import CallRunner
from raysharding.group.supervision.group_state import GroupState, GroupStatus
from raysharding.group.supervision.lease_renewal import LeaseRenewal
from raysharding.group.supervision.running_call import Check, QueuedCall, WaitingCalls
from raysharding.group.supervision.survivors import NOTHING, STOPPED, RecoverableState, Survivors
from raysharding.group.supervision.teardown import Teardown, close_at_exit

_TICK_S = 1.0
_AFTER_DEATH_S = 0.5
_RELEASE_S = 10.0
_HEARD_S = 2.0
_LEAVE_S = 2.0


class Supervisor:
    """Runs the calls of a group in order, under deadlines, and stops all ranks when one fails."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        timeouts: Timeouts,
        release: Callable[[], None],
        lifetime: Lifetime,
        *,
        is_loaded: bool,
    ) -> None:
        """Start the supervision thread.

        Args:
            name: Name of the group in errors.
            members: Members, by rank.
            timeouts: Deadlines.
            release: Removes the placement group; called once, after the actors have stopped.
            lifetime: Name and leases; a group with a name outlives this driver.
            is_loaded: True if the ranks hold a model already; else they get the lease of a group that is starting.
        """
        self.name = name
        self.members = tuple(members)
        self.status = GroupStatus(name)
        self._timeouts = timeouts
        self._lifetime = lifetime
        self._teardown = Teardown(members, release)
        lease_s = lifetime.lease_s if is_loaded else lifetime.starting_lease_s
        self._lease_renewal = LeaseRenewal(members, lease_s, self._teardown.has_ray)
        self._gcs_monitor = GcsMonitor(head_address())
        self._loop = EventLoop(f"supervise {name}", self._seconds_to_wait, self._tick, self._on_failed)
        self.survivors = Survivors(timeouts.keep_s)
        self._connections = DriverConnections(self._loop, lambda *args: self._runner.on_message(*args), self.has_ray)
        self._unreachable: dict[int, str] = {}
        self._runner = CallRunner(name, members, timeouts, self)
        self._waiting = WaitingCalls()
        self._metrics = CallMetrics(name)
        for rank, member in enumerate(members):
            self._loop.add_future(member.actor.lifetime.remote(member.epoch).future(), partial(self._on_lifetime, rank))
        self._loop.start()
        close_at_exit(self)

    def connect_ranks(self, port_range: tuple[int, int] | None) -> tuple[str, int]:
        """Wait until all ranks have connected to this process, at most `Timeouts.rendezvous_s`; calls need that.

        Args:
            port_range: See `Placement`.

        Returns:
            The address where this process listened.

        Raises:
            RendezvousError: No port is free, or a rank did not connect in time.
            GroupError: A rank died, or the group was stopped in the meantime.
        """
        within_s, check = self._timeouts.rendezvous_s, self.status.refuse_if_unusable
        connections = accept_ranks(self.members, port_range, within_s, check)
        host, port = connections[0].socket.getsockname()[:2]
        self._loop.call_soon(partial(self._connections.add, connections))
        return host, port

    @property
    def state(self) -> GroupState:
        """Current state of the group."""
        return self.status.state(is_busy=self._runner.run is not None or bool(self._waiting))

    def started(self) -> None:
        """Leave STARTING: the model is loaded."""
        self.status.start()
        self._lease_renewal.change(self._lifetime.lease_s)

    def revive(self) -> RecoverableState | None:
        """Change from BROKEN to STARTING if ranks were kept for a restart.

        Until `started`, only the calling thread can submit calls.

        Returns:
            The recoverable state; `None` if the ranks are not kept.
        """
        with self.survivors.lock:
            recoverable = None if self.status.is_closing else self.survivors.take()
            if recoverable is not None:
                self.status.revive()
        return recoverable

    def give_up(self, why: str) -> None:
        """Stop all ranks and release their resources, as after a failure; the group is BROKEN. Takes at most 20 s.

        Args:
            why: Message of the error that calls raise, unless a failure came first.
        """
        done = threading.Event()
        self._loop.call_soon(partial(self._give_up, GroupError(f"{self.name}: {why}"), done))
        done.wait(2 * _RELEASE_S)

    def submit(self, task: QueuedCall, check: Check | None = None) -> None:
        """Queue a call; waits while the arguments in the queue exceed 256 MiB.

        Args:
            task: The call.
            check: Called at the moment the call is queued; raises if the call must not be queued.

        Raises:
            GroupBrokenError: The group is broken or shut down.
            Exception: What `check` raised.
        """
        # Not for a call that begins together with another group's: its arguments are small, and a lock is held.
        if task.joint is None and self._waiting.is_full():
            refuse_to_wait(f"{task.call.name}.remote(), while the queue of calls is full")
            with DeferredInterrupts(self):
                self._waiting.wait_for_room(lambda: self.status.is_usable)
        with MaskedInterrupts():
            self._waiting.add(task, self.status.refuse_if_unusable, *([] if check is None else [check]))
            self._loop.call_soon(self.advance)

    def interrupt_soon(self, source: str) -> Stopping:
        """Cancel the calls in the queue, on the supervision thread; a group that is STARTING breaks.

        Args:
            source: Source of the interrupt (`Ctrl-C`), for a line on stderr; empty for no line.

        Returns:
            A future that completes when the running call has ended, with the number of cancelled calls.
        """
        stopping = Stopping()
        self._loop.call_soon(partial(self._interrupt, source, stopping))
        return stopping

    def advance_soon(self) -> None:
        """Begin the next call if it can begin now, on the supervision thread."""
        self._loop.call_soon(self.advance)

    def withdraw_soon(self, call: Call, error: GroupError) -> None:
        """End a call with an error if it is still in the queue, on the supervision thread."""
        self._loop.call_soon(partial(self._withdraw, call, error))

    def wait_stopped(self, stopping: Stopping, timeout_s: float | None = None) -> None:
        """Wait for the end of the call that ran at an interrupt; the deadline of the call bounds the wait.

        Raises:
            TimeoutError: `timeout_s` passed, and the call still runs.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # A supervision thread that has ended handles no events.
        while not stopping.done() and not self._loop.is_stopped():
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name}: the running call has not ended after {timeout_s:g} s; it still runs")
            concurrent.futures.wait([stopping], min(left, _TICK_S))

    def abandon_soon(self, reason: str) -> None:
        """Stop the ranks, also in a call; the group is BROKEN. `reason` is part of the error."""
        self._loop.call_soon(partial(self._abandon, reason))

    def tell_soon(self, line: str) -> None:
        """Write a line to stderr on the supervision thread, for a signal handler, which must not."""
        self._loop.call_soon(partial(tell, line))

    def shutdown(self) -> None:
        """Stop all ranks and release their resources; returns when that is done, or after 20 s. Idempotent."""
        self.shut_down_soon()
        self._loop.join(2 * _RELEASE_S)

    def shut_down_soon(self) -> None:
        """Start `shutdown` without waiting for it."""
        self._loop.call_soon(self._close)

    def detach(self) -> None:
        """End the supervision and keep the ranks, for another driver."""
        self._teardown.let_go()
        self.shutdown()
        self._lease_renewal.wait_heard(_HEARD_S)

    def leave(self) -> None:
        """Handle the exit of the program: shut the group down, unless it has a name."""
        # No other driver could use a broken group.
        if self._lifetime.name is None or self.status.cause is not None:
            self.shutdown()
        else:
            self.detach()

    def dropped_soon(self) -> None:
        """Handle the loss of the last reference to the group: shut it down, unless it has a name."""
        self._loop.call_soon(self._drop)

    def _on_failed(self, error: Exception) -> None:
        try:
            self.break_group([], GroupError(f"{self.name}: supervision failed: {type(error).__name__}: {error}"))
        finally:
            self.status.is_closing = True
            self._connections.close()

    def _seconds_to_wait(self) -> float:
        """Return the seconds until the next deadline or check."""
        run = self._runner.run
        longest_s = max(0.0, min(_TICK_S, self._connections.seconds_to_unreachable()))
        if run is None:
            return min(longest_s, self.survivors.left_s) if self.survivors.is_kept else longest_s
        return min(longest_s, max(0.0, run.due - time.monotonic()))

    def _tick(self) -> None:
        self.has_ray()
        self.advance()

    def watch(self, future: Future, then: Callable[[Future], None]) -> None:
        """Call `then(future)` on the supervision thread when the future completes."""
        self._loop.add_future(future, then)

    def send(self, rank: int, message: bytes) -> bool:
        """Send a message to a rank; return True if the rank is connected."""
        return self._connections.send(rank, message)

    def has_ray(self) -> bool:
        """Return True if Ray is initialized, else break the group. This and all below: supervision thread only."""
        if self.status.is_usable and not self._teardown.has_ray():
            lost = ", or Ray Client lost its connection to the head" if self._gcs_monitor.is_client else ""
            self.break_group([], GroupError(f"{self.name}: Ray was shut down under the group{lost}"))
        return self.status.is_usable

    def advance(self) -> None:
        """Do all that is due: end the current step, stop late ranks, begin the next call."""
        if self.status.is_usable and self._gcs_monitor.seconds_silent() > GCS_GONE_S:
            self.break_group([], GroupError(f"{self.name}: {self._gcs_monitor.gone()}"))
        if self.survivors.is_kept and not self.survivors.left_s:
            self._drop_kept()
        self._stop_unreachable()
        self._runner.check(self.survivors.dead)
        while self._runner.run is None and self._waiting and self._may_begin():
            task = self._waiting.take()
            task.call.when_done(partial(self._count, time.monotonic()))
            self._runner.begin(task, task.command)
        if self._metrics.is_due():
            self._export()

    def _count(self, begun: float, call: Call) -> None:
        self._metrics.call_ended(call.name, time.monotonic() - begun)

    def _export(self) -> None:
        if self._teardown.has_ray():
            self._metrics.export(self.state)

    def _may_begin(self) -> bool:
        """Return True if the next call can begin. Large arguments go through Ray, which they must not start anew."""
        if not (self.has_ray() if self._waiting.next_is_large() else self.status.is_usable):
            return False
        joint = self._waiting.first.joint
        return joint is None or joint.may_begin(self)

    def _on_lifetime(self, rank: int, future: Future) -> None:
        error = future.exception()
        if error is None:
            self._taken_over()
        else:
            self.rank_died(rank, error)

    def rank_died(self, rank: int, error: BaseException) -> None:
        """Handle the death of a rank: the running call ends soon; without a running call the group breaks at once."""
        with self.survivors.lock:
            if not self.survivors.hear_death(rank):
                return
            is_usable = self.status.is_usable
        if not is_usable:
            self._drop_kept()  # the group needs all ranks: those that are left are of no use
            return
        run = self._runner.run
        doing = "idle" if run is None else run.phase(rank)
        note = self._lease_renewal.explain() or self._unreachable.get(rank, "")
        is_made = self.status.is_started or self.status.is_restarting
        seen = failures.saw_death(self.members[rank].info, doing, error, note, is_made=is_made)
        if run is None:
            error_of_group = failures.judge([seen], self.name, timed_out=False)
            self.break_group([seen], error_of_group, RecoverableState(self.why_not(())))
            return
        run.finished.add(rank)
        # Ray reports a lost connection a second or two after the death, and the peers have had that time.
        is_old = isinstance(error, ray.exceptions.ActorUnavailableError)
        self._runner.see(run, seen, 0.0 if is_old else _AFTER_DEATH_S)
        self.advance()

    def _stop_unreachable(self) -> None:
        """Stop ranks that are no longer reachable; Ray then reports their death."""
        for rank, error in self._connections.pop_unreachable().items():
            if rank not in self.survivors.dead:
                self._unreachable[rank] = f"; its connection to the driver had broken before: {error}"
                self._teardown.stop_some([rank])

    def why_not(self, lost: Collection[int]) -> str:
        """Return why the ranks cannot form a group again; empty if they can. `lost` are those that hang."""
        if not self.status.is_started:
            return STOPPED
        if any(one.info.device != "cpu" for one in self.members):
            return "the ranks are on GPUs: an aborted NCCL collective may have left anything"
        return self.survivors.why_not(lost)

    def remark(self) -> str:
        """Return a note that the GCS is silent; empty if it is not."""
        return f" ({self._gcs_monitor.gone()})" if self._gcs_monitor.is_silent() else ""

    def break_group(
        self, seen: Sequence[failures.Observed], error: GroupError, recoverable: RecoverableState = NOTHING
    ) -> None:
        """Fail running and queued calls; stop all ranks, unless their state is recoverable."""
        run, self._runner.run = self._runner.run, None
        with self.survivors.lock:
            self.survivors.keep(recoverable)
            self.status.fail(error)
        try:
            if recoverable.why_not:
                self._stop()
        finally:
            if run is not None:
                run.task.call.end(failures.typed_error(seen, error, len(self.members)))
            self._waiting.fail(failures.broken(self.name, error))

    def _interrupt(self, source: str, stopping: Stopping) -> None:
        if not self.status.is_started and self.status.is_usable:
            self._abandon(source)
        who = source or "interrupt()"
        error = CallCancelledError(f"{who} cancelled the call before any rank of {self.name} began it")
        num_cancelled = self._waiting.fail(error)
        if self._runner.run is None:
            stopping.set_result(num_cancelled)
            return
        call = self._runner.run.task.call
        call.when_done(lambda _: stopping.set_result(num_cancelled))
        if source:
            left_s = max(0.0, self._runner.run.deadline - time.monotonic())
            tell(
                f"{source}: {self.name} stops when the running {call.name} has ended (deadline in {left_s:.0f} s); "
                f"queued calls cancelled: {num_cancelled}; once more stops the ranks now, and their weights are lost"
            )

    def _withdraw(self, call: Call, error: GroupError) -> None:
        if self._waiting.withdraw(call):
            call.end(error)
            self.advance()

    def _abandon(self, reason: str) -> None:
        if self.status.is_usable:
            doing = "idle" if self._runner.run is None else f"in {self._runner.run.task.call.name}"
            self.break_group([], GroupError(f"{self.name} was stopped by {reason} ({doing})"))

    def _taken_over(self) -> None:
        """Leave the ranks to the driver that has attached to them."""
        self._teardown.let_go()
        self._connections.close()  # the ranks close their ends, which is no failure
        if self.status.is_usable:
            self.break_group([], taken_over(self.name))
            if self.status.is_dropped:
                self._close()

    def _drop(self) -> None:
        self.status.is_dropped = True
        if self._lifetime.name is None or self.status.cause is not None:
            self._close()

    def _close(self) -> None:
        """Shut down: stop the ranks, after a `close` command if they are idle, and wait until Ray reports their end."""
        if self.status.is_closing:
            return
        was_idle = self._runner.run is None and self.status.cause is None and self.has_ranks
        self.status.is_closing = True
        error = GroupBrokenError(f"{self.name} was shut down before this call ended")
        run, self._runner.run = self._runner.run, None
        if run is not None:
            run.task.call.end(error)
        self._waiting.fail(error)
        try:
            if was_idle:
                self._leave()
            self._stop_all()
        finally:
            self._export()
            self._connections.close()
            self._loop.stop()

    def _leave(self) -> None:
        """Let idle ranks leave the process group, for at most 2 s."""
        self._runner.leave()
        until = time.monotonic() + _LEAVE_S
        while self._runner.leaving - self.survivors.dead and time.monotonic() < until:
            self._loop.run_once(0.1)

    def _give_up(self, error: GroupError, done: threading.Event) -> None:
        try:
            if self.status.is_usable:
                self.break_group([], self.status.first_cause(error))
            self._drop_kept()
            self._stop_all()
        finally:
            done.set()

    def _drop_kept(self) -> None:
        """Stop ranks that were kept for a restart, unless a restart has begun."""
        if self.survivors.drop():
            self._stop()

    def _stop(self) -> None:
        self._lease_renewal.stop()
        self._teardown.stop(gcs_answers=not self._gcs_monitor.is_silent())

    @property
    def has_ranks(self) -> bool:
        """True if this driver may have ranks left to stop."""
        is_ours = self._teardown.has_ray() and not self._teardown.is_let_go
        return is_ours and len(self.survivors.dead) < len(self.members)

    def _stop_all(self) -> None:
        """Stop the ranks, and wait until Ray reports their end."""
        self._stop()
        until = time.monotonic() + _RELEASE_S
        while self.has_ranks and time.monotonic() < until:
            self._loop.run_once(0.1)
