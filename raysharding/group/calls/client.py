"""`Client`: a driver's end of a group: it submits calls to the controller, and follows the group's state."""

from __future__ import annotations

import atexit
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from raysharding.batch import RankBatch
from raysharding.config import Timeouts
from raysharding.errors import GroupBrokenError, GroupError, RayshardingError
from raysharding.group.calls.call import Call, Collect, collect_all, collect_rank0
from raysharding.group.calls.callback_thread import refuse_to_wait, run_logged
from raysharding.group.calls.connection import Connection, left
from raysharding.group.calls.interrupts import DeferredInterrupts, MaskedInterrupts, Stopping
from raysharding.group.cluster import actor_id, tell
from raysharding.group.messages import (
    COMMAND_BYTES,
    GroupState,
    Item,
    Joint,
    Outcome,
    Packed,
    Part,
    Submission,
    closed,
    encoded,
    pack_batches,
    pack_same,
)
from raysharding.group.ranks import RankInfo

_RELEASE_S = 40.0
_MAX_BYTES = 256 << 20


class Client:
    """A driver's end of a group. Thread-safe."""

    def __init__(self, controller: Any, name: str, timeouts: Timeouts, max_output_bytes: int) -> None:
        """Begin without a connection; `attach` connects.

        Args:
            controller: Handle of the group's controller.
            name: Name of the group in errors.
            timeouts: Deadlines.
            max_output_bytes: Largest result of one rank, in bytes.
        """
        self.connection = Connection(controller, name)
        """Connection to the controller."""
        self.name = name
        self.timeouts = timeouts
        self.max_output_bytes = max_output_bytes
        self.pending = self.connection.pending
        """Saves in the background."""
        self._is_closed = False
        self._maker: int | None = None
        atexit.register(self.connection.thread.stop)

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Where each rank runs, by rank."""
        return self.connection.snapshot.ranks

    @property
    def state(self) -> GroupState:
        """State of the group: BUSY while a call of this driver runs or is queued."""
        return self.connection.state

    @property
    def cause(self) -> GroupError | None:
        """The error that broke the group."""
        return self.connection.cause

    @contextmanager
    def making(self) -> Iterator[None]:
        """Return a context in which this thread makes the ranks: its calls alone run while the group is STARTING."""
        self._maker = threading.get_ident()
        try:
            yield
        finally:
            self._maker = None

    def submit_batches(
        self,
        method: str,
        batches: Sequence[RankBatch],
        *extra: Any,
        collect: Collect = collect_rank0,
        **options: Any,
    ) -> Call:
        """Submit a command with a batch per rank, under `Timeouts.call_s`.

        Args:
            method: Name of the command, whose first argument is the batch.
            batches: Batches, by rank.
            extra: Arguments that follow the batch, the same on every rank.
            collect: Makes the result. Default: the value of rank 0.
            options: Other fields of `Submission`.
        """
        self._refuse()
        if len(batches) != len(self.ranks):
            raise GroupBrokenError(f"{method}: the number of ranks changed while the call was made; call again")
        values = (value for one in batches for value in (*one.wrapped_args, *one.wrapped_kwargs.values()))
        if any(isinstance(value, ray.ObjectRef) for value in values):
            # Shorter than the call's deadline, after which ranks that still wait would count as hung.
            batches = [replace(batch, fetch_s=self.timeouts.call_s / 2) for batch in batches]
        args, shared = pack_batches(method, batches, *extra)
        options |= {"output": "ref" if collect.as_refs else "value", "max_output_bytes": self.max_output_bytes}
        parts = (args,) if isinstance(args, Packed) else tuple(args)
        return self._submit(method, parts, shared, self.timeouts.call_s, collect, options)

    def submit_same(
        self,
        method: str,
        *args: Any,
        deadline_s: float | None = None,
        collect: Collect = collect_rank0,
        is_last: bool = False,
        **options: Any,
    ) -> Call:
        """Submit a command with the same arguments on every rank.

        Args:
            method: Name of the command.
            args: Its arguments.
            deadline_s: Deadline, in seconds. Default `Timeouts.call_s`.
            collect: Makes the result. Default: the value of rank 0.
            is_last: True if the command cleans up after a failure: it does not raise the error of a failed save.
            options: Other fields of `Submission`.
        """
        if not is_last:
            self._refuse()
        deadline_s = self.timeouts.call_s if deadline_s is None else deadline_s
        return self._submit(method, (pack_same(method, *args),), None, deadline_s, collect, options)

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
        return self._submit(method, tuple(pack_same(method, *one) for one in args), None, deadline_s, collect, {})

    def take_lock(self, what: str, key: str) -> None:
        """Take the lock on the group's model; `what` is its kind.

        Raises:
            GroupError: Another one is held, or, once, another driver has restarted the group.
        """
        here = self.connection
        outcome: Outcome = here.ask("take_lock", here.key, what, key, here.generation)
        here.generation = outcome.generation or here.generation
        if outcome.error is not None:
            raise outcome.error

    def release_lock(self, key: str) -> None:
        """Release the lock. Waits for the answer: Ray may bring the controller this driver's next message before it."""
        # A controller that is gone holds no lock, and one that a signal has stopped would keep this waiting.
        if self.connection.is_connected() and self.connection.snapshot.state is not GroupState.CLOSED:
            with suppress(GroupError):
                self.connection.finish(self.connection.request("release_lock", key), within_s=_RELEASE_S)

    def interrupt_soon(self, source: str) -> Stopping:
        """Cancel this driver's calls that no rank has begun; a group that is being made breaks.

        Returns:
            A future that completes when the call of this driver that ran has ended, with the number of cancelled calls.
        """
        stopping = Stopping()
        # A signal handler must not wait, nor take a lock that the main thread may hold.
        threading.Thread(target=self._interrupt, args=(source, stopping), name="interrupt", daemon=True).start()
        return stopping

    def interrupt(self, timeout_s: float | None) -> int:
        """Cancel this driver's calls in the queue, wait for its running one, and return the number of cancelled calls.

        Raises:
            TimeoutError: `timeout_s` passed, and the call still runs.
        """
        try:
            return self.interrupt_soon("").result(timeout_s)
        except TimeoutError:
            what = f"the running call has not ended after {timeout_s:g} s; it still runs"
            raise TimeoutError(f"{self.name}: {what}") from None

    def abandon_soon(self, reason: str) -> None:
        """Stop the ranks, also in a call; the group is BROKEN. `reason` is part of the error."""
        self.connection.thread.call(partial(self.connection.tell, "stop", self.connection.key, reason))

    def tell_soon(self, line: str) -> None:
        """Write a line to stderr on another thread, for a signal handler, which must not."""
        self.connection.thread.call(partial(tell, line))

    def shutdown(self) -> None:
        """Wait for the saves in progress, of all drivers, and end the group for all drivers. Idempotent.

        Returns when the group's resources are free, or 40 s after the last save. After `detach` nothing happens: the
        group is that of others.

        Raises:
            Exception: The failure of a background save. The group is shut down nevertheless.
        """
        if self._is_closed:
            return
        try:
            if self.state in (GroupState.READY, GroupState.BUSY):
                self.pending.wait(self.timeouts.load_stall_s, of_all=True)
        finally:
            try:
                self._end_group()
            finally:
                self.connection.end_controller(for_good=True)
                self._close()

    def _end_group(self) -> None:
        if self.connection.has_ray():
            why = f"{self.name} was shut down before this call ended"
            with suppress(GroupError):  # it is gone, or does not answer: the controller is killed
                self.connection.ask("shutdown", why, within_s=_RELEASE_S)

    def detach(self) -> None:
        """Leave the group to its other drivers; one without a name ends."""
        self.connection.tell("detach", self.connection.key)
        self.pending.lose(left(self.name), "how the save ends is not known")
        self._close(left)

    def dropped_soon(self) -> None:
        """Handle the loss of the last reference to the group."""
        self.connection.thread.call(self.detach)

    def _close(self, refusal: Callable[[str], GroupBrokenError] = closed) -> None:
        self._is_closed = True
        self.connection.close(refusal)
        atexit.unregister(self.connection.thread.stop)

    def _refuse(self) -> None:
        """Raise if the group is unusable or a save in the background has failed."""
        self.connection.refuse_if_unusable()
        self.pending.raise_failed()

    def _submit(
        self,
        method: str,
        parts: tuple[Packed, ...],
        shared: Packed | None,
        deadline_s: float,
        collect: Collect,
        options: dict[str, Any],
    ) -> Call:
        """Put large arguments into the object store, and send the call to the controller."""
        if collect.keep is not None:
            options |= {"takes_steps": True, "waits_for_driver": True, "is_stream": collect.tokens is not None}
        num_bytes = sum(part.num_bytes for part in parts) + (0 if shared is None else shared.num_bytes)
        self._wait_for_room(method)
        self.connection.require_ray()
        try:
            whole = None if shared is None else _stored(shared)
            options |= {"makes": self._maker == threading.get_ident(), "generation": self.connection.generation}
            submission = Submission(method, tuple(map(_stored, parts)), deadline_s, shared=whole, **options)
        except ray.exceptions.RayError as error:
            raise GroupError(f"cannot store the arguments of {method}: {error}") from error
        stored = (*submission.parts, submission.shared)
        sent = encoded(submission, has_refs=any(isinstance(part, ray.ObjectRef) for part in stored))
        call = Call(method, len(self.ranks), collect, self.timeouts.call_s, self)
        call.num_bytes, call.deadline_s = num_bytes, deadline_s
        with MaskedInterrupts(), self.connection.submitting:
            self.connection.refuse_if_unusable()
            self.connection.send(call, sent)
        if collect.keep is not None:
            threading.Thread(target=call.take_items, args=(collect.keep,), name=f"take {method}", daemon=True).start()
        return call

    def submit_pair(
        self, other: Client, method: str, args: tuple[Any, Any], key: str, refused_beside: Mapping[str, str]
    ) -> tuple[Call, Call]:
        """Submit a call of this group that runs together with one of another.

        Both groups have queued their part, or refused it, when this method returns. How their controllers let the parts
        begin together: Note [Order of copies] in `controller/copy_pair.py`.

        Args:
            other: The other group.
            method: Name of the command.
            args: Its argument here and there, the same on every rank of a group.
            key: Identifies the pair.
            refused_beside: Kind of a lock → why the other group's part is refused beside it.
        """
        sides: list[tuple[Client, Any, Mapping[str, str]]] = [(self, args[0], {}), (other, args[1], refused_beside)]
        sides.sort(key=lambda side: actor_id(side[0].connection.controller))
        first, second = (client for client, _, _ in sides)
        here, there = first.connection, second.connection
        calls = {one: Call(method, len(one.ranks), collect_all, one.timeouts.call_s, one) for one in (self, other)}
        with MaskedInterrupts(), here.submitting, there.submitting:
            for one, call in calls.items():
                one._refuse()
                call.deadline_s = one.timeouts.call_s
            its = there.registration
            joints = (
                Joint(key, there.controller, second.name, True, its.key, its.next_number),
                Joint(key, here.controller, first.name, False),
            )
            own, other_own = (
                Submission(
                    method,
                    (pack_same(method, arg),),
                    one.timeouts.call_s,
                    joint=joint,
                    refused_beside=beside,
                    generation=one.connection.generation,
                )
                for (one, arg, beside), joint in zip(sides, joints, strict=True)
            )
            here.send(calls[first], replace(own, other=other_own))
            with suppress(GroupError):  # the call raises it
                here.ask("queue", "arrived", here.key, calls[first].number, within_s=None)
            unknown = GroupError(f"copy_to did not begin: {first.name} has not queued it")
            outcome = there.request("queue", "outcome", its.key, key, unknown)
            there.follow(calls[second], its, outcome)
        return calls[self], calls[other]

    def item(self, number: int, index: int) -> concurrent.futures.Future[Item]:
        """Ask for one part of a call's result, which says that those before it have arrived."""
        self.connection.require_ray()
        item = self.connection.request("queue", "item", self.connection.key, number, index)
        future: concurrent.futures.Future[Item] = item.future()
        return future

    def cancel(self, number: int) -> None:
        """End a call of this driver that no rank has begun, or that runs in steps; waits for nothing."""
        self.connection.tell("queue", "cancel_call", self.connection.key, number)

    def progress(self, number: int) -> tuple[int, int]:
        """Return the bytes that a running load or save has done, and its total; 0 before it runs."""
        try:
            done: tuple[int, int] = self.connection.ask("queue", "progress", self.connection.key, number)
        except GroupError:
            return 0, 0  # the call itself raises it
        return done

    def _wait_for_room(self, method: str) -> None:
        """Wait while the arguments of calls that have not ended take more than 256 MiB."""
        here = self.connection
        if here.num_bytes < _MAX_BYTES:
            return
        refuse_to_wait(f"{method}.remote(), while the arguments of calls take {here.num_bytes} bytes")
        with DeferredInterrupts(self), here.changed:
            here.changed.wait_for(lambda: here.num_bytes < _MAX_BYTES or here.cause is not None)

    def _interrupt(self, source: str, stopping: Stopping) -> None:
        num_cancelled = 0
        try:
            # The calls raise these; Ray Client raises a `ConnectionError`.
            with suppress(RayshardingError, ray.exceptions.RayError, ConnectionError):
                num_cancelled = self._stop_calls(source)
        finally:
            stopping.set_result(num_cancelled)

    def _stop_calls(self, source: str) -> int:
        """Cancel the calls in the queue, wait for the running one, and return the number of cancelled calls."""
        before = list(self.connection.calls)  # other threads may go on submitting
        own = self.connection.registration
        asked = "interrupt", own.key, source or "interrupt()", own.next_number
        num_cancelled, running, left_s = self.connection.ask(*asked)
        if source and running:
            line = (
                f"{source}: {self.name} stops when the running {running} has ended (deadline in {left_s:.0f} s); "
                f"queued calls cancelled: {num_cancelled}; once more stops the ranks now, and their weights are lost"
            )
            run_logged(partial(tell, line))  # stderr may be closed
        for call in before:
            call.wait(None)
        return int(num_cancelled)


def _stored(part: Packed) -> Part:
    return ray.put(part) if part.refs or part.num_bytes > COMMAND_BYTES else part
