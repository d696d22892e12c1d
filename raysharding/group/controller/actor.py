"""`GroupController`: the actor that owns a group's ranks, runs its calls and judges their failures.

One controller is one group: name → controller → placement group and ranks. Drivers come and go. It imports no torch, so
that it starts in a second; tensors do not pass through it. Nothing on its event loop blocks: what waits for Ray (kills,
placement, the internal KV) runs in threads.

Note [First calls]: Ray fails the first call of a healthy actor (`ActorUnavailableError`, connection refused) where its
process has the port of one that died, and the caller's gRPC waits a second before it connects there anew. Ray repeats
`ping`, the first call of a driver to a controller, and `probe`, the first of a controller to a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from raysharding.errors import CallCancelledError, GroupBrokenError, GroupError
from raysharding.group.cluster import (
    delete_records_of_dead_jobs,
    name_log_lines,
    remove_placement_groups,
    was_restarted,
)
from raysharding.group.controller import failures
from raysharding.group.controller.background_saves import BackgroundSaves
from raysharding.group.controller.call_metrics import EXPORT_S, CallMetrics
from raysharding.group.controller.drivers import Driver, Drivers
from raysharding.group.controller.members import Ranks, start
from raysharding.group.controller.queue import CallQueue, QueuedCall
from raysharding.group.controller.record import Record
from raysharding.group.controller.running_call import RunningCall, Verdict
from raysharding.group.controller.start import reserve_for, start_ranks
from raysharding.group.controller.state import GroupStatus
from raysharding.group.messages import (
    Attached,
    BegunSave,
    FilesRecord,
    GroupState,
    Outcome,
    Packed,
    ProbeReplies,
    Snapshot,
    Started,
    StartPlan,
    Submission,
    closed,
    pack_same,
)

_LEAVE_S = 2.0
_END_S = 20.0
_NUM_NOTES = 100
_RENEWALS = 3
_EXIT_S = 0.2
_ATTACH_S = 8.0
"""Longest time from the start of a controller to its driver's `attach`, with what repeats of `ping` take before it."""
_PING_RETRIES = 10
"""Each takes a second or more, also while Ray starts the actor anew; not without end: Ray prints a line of each."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Arguments of a controller, which Ray gives it again when it restarts it."""

    title: str
    """The group's name in errors, logs and metrics."""
    key: str
    """Key of the group's record, and of its placement group."""
    is_named: bool
    """True if the group outlives its driver once it is READY."""
    origin: str
    """Files that the group is made from."""
    lease_s: float | None
    """Seconds without a poll of any driver after which the group ends; `None`: it never does for that."""
    drain_s: float
    """Seconds for ranks to finish after another rank failed; then they are stopped."""


