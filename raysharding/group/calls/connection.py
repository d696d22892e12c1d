"""`Connection`: a driver's connection to a controller: requests, calls, the group's state, the controller's loss."""

from __future__ import annotations

import concurrent.futures
import contextvars
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from raysharding.errors import CallTimeoutError, GroupBrokenError, GroupError, RayshardingError, caught_as
from raysharding.group.calls.call import Call
from raysharding.group.calls.callback_thread import CallbackThread, run_logged
from raysharding.group.calls.pending_saves import PendingSaves
from raysharding.group.cluster import GCS_GONE_S, GcsMonitor, is_dead, ray_session, tell
from raysharding.group.messages import (
    Attached,
    GroupState,
    Outcome,
    ProbeReplies,
    Snapshot,
    broken,
    closed,
    decoded,
)

_WATCH_S = 1.0
_SILENT_S = 10.0
"""Silence of the controller, beyond its answer's due time, after which this driver ends it."""
_LEAST_SILENT_S = 3.0
_ANSWER_S = 30.0
_KILL_S = 3.0
_RETRY_S = 0.2
_STALL_S = 3.0


@dataclass
class Registration:
    """Identity of a driver at one controller. Another controller has none of it: key and number change together."""

    key: str
    """Random; identifies the driver."""
    next_number: int = 0
    """Number of the driver's next call."""