class GroupController:
    """The actor. "Driver" in arguments: the key of a driver that has called `attach`."""

    def __init__(self, identity: Identity) -> None:
        """Begin as STARTING, or as BROKEN in a process that replaces one that has died.

        Args:
            identity: The group.
        """
        name_log_lines(f"controller ({identity.title})")
        self._identity = identity
        is_restarted = was_restarted()
        if is_restarted:
            remove_placement_groups(identity.key)  # Ray has ended the ranks with their owner, and keeps the bundles
        delete_records_of_dead_jobs()
        self._record = Record(identity.key, identity.title, identity.origin, is_restarted=is_restarted)
        if is_restarted and self._record.spec is None:
            ray.actor.exit_actor()  # the group was never READY: nobody can use it, and its name must be free
        self._status = GroupStatus(identity.title)
        self._drivers = Drivers(identity.title, self._on_lost_driver)
        self._saves = BackgroundSaves(self._on_committed, self._bump)
        self._metrics = CallMetrics(identity.title)
        self._queue = CallQueue(identity.title, self._drivers, self._status, self._run, self._snapshot)
        self._ranks: Ranks | None = None
        self._starting: asyncio.Task[Any] | None = None
        # `_resets_next`: some ranks have reset their modules after the last call and others have not; the next call
        # resets all, or their collectives would differ.
        self._is_open = self._was_attached = self._resets_next = False
        self._notes: list[tuple[int, str]] = []
        self._version = self._num_commands = self._num_notes = self._weights_version = 0
        self._changed = asyncio.Event()
        if self._record.spec is not None:
            self._status.ready()
            self._status.fail(GroupError(f"{identity.title}: its controller died, and the ranks with it"))
        is_lasting = self._record.spec is not None and identity.is_named
        if (attach_s := identity.lease_s if is_lasting else _ATTACH_S) is not None:
            timer = threading.Timer(attach_s, self._end_unattached)
            timer.daemon = True
            timer.start()

    @ray.method(max_task_retries=_PING_RETRIES)
    async def ping(self) -> None:
        """Answer: the process has started, and is connected to the caller (Note [First calls])."""

    async def attach(
        self, driver: str, label: str, owned: Sequence[ray.ObjectRef], before: str | None, *, makes: bool
    ) -> Attached:
        """Add a driver.

        Args:
            driver: Its random key.
            label: Where it runs, for errors.
            owned: One result of `until_gone`, which the driver's process owns: Ray reports the end of the owner.
            before: The key under which it was connected before it took the controller for lost.
            makes: True for the driver that has started the controller, to make the group.
        """
        self._open()
        self._was_attached |= makes or self._status.was_ready
        self._drivers.add(driver, label, owned, before)
        if makes:
            self._status.maker = driver
        where = f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"
        return Attached(self._snapshot(), self._record.spec, self._record.loaded, where)

    async def until_gone(self, driver: str) -> None:
        """Run until a driver is gone; it owns the result, so that Ray reports the end of its process."""
        await self._drivers.until_gone(driver)

    async def detach(self, driver: str) -> None:
        """Forget a driver, and drop its calls that have not begun."""
        self._drivers.remove(driver)

    async def watch(self, driver: str, version: int, wait_s: float) -> Snapshot:
        """Return the group's snapshot when it differs from a version, or after `wait_s`; renews the lease.

        It returns earlier where the lease asks for it: a driver polls again at once.
        """
        self._drivers.heard(driver)
        if version == self._version:
            changed, lease_s = self._changed, self._identity.lease_s
            wait_s = wait_s if lease_s is None else min(wait_s, lease_s / _RENEWALS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait_s)
        return self._snapshot()

    async def start_ranks(self, driver: str, plan: StartPlan) -> Started:
        """Reserve the ranks' resources and start their processes; the driver's calls then make the group."""
        self._open()  # it may arrive before `attach`, or after a `shutdown` that was sent later
        if (refused := self._status.refusal(driver)) is not None:
            raise refused
        self._status.maker = driver
        self._bump()
        loop = asyncio.get_running_loop()

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(self._note, line)

        def is_wanted() -> bool:  # else the group was stopped, and may be made once more meanwhile
            return starting is self._starting and self._status.is_usable

        starting, begun = asyncio.current_task(), time.monotonic()
        self._starting = starting
        reservation = await asyncio.to_thread(reserve_for, plan, self._identity.key, tell, is_wanted)
        try:
            place_s = time.monotonic() - begun
            members, started = await start_ranks(plan, reservation, is_wanted)
        except BaseException:
            if reservation is not None:
                await asyncio.to_thread(reservation.release)
            raise
        ranks = Ranks(members, reservation, self._on_death)
        if not is_wanted():
            await ranks.stop()
            raise self._status.refusal(driver) or GroupError(f"{self._identity.title}: stopped while its ranks started")
        self._ranks = ranks
        self._bump()
        return replace(started, seconds=tuple({"place": place_s, **own} for own in started.seconds))

    async def ready(self, spec: Packed, loaded: Packed, reloaded: str | None) -> None:
        """Leave STARTING.

        Args:
            spec: The `GroupSpec`.
            loaded: The packed `Loaded`, reports and facts of the group.
            reloaded: Path or URI of the files that a restart has loaded, if not those of before.
        """
        ranks = self._ranks
        assert ranks is not None, "they are loaded"
        await self._record.keep(spec, loaded, reloaded)
        if ranks.is_stopping or not self._status.is_usable:  # it broke meanwhile, and perhaps another driver makes it
            raise self._status.refusal() or closed(self._identity.title)
        self._status.ready()
        self._bump()

    async def spec(self) -> Packed:
        """Return the spec that a restart uses."""
        assert self._record.spec is not None, "the group was READY"
        return self._record.spec

    async def update(self, spec: Packed) -> None:
        """Replace the spec that a restart uses."""
        await self._record.set_spec(spec)

    async def queue(self, method: str, *args: Any) -> Any:
        """Call a method of the `CallQueue`."""
        return await getattr(self._queue, method)(*args)

    async def interrupt(self, driver: str, source: str, before: int) -> tuple[int, str, float]:
        """Cancel the calls of a driver that no rank has begun; a group that is being made breaks.

        Args:
            driver: The driver.
            source: What interrupts, for the error.
            before: Number of the calls that the driver had submitted.

        Returns:
            The number of cancelled calls, the name of the driver's call that the ranks run, if any, and the seconds to
            its deadline.
        """
        known = self._drivers[driver]
        if self._status.state is GroupState.STARTING and self._status.maker == driver:
            self._break(GroupError(f"{self._identity.title} was stopped by {source} ({self._doing()})"))
        await self._drivers.turn(known, before)
        what = f"{source} cancelled the call before any rank of {self._identity.title} began it"
        num_cancelled = self._queue.cancel(Outcome(error=CallCancelledError(what)), known)
        current = self._queue.current
        if current is None or current.driver is not known or current.running is None:
            return num_cancelled, "", 0.0
        if current.submission.is_stream:
            current.running.cancel()  # nobody wants the other tokens
        return num_cancelled, current.submission.method, max(0.0, current.running.deadline - time.monotonic())

    async def stop(self, driver: str, reason: str) -> None:
        """Stop the ranks, also in a call: the group is BROKEN, and its other drivers are told by whom."""
        if self._status.is_usable:
            what = f"{self._identity.title} was stopped by {reason} ({self._doing()})"
            self._break(GroupError(f"{what} at {self._drivers[driver].label}"))

    async def begin_restart(self, driver: str, lock: tuple[str, str] | None) -> FilesRecord:
        """Stop what is left of the ranks, and let a driver make the group again.

        Args:
            driver: The driver.
            lock: Kind and key of its run's lock, which a controller in place of one that died does not know.

        Raises:
            GroupBrokenError: The group is shut down, or another driver makes it.
        """
        known, is_broken = self._drivers[driver], self._status.state is GroupState.BROKEN
        refused: GroupError | None = None if is_broken else self._status.refusal(driver)
        if (refused := refused or self._drivers.refusal_of_restart(known, is_broken=is_broken)) is not None:
            raise refused
        if self._status.is_usable:
            self._break(GroupError(f"{self._identity.title}: is being restarted"))
        if lock is not None and (refused := self._drivers.take_lock(known, *lock)) is not None:
            raise refused
        self._status.restart(driver, known.label, was_broken=is_broken)
        self._bump()
        if self._ranks is not None:
            await self._ranks.stop()
        return self._record.files

    async def saves_ended(self, tokens: Sequence[str], committed: Sequence[str]) -> FilesRecord:
        """Note how saves ended whose ranks are gone: `committed` of `tokens` are complete."""
        await self._record.saves_ended(tokens, committed)
        self._bump()
        return self._record.files

    async def give_up(self, driver: str, error: GroupError) -> None:
        """End a restart that failed."""
        if self._status.state is GroupState.STARTING and self._status.maker == driver:
            self._break(error)

    async def take_lock(self, driver: str, what: str, key: str, generation: str) -> Outcome:
        """Give a driver the lock on the model, or return why it cannot have it.

        Args:
            driver: The driver.
            what: Kind of the lock.
            key: Key of the lock.
            generation: `Snapshot.generation` as the driver knows it; only of a `fit`, since a `predict` changes
            nothing.
        """
        if what == "fit" and generation != self._status.generation:
            return self._status.restarted()
        return Outcome(error=self._drivers.take_lock(self._drivers[driver], what, key))

    async def release_lock(self, key: str) -> None:
        """Release the lock, if it has this key."""
        self._drivers.release_lock(key)

    async def probe(
        self, method: str, args: Sequence[Any], within_s: float, ranks: Sequence[int] | None = None
    ) -> ProbeReplies:
        """Call a control method on ranks, also while they run a command; all replies together take `within_s`."""
        if self._ranks is None:
            return ProbeReplies({}, {})
        return await self._ranks.ask(method, *args, within_s=within_s, ranks=ranks)

    async def stacks(self) -> dict[int, str]:
        """Return the Python stacks of every rank."""
        return {} if self._ranks is None else await self._ranks.stacks()

    async def saved_bytes(self) -> dict[str, int]:
        """Return the bytes written so far of each save in the background that has not ended, by token."""
        return dict(self._saves.bytes_done)

    async def shutdown(self, why: str) -> None:
        """End the group for all drivers, and then this actor.

        Args:
            why: Message of the error of calls that have not ended.
        """
        if self._status.state is not GroupState.CLOSED:
            was_idle = self._queue.current is None and self._status.is_usable
            self._close(why)
            if was_idle and self._ranks is not None:
                await self._leave(self._ranks)
        if self._starting is not None:  # it waits for resources, perhaps
            await asyncio.wait([self._starting], timeout=_END_S)
        if self._ranks is not None:
            await self._ranks.stop()
        self._metrics.export(self._status.state)
        await asyncio.wait([start(asyncio.to_thread(remove_placement_groups, self._identity.key))], timeout=_END_S)
        await self._record.delete()
        start(self._exit())

    def _open(self) -> None:
        """Start the tasks of the event loop, which the constructor does not run on."""
        if self._is_open:
            return
        self._is_open = True
        start(self._queue.run())
        start(self._export())
        if self._identity.lease_s is not None:
            start(self._end_without_renewal(self._identity.lease_s))

    async def _run(self, call: QueuedCall) -> None:
        """Run a call on the ranks, and end it. The queue calls it for one call after the other."""
        begun = time.monotonic()
        if self._status.state is GroupState.READY:
            self._status.move(GroupState.BUSY)
        try:
            verdict = await self._run_on_ranks(call)
        except GroupError as error:
            verdict = Verdict(Outcome(error=error))
        except Exception as error:  # noqa: BLE001 - a fault of ours: without an end of the call every driver would hang
            failed = GroupError(f"{self._identity.title}: the controller failed: {type(error).__name__}: {error}")
            verdict = Verdict(Outcome(error=failed), broken_by=failed)
            traceback.print_exc()
        self._end_call(call, verdict)
        self._metrics.call_ended(call.submission.method, time.monotonic() - begun)

    async def _run_on_ranks(self, call: QueuedCall) -> Verdict:
        ranks, submission = self._ranks, call.submission
        assert ranks is not None, "calls are accepted once there are ranks"
        if submission.save is not None:
            await self._record.begun(submission.save)
        if call.ended.done():  # the group broke meanwhile
            return Verdict(call.ended.result())
        resets = self._resets_next or self._drivers.is_orphaned
        options = self._identity.title, self._identity.drain_s, resets, self._num_commands + 1
        call.running = RunningCall(submission, ranks, *options)
        self._resets_next = self._drivers.is_orphaned = False
        call.began.set()
        verdict = await call.running.run()
        self._num_commands = call.running.number
        if call.ended.done() or verdict.outcome.error is not None:
            return verdict
        if submission.save is not None and submission.is_async_save:
            number = verdict.outcome.sent[0]
            assert isinstance(number, Packed), "a small int"
            self._saves.follow(submission.save, number.unpack(), ranks)
        elif submission.save is not None:
            await self._on_committed(submission.save)
        elif submission.loads is not None:
            await self._record.load_ended(submission.loads, keeps_adapters=verdict.keeps_adapters)
            self._bump()
        return verdict

    def _end_call(self, call: QueuedCall, verdict: Verdict) -> None:
        if (running := call.running) is not None and not running.ranks.is_stopping:
            self._resets_next = verdict.resets_next
            self._weights_version = max(self._weights_version, verdict.outcome.weights_version or 0)
            if running.accumulates is not None:
                self._drivers.note_accumulation(call.driver, call.submission.method, is_open=running.accumulates)
        # A call that has ended was of ranks that are stopped: perhaps a restart makes others already.
        if verdict.broken_by is not None and self._status.is_usable and not call.ended.done():
            self._break(verdict.broken_by, but=call)
        elif self._status.state is GroupState.BUSY and len(self._queue) == 1:
            self._status.move(GroupState.READY)
        changed = verdict.outcome.error is not None or call.submission.save is not None
        call.end(replace(verdict.outcome, snapshot=self._snapshot()) if changed else verdict.outcome)

    async def _on_committed(self, save: BegunSave) -> None:
        await self._record.saves_ended([save.token], [save.token])
        self._bump()

    def _on_death(self, ranks: Ranks, rank: int, error: BaseException) -> None:
        if ranks is not self._ranks or ranks.is_stopping or not self._status.is_usable:
            return
        current = self._queue.current
        if current is not None and current.running is not None and not current.running.is_over:
            current.running.died(rank, error, is_made=self._status.was_ready)
            return
        seen = failures.rank_died(ranks.members[rank].info, "idle", error, is_made=self._status.was_ready)
        but = current if current is not None and current.running is not None else None  # it ends by itself
        self._break(failures.judge([seen], self._identity.title, timed_out=False), but=but)

    def _on_lost_driver(self, driver: Driver) -> None:
        error = GroupError(f"its driver ({driver.label}) has ended")
        self._queue.cancel(Outcome(error=error), driver)
        current = self._queue.current
        if current is not None and current.driver is driver and current.running is not None:
            current.running.drop_items()
        is_made_by = self._status.state is GroupState.STARTING and self._status.maker == driver.key
        if not self._identity.is_named or (is_made_by and not self._status.was_ready):
            start(self.shutdown(f"{self._identity.title}: {error}"))
        elif is_made_by:
            self._break(GroupError(f"{self._identity.title}: the driver that restarted it ({driver.label}) has ended"))

    def _break(self, error: GroupError, but: QueuedCall | None = None) -> None:
        """Enter BROKEN: fail the running call and those that wait, and stop all ranks.

        Args:
            error: The cause.
            but: A call that ends by itself.
        """
        self._status.fail(error)
        self._resets_next = False  # new ranks have nothing to reset
        if self._ranks is not None:
            self._ranks.stop()
        self._drivers.end_accumulation()
        self._bump()
        snapshot, current = self._snapshot(), self._queue.current
        if current is not None and current is not but:
            current.end(Outcome(error=error, snapshot=snapshot))
        refused = self._status.refusal()
        assert refused is not None, "it is BROKEN"
        self._queue.cancel(Outcome(error=refused, snapshot=snapshot))

    def _close(self, why: str) -> None:
        self._status.move(GroupState.CLOSED)
        self._bump()
        outcome = Outcome(error=GroupBrokenError(why), snapshot=self._snapshot())
        if self._queue.current is not None:
            self._queue.current.end(outcome)
        self._queue.cancel(outcome)

    async def _leave(self, ranks: Ranks) -> None:
        """Let idle ranks leave the process group, for at most 2 s."""
        closing = Submission("close", (pack_same("close"),), _LEAVE_S)
        await RunningCall(closing, ranks, self._identity.title, 0.0, False, self._num_commands + 1).run()

    async def _exit(self) -> None:
        """End this process after the replies that are under way; Ray does not restart it."""
        await asyncio.sleep(_EXIT_S)
        killing = start(asyncio.to_thread(ray.kill, ray.get_runtime_context().current_actor))
        await asyncio.wait([killing], timeout=_END_S)
        await asyncio.sleep(_EXIT_S)  # Ray would report as unexpected an end before that by its own kill
        os._exit(1)  # without its GCS Ray kills nothing

    def _end_unattached(self) -> None:
        """End this actor on a thread if no driver has attached in time: its lease begins when one has."""
        if not self._was_attached:
            ray.kill(ray.get_runtime_context().current_actor)

    async def _end_without_renewal(self, lease_s: float) -> None:
        await self._drivers.wait_silent(lease_s)
        why = f"no driver has renewed the lease of {lease_s:g} s of {self._identity.title}: the group ends"
        self._note(why)
        await self.shutdown(why)

    async def _export(self) -> None:
        while self._status.state is not GroupState.CLOSED:
            await asyncio.sleep(EXPORT_S)
            self._metrics.export(self._status.state)

    def _doing(self) -> str:
        current = self._queue.current
        return "idle" if current is None else f"in {current.submission.method}"

    def _note(self, line: str) -> None:
        """Send all drivers a line, which they print."""
        self._num_notes += 1
        self._notes = [*self._notes[1 - _NUM_NOTES :], (self._num_notes, line)]
        self._bump()

    def _bump(self) -> None:
        """Wake the drivers' polls: the snapshot has changed."""
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _snapshot(self) -> Snapshot:
        state = self._status.state
        ranks = self._ranks
        return Snapshot(
            version=self._version,
            state=GroupState.READY if state is GroupState.BUSY else state,
            cause=self._status.cause,
            ranks=() if ranks is None else ranks.infos,
            log_paths=() if ranks is None else tuple(one.actor_info.log_paths for one in ranks.members),
            saves=self._record.files.saves,
            ended_saves=dict(self._saves.ended),
            notes=tuple(self._notes),
            generation=self._status.generation,
            weights_version=self._weights_version,
        )


REMOTE_CONTROLLER = ray.remote(GroupController)
"""Actor class of controllers, made once: Ray exports every class that `ray.remote` makes."""