class Connection:
    """A driver's connection to a controller. Thread-safe.

    The driver asks the controller again and again for the group's snapshot, which the controller answers when there is
    news, or after a second. So a driver learns at once what happens to an idle group, renews its lease, and notices a
    controller that a signal has stopped, which Ray never does. Ray starts another controller in the place of one that
    has died, which knows the group's record and has no ranks; the driver connects to that one.
    """

    def __init__(self, controller: Any, name: str) -> None:
        """Begin without a connection; `attach` connects.

        Args:
            controller: Handle of the group's controller.
            name: Name of the group in errors.
        """
        self.controller = controller
        self.name = name
        self.registration = Registration("")
        """This driver at the controller that it has attached to last; read it once where both fields are needed."""
        self.where = "?"
        """Node and process of the controller, for errors."""
        self.generation = ""
        """The ranks that this driver knows of: by its first attach, its own restart, or an error."""
        self.snapshot = Snapshot(-1, GroupState.STARTING, None, (), (), ())
        """State of the group, as the controller last sent it."""
        self.thread = CallbackThread(f"calls of {name}", self._check)
        """Runs what this driver hears."""
        self.pending = PendingSaves(self._saved_bytes)
        """Saves of this driver in the background."""
        self.calls: dict[Call, None] = {}
        """Calls of this driver that have not ended, in their order."""
        self.num_bytes = 0
        """Bytes of the arguments of all these calls."""
        self.changed = threading.Condition()
        """Notified when a call ends."""
        self.submitting = threading.Lock()
        """Held while calls get their numbers and are sent."""
        self._lost: GroupError | None = None
        self._refusal: Callable[[str], GroupBrokenError] = closed
        self._session = ray_session()
        self._connected = threading.Event()
        self._connected.set()  # cleared from the loss of a controller to the connection to the next one
        self._question: concurrent.futures.Future[Snapshot] | None = None
        """The question for the next snapshot, until it is answered or the controller is lost."""
        self._due = 0.0
        """When the controller answers it, if there is no news before."""
        self._last_note = self.weights_version = 0
        self._checked = time.monotonic()
        self._stall = (0.0, 0.0)
        self._gcs = GcsMonitor()

    def attach(self, *, within_s: float = _ANSWER_S, makes: bool = False) -> Attached:
        """Connect this driver to the controller, and begin to follow the group.

        Args:
            within_s: Deadline; the controller's process may have to start.
            makes: True if this driver has started the controller.

        Raises:
            GroupError: The controller is gone, or does not answer.
        """
        until = time.monotonic() + within_s
        self.finish(self.request("ping"), within_s=within_s)
        label = f"the driver on {ray.util.get_node_ip_address()}, pid {os.getpid()}"
        registration = Registration(secrets.token_hex(8))
        owned = [self.request("until_gone", registration.key)]
        arguments = registration.key, label, owned, self.key or None
        attaching = self.request("attach", *arguments, makes=makes)
        self.registration = registration  # once `attach` is sent: calls follow it
        attached: Attached = self.finish(attaching, within_s=max(0.0, until - time.monotonic()))
        self.where = attached.where
        self.generation = self.generation or attached.snapshot.generation
        self._last_note = max((number for number, _ in attached.snapshot.notes), default=0)
        self.snapshot = replace(self.snapshot, version=-1)  # a controller that was restarted counts anew
        self.take(attached.snapshot)
        self._connected.set()
        self.thread.call(self._watch)
        return attached

    @property
    def key(self) -> str:
        """Identifies this driver at the controller."""
        return self.registration.key

    @property
    def state(self) -> GroupState:
        """State of the group: BUSY while a call of this driver runs or is queued."""
        state = self.snapshot.state
        if self._lost is not None and state is not GroupState.CLOSED:
            return GroupState.BROKEN
        return GroupState.BUSY if state is GroupState.READY and self.calls else state

    @property
    def cause(self) -> GroupError | None:
        """The error that broke the group."""
        return self._lost or self.snapshot.cause

    def refuse_if_unusable(self) -> None:
        """Raise the error of a call on a broken or closed group.

        Raises:
            GroupBrokenError: The group is broken (with the cause), or shut down, or this driver has left it.
        """
        if self.snapshot.state is GroupState.CLOSED:
            raise self._refusal(self.name)
        if (cause := self.cause) is not None:
            raise broken(self.name, cause)

    def request(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Call a method of the controller, whatever state the connection has.

        In an asyncio actor Ray takes it for a child of the task in whose context it begins, and cancels it with the
        task: Serve cancels the task of a request when the client goes away. So it begins in an empty context.
        """
        ref: ray.ObjectRef = contextvars.Context().run(getattr(self.controller, method).remote, *args, **kwargs)
        return ref

    def ask(self, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
        """Call a method of the controller and wait for its result. Raises as `finish`."""
        return self.finish(self.begin(method, *args), within_s=within_s)

    def begin(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call a method of the controller; `finish` returns its result."""
        self.require_ray()
        self._connected.wait(_ANSWER_S)  # a controller that Ray has restarted does not know this driver at once
        return self.request(method, *args)

    def finish(self, ref: ray.ObjectRef, *, within_s: float | None) -> Any:
        """Wait for the result of a method of the controller.

        Args:
            ref: What `begin` returned.
            within_s: Deadline; `None`: the method has its own, and this driver notices the loss of the controller.

        Raises:
            GroupError: The controller is gone, or does not answer in time.
            Exception: What the method raised.
        """
        try:
            return ray.get(ref, timeout=within_s)
        except ray.exceptions.GetTimeoutError:
            what = f"{self.name}: its controller ({self.where}) does not answer within {within_s:g} s"
            raise CallTimeoutError(what) from None
        except ray.exceptions.RayActorError as error:
            raise self.controller_died(error) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise

    def send(self, call: Call, sent: Any) -> None:
        """Send a call's submission, encoded or not, with the next number; `submitting` is held."""
        own = self.registration
        call.number = own.next_number
        ref = self.request("queue", "submit", own.key, call.number, sent)
        own.next_number += 1  # once it is sent: the controller would wait for a number that never comes
        self.follow(call, own, ref)

    def follow(self, call: Call, own: Registration, ref: ray.ObjectRef) -> None:
        """End a call with the outcome that a reference brings."""
        with self.changed:
            self.calls[call] = None
            self.num_bytes += call.num_bytes
        ref.future().add_done_callback(lambda ended: self.thread.call(partial(self._on_outcome, call, own, ended)))
        if self.snapshot.state is GroupState.CLOSED:  # meanwhile, and the callback thread may have ended
            self._fail_calls(self._refusal(self.name))

    def _on_outcome(self, call: Call, own: Registration, ended: concurrent.futures.Future[Any]) -> None:
        """Handle the end of a call, on the callback thread."""
        error = ended.exception()
        if error is None:
            self._end_call(call, decoded(ended.result()))
        elif call in self.calls:  # else it has ended with the controller that it was sent to
            died = self.controller_died(error)
            if own is self.registration:
                self.controller_lost(died)
            self._end_call(call, Outcome(error=died))  # it may have been sent after the loss had ended the others

    def _end_call(self, call: Call, outcome: Outcome) -> None:
        if outcome.snapshot is not None:
            self.take(outcome.snapshot)
        with self.changed:
            if call not in self.calls:
                return  # it has ended with the group
            del self.calls[call]
            self.num_bytes -= call.num_bytes
            self.changed.notify_all()
        if outcome.generation is not None:
            # Not now: what the program submits before it looks at the error is refused, too.
            call.on_raise = partial(setattr, self, "generation", outcome.generation)
        call.follows, call.weights_version = outcome.follows, outcome.weights_version
        self.weights_version = max(self.weights_version, outcome.weights_version or 0)
        call.end(raised_by(outcome), outcome.sent)

    def _fail_calls(self, error: GroupError) -> None:
        for call in list(self.calls):
            self._end_call(call, Outcome(error=error))

    def _saved_bytes(self) -> dict[str, int]:
        """Return the bytes written so far of each save in the background that has not ended, by token."""
        if self.cause is not None or self.snapshot.state is GroupState.CLOSED:
            return {}
        try:
            written: dict[str, int] = self.ask("saved_bytes")
        except GroupError:
            return {}  # the loss of the controller ends the saves
        return written

    def probe(self, method: str, *args: Any, within_s: float, ranks: Sequence[int] | None = None) -> ProbeReplies:
        """Call a control method on ranks, also while they run a command."""
        replies: ProbeReplies = self.ask("probe", method, args, within_s, ranks, within_s=within_s + _ANSWER_S)
        return replies

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the controller without waiting; after the end of Ray nothing happens."""
        if self.has_ray():
            self.request(method, *args)

    def tell_ranks(self, method: str, *args: Any) -> None:
        """Call a control method on all ranks without waiting."""
        self.tell("probe", method, args, _ANSWER_S)

    def refresh(self) -> None:
        """Ask for the group's snapshot now."""
        self.take(self.ask("watch", self.key, -1, 0.0))

    def has_ray(self) -> bool:
        """Return True if the Ray session of the group is still connected; after a new `ray.init()` it is not."""
        return ray_session() == self._session

    def is_connected(self) -> bool:
        """Return False from the loss of the controller, or of Ray, to the connection to the next controller."""
        return self.has_ray() and self._connected.is_set()

    def close(self, refusal: Callable[[str], GroupBrokenError] = closed) -> None:
        """End this connection: for this driver the group is CLOSED.

        Args:
            refusal: Builds the error of calls, given the group's name.
        """
        self._refusal = refusal
        self.take(replace(self.snapshot, state=GroupState.CLOSED))
        self.thread.stop()
        self._fail_calls(refusal(self.name))

    def end_controller(self, *, for_good: bool) -> None:
        """Kill the controller's process; without its GCS Ray waits for a minute."""
        if self.has_ray():
            kill = partial(ray.kill, self.controller, no_restart=for_good)
            killing = threading.Thread(target=kill, name="end controller", daemon=True)
            killing.start()
            killing.join(_KILL_S)

    def _watch(self) -> None:
        """Ask for the next snapshot, on the callback thread."""
        if self.snapshot.state is not GroupState.CLOSED and self.has_ray():
            self._due = time.monotonic() + _WATCH_S
            question = self.request("watch", self.key, self.snapshot.version, _WATCH_S).future()
            self._question = question
            question.add_done_callback(lambda ended: self.thread.call(partial(self._on_answer, ended)))

    def _on_answer(self, ended: concurrent.futures.Future[Snapshot]) -> None:
        if ended is not self._question:
            return  # of before a reconnection
        self._question = None
        if (error := ended.exception()) is not None:
            self.controller_lost(self.controller_died(error))
            return
        self.take(ended.result())
        self._watch()

    def take(self, snapshot: Snapshot) -> None:
        """Take what the controller says of the group; replies do not arrive in order."""
        if snapshot.version < self.snapshot.version:
            return
        if not snapshot.ranks:  # of a controller that was restarted: where the last ranks ran is still of use
            snapshot = replace(snapshot, ranks=self.snapshot.ranks, log_paths=self.snapshot.log_paths)
        self.snapshot = snapshot
        self.weights_version = max(self.weights_version, snapshot.weights_version)
        for number, line in snapshot.notes:
            if number > self._last_note:
                run_logged(partial(tell, line))  # stderr may be closed
                self._last_note = number
        self.pending.note(snapshot.ended_saves)
        if snapshot.state in (GroupState.BROKEN, GroupState.CLOSED):
            self.pending.lose(snapshot.cause or self._refusal(self.name))

    def _check(self) -> None:
        """Look each second whether Ray, its GCS and the controller are there; on the callback thread."""
        self._note_stall()
        if self._lost is not None or self.snapshot.state is GroupState.CLOSED:
            return
        lost = ", or Ray Client lost its connection to the head" if self._gcs.is_client else ""
        if not self.has_ray():
            self._lose(GroupError(f"{self.name}: Ray was shut down under the group{lost}"))
        elif self._gcs.seconds_silent() > GCS_GONE_S:
            self._lose(GroupError(f"{self.name}: {self._gcs.gone()}"))
            self.request("detach", self.key)  # which ends a group without a name; Ray would take its minute
        elif self._question is not None and time.monotonic() > self._due + self._patience_s():
            what = f"{self.name}: its controller ({self.where}) did not answer in time and was ended{lost}"
            self.controller_lost(GroupError(what), is_silent=True)

    def _patience_s(self) -> float:
        """Return how long the controller may be silent: its loss is known before the calls' deadlines."""
        shortest_s = min((call.deadline_s for call in list(self.calls)), default=math.inf)
        return min(_SILENT_S, max(_LEAST_SILENT_S, shortest_s / 2))

    def controller_lost(self, error: GroupError, *, is_silent: bool = False) -> None:
        """Break the group, and connect to the controller that Ray starts in the place of the lost one.

        Args:
            error: The error of calls.
            is_silent: True if its process lives, and must be ended: Ray never notices one that a signal has stopped.
        """
        if self._lost is not None or self.snapshot.state is GroupState.CLOSED:
            return
        self._question = None
        self._connected.clear()
        self._lose(error)
        if is_silent:
            self.end_controller(for_good=False)
        threading.Thread(target=self._reconnect, args=(error,), name="reconnect", daemon=True).start()

    def _reconnect(self, error: GroupError) -> None:
        try:
            attached = self._attach_again()
        finally:
            self._connected.set()
        if attached is not None and attached.spec is not None:  # else it was lost before the group was READY
            self._lost = None
            if attached.snapshot.state is GroupState.BROKEN:
                self.take(replace(attached.snapshot, cause=error))

    def _attach_again(self) -> Attached | None:
        """Attach to the next controller; return `None` if there is none: the group stays BROKEN by the loss."""
        until = time.monotonic() + _ANSWER_S
        while True:
            try:
                return self.attach()
            except Exception:  # noqa: BLE001 - Ray Client raises what it likes; calls raise the loss
                if time.monotonic() > until or not self.has_ray() or is_dead(self.controller):
                    return None
            time.sleep(_RETRY_S)

    def _lose(self, error: GroupError) -> None:
        self._lost = error
        self._fail_calls(error)
        self.pending.lose(error)

    def controller_died(self, error: BaseException) -> GroupError:
        """Return the error of the controller's death.

        Args:
            error: Ray's; or that of a controller which Ray has started meanwhile, and which does not know this driver.
        """
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        first = " ".join(str(cause).split())[:600]
        if isinstance(cause, GroupError):
            first = "Ray has started another one in its place"
        message = f"{self.name}: its controller ({self.where}) died, and the ranks with it: {first}"
        self._note_stall()
        until, seconds = self._stall
        if seconds and self._checked - until < _SILENT_S:
            message += f"; this driver had not run for {seconds:.0f} s: did its lease (Timeouts.lease_s) run out?"
        return GroupError(message)

    def _note_stall(self) -> None:
        """Note it if this process did not run since the last check: it was frozen, or its machine was."""
        now = time.monotonic()
        if now - self._checked > _STALL_S:
            self._stall = now, now - self._checked
            # Answers that arrived meanwhile may not have been handled.
            self._due = now + _SILENT_S
        self._checked = now

    def require_ray(self) -> None:
        """Raise instead of a call that would start Ray anew."""
        if not self.has_ray():
            raise GroupBrokenError(f"{self.name} is broken and refuses calls: Ray was shut down under the group")


def left(name: str) -> GroupBrokenError:
    """Build the error of calls of a driver that has left a group."""
    return GroupBrokenError(f"this driver has left {name}, which others may use: attach again")


def raised_by(outcome: Outcome) -> RayshardingError | None:
    """Return the error of a failed call; `None` if it succeeded.

    The error of the rank that failed first, if it is this package's (`PlanError`); else the group's error. If all ranks
    raised the same builtin type, `except` of that type also catches it.
    """
    error = outcome.error
    original = None if outcome.raised is None else outcome.raised.exception()
    if error is None or original is None:
        return error
    if isinstance(original, RayshardingError):
        original.__cause__ = error
        return original
    error.__cause__ = original
    return caught_as(error, type(original)) if outcome.is_common else error
