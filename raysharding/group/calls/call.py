"""`Call`: a running or finished call of all ranks; the methods that return one are in `handle.py`.

The collectors, one for each kind of result, turn the ranks' values into the caller's result.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Generic, NoReturn, Protocol, Self

import ray
from typing_extensions import TypeVar

from raysharding.batch import Out, PerRank, Tokens, select_output
from raysharding.errors import CallTimeoutError, GroupError
from raysharding.group.calls.callback_thread import is_callback_thread, refuse_to_wait, run_logged
from raysharding.group.calls.interrupts import DeferredInterrupts, Interruptible
from raysharding.group.calls.result_refs import ref_of
from raysharding.group.cluster import refuse_in_fork
from raysharding.group.messages import Item, Packed, Sent

T = TypeVar("T", default=Any)  # `Call` alone means `Call[Any]`


class CallGroup(Interruptible, Protocol):
    """The group of a call."""

    def item(self, number: int, index: int) -> concurrent.futures.Future[Item]:
        """Ask for one part of the result of this driver's call with a number."""

    def cancel(self, number: int) -> None:
        """End this driver's call with a number if it has not begun, or runs in steps."""

    def progress(self, number: int) -> tuple[int, int]:
        """Return the bytes that this driver's call with a number has done, and its total."""


@dataclass(frozen=True)
class Collect:
    """Functions that turn the ranks' values into the caller's result, on the thread that requests the result."""

    join: Callable[[Call], Any]
    """Returns the result of the whole call."""
    own: Callable[[Any], Any] = lambda value: value
    """Returns one rank's part, given the value it sent; for `per_rank()` and `stream()`."""
    keep: Callable[[Any], object] | None = None
    """Takes rank 0's value of each step of a call in steps, on a thread; the next step waits for that."""
    tokens: SimpleQueue[Any] | None = None
    """Lists of what `stream()` yields of a call in steps, which run one ahead of them, and `None` at the end."""
    as_refs: bool = False
    """True if the ranks' values are left in the object store as plain objects."""


class Call(Generic[T]):
    """A call that all ranks run together, in the order in which the group's calls were submitted.

    `result()`, `per_rank()`, `stream()` and `await` raise a failure, each time the same error. While the `Call` lives,
    results over 48 KiB stay in Ray's object store until they are requested; smaller ones are in the driver.
    """

    def __init__(
        self, name: str, world_size: int, collect: Collect, fetch_s: float, group: CallGroup | None = None
    ) -> None:
        """Create a call; only the group does.

        Args:
            name: Name of the method, for errors and `repr`.
            world_size: Number of ranks.
            collect: Turns the ranks' values into the result.
            fetch_s: Longest wait for one rank's value to arrive from the object store.
            group: What Ctrl-C stops while the main thread waits; `None`: Ctrl-C only ends the wait.
        """
        self.name = name
        self._group = group
        self._world_size = world_size
        self._collect = collect
        self._fetch_s = fetch_s
        self._changed = threading.Lock()
        self._taken = threading.Event()
        self._lost: GroupError | None = None
        self._sent: Sequence[Sent] = ()
        self.number = -1
        """Number of the call among those of this driver, once it is submitted."""
        self.num_bytes = 0
        """Bytes of its arguments."""
        self.deadline_s = math.inf
        """Deadline of the call, in seconds."""
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._collecting = threading.Lock()
        self._collected: list[T] = []
        self._owner: object = None
        self.on_raise: Callable[[], object] = lambda: None
        """Called when the caller gets the error of the call."""
        self.follows = False
        """True if the call failed because the other part of a joint call could not run."""
        self.weights_version: int | None = None
        """Version of the weights that the call ran with, or has made, once it has succeeded: 1 as first loaded; more by
        each update, by each load or restart, and by each `call` that wrote to them; after a `copy_to` the source's."""

    @classmethod
    def in_thread(cls, name: str, fn: Callable[[], T]) -> Self:
        """Run a function of the driver on a thread; it does not wait in the ranks' queue.

        Args:
            name: Name of the method, for errors and `repr`.
            fn: The function, bounded by its own deadlines. Its value is the result.
        """
        call = cls(name, 0, collect_rank0, 0.0)

        def run() -> None:
            try:
                value = fn()
                # A report says it, and a table of `predict` in its schema.
                noted = getattr(getattr(value, "schema", None), "metadata", None) or {}
                version = noted.get(b"weights_version", getattr(value, "weights_version", None))
                call.weights_version = None if version is None else int(version)
                call._collected.append(value)
            except BaseException as error:  # noqa: BLE001 - raised by result(), which would otherwise wait forever
                call.end(error)
            else:
                call.end(None)

        threading.Thread(target=run, name=f"raysharding-{name}", daemon=True).start()
        return call

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for all ranks and return the result.

        Args:
            timeout_s: Longest wait of this thread; the call continues after it. Default: until the call ends, which
                its own deadline (`Timeouts`) bounds.

        Raises:
            TimeoutError: `timeout_s` passed; the call still runs.
            GroupError: Ranks failed; `failures` says how. Or a callback of `when_done` requests it while the call runs.
            CallCancelledError: Ctrl-C or `group.interrupt()` removed the call from the queue.
            KeyboardInterrupt: Ctrl-C, in the main thread, once the running call has ended: the calls behind it are
                cancelled, and the group is READY. A second Ctrl-C during that wait stops the ranks: the group is
                BROKEN.
        """
        self._wait(timeout_s)
        with self._collecting:
            if not self._collected:
                self._collected.append(self._collect.join(self))
        return self._collected[0]

    def per_rank(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all ranks and return each rank's own part of the result, by rank.

        The part is `None` for a rank that sent nothing, because it had no rows or `out=` excludes it.

        Args:
            timeout_s: As for `result`.

        Raises:
            TimeoutError: As for `result`.
            GroupError: As for `result`.
        """
        self._wait(timeout_s)
        return [self._collect.own(value) for value in self.values()]

    def stream(self, timeout_s: float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield `(rank, value)` as the ranks finish, with the values of `per_rank`.

        Of a `generate(stream=True)` yield `(row, token id)` as tokens come, each once, a row's own in order, up to and
        with its end token. A loop that is left early, or dropped, cancels the call.

        Args:
            timeout_s: Longest wait in total.

        Raises:
            TimeoutError: As for `result`.
            GroupError: As for `result`, after the values of the ranks that finished before.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self._collect.tokens is not None:
            yield from self._tokens(self._collect.tokens, until, timeout_s)
            return
        arrived = set[int]()
        for rank, sent in self._items(until, timeout_s):
            arrived.add(rank)
            yield rank, self._collect.own(self._unpacked(rank, sent))
        self._wait(None if until is None else max(0.0, until - time.monotonic()))
        for rank in range(self._world_size):
            if rank not in arrived:
                yield rank, self._collect.own(self.value(rank))

    def _tokens(
        self, tokens: SimpleQueue[Any], until: float | None, timeout_s: float | None
    ) -> Iterator[tuple[int, Any]]:
        """Yield what the thread of `take_items` has put, until the call has ended."""
        try:
            while True:
                self._refuse_to_wait()
                with nullcontext() if self._group is None else DeferredInterrupts(self._group):
                    left = None if until is None else max(0.0, until - time.monotonic())
                    found = tokens.get(timeout=left)
                if found is None:
                    tokens.put(None)  # for another reader, who waits or comes later
                    break
                yield from found
        except Empty:
            raise self._too_slow(timeout_s) from None
        except GeneratorExit:
            self.cancel()
            raise
        self._wait(None if until is None else max(0.0, until - time.monotonic()))

    def cancel(self) -> None:
        """Cancel the call if no rank has begun it, or if it is a `generate(stream=True)`, after the current token.

        Another call that runs goes on to its end. Does not wait; a cancelled call raises `CallCancelledError`.
        """
        if self._group is not None and not self.done():
            self._group.cancel(self.number)

    def _items(self, until: float | None, timeout_s: float | None) -> Iterator[tuple[int, Sent]]:
        """Yield the parts of the result as they come, until the call has ended."""
        index = 0
        while self._group is not None and not self._end_here().done():
            self._refuse_to_wait()
            # Not around a yield, where the caller's code runs.
            with DeferredInterrupts(self._group):
                future = self._group.item(self.number, index)
                left = None if until is None else max(0.0, until - time.monotonic())
                either: list[concurrent.futures.Future[Any]] = [future, self._ended]
                concurrent.futures.wait(either, left, concurrent.futures.FIRST_COMPLETED)
                if not (future.done() or self._ended.done()):
                    raise self._too_slow(timeout_s)
            if not future.done() or future.exception() is not None or (item := future.result()) is None:
                return
            yield item
            index += 1

    def take_items(self, keep: Callable[[Any], object]) -> None:
        """Take rank 0's value of each step of the call as it comes, until the call has ended; on a thread."""
        try:
            for _, sent in self._items(None, None):
                try:
                    keep(self._unpacked(0, sent))
                except GroupError as error:
                    self._lost = error  # and the other items are taken nevertheless: the ranks wait for that
        finally:
            self._taken.set()
            if self._collect.tokens is not None:
                self._collect.tokens.put(None)

    def wait_taken(self) -> None:
        """Wait until `take_items` has taken all of a call that has ended; its fetches have deadlines.

        Raises:
            GroupError: A value did not arrive.
        """
        self._taken.wait()
        if self._lost is not None:
            raise self._lost

    def ref(self) -> ray.ObjectRef:
        """Return a reference to the result, for `ray.get`, `ray.wait` and the arguments of tasks.

        Each `ref()` sends the result once more: from the driver to an actor that needs no resources, which all calls of
        this driver share and which ends with the last of them, and from the actor into the object store. The first
        reference waits for the start of the actor's process. `Out.refs()` does without, where the ranks' own outputs
        are enough.

        `ray.get` of the reference raises the call's error, as an error that is both a `RayTaskError` and of the error's
        own class, so that `except GroupError` catches it. The group lives at least until the call has ended. The
        reference outlives the group.
        """
        refuse_in_fork(self.name)
        return ref_of(self.name, self.when_done, self.result)

    def done(self) -> bool:
        """Return True if all ranks have finished, or the call has failed."""
        return self._end_here().done()

    def error(self) -> BaseException | None:
        """Return the error of a call that has ended; `None` if it succeeded."""
        return self._ended.exception(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the call to end, with or without an error, at most `timeout_s` if given; return `done()`."""
        self._refuse_to_wait()
        concurrent.futures.wait([self._end_here()], timeout_s)
        return self.done()

    def __await__(self) -> Generator[Any, None, T]:
        return self._await().__await__()

    async def _await(self) -> T:
        # Shielded: cancelling the waiting task must not mark the ranks' call as ended.
        try:
            await asyncio.shield(asyncio.wrap_future(self._end_here()))
        except GroupError:
            self.on_raise()
            raise
        return await asyncio.get_running_loop().run_in_executor(None, self.result)

    def __repr__(self) -> str:
        if not self._ended.done():
            state = "running"
        else:
            error = self._ended.exception()
            state = "finished" if error is None else f"failed: {type(error).__name__}"
        return f"<Call {self.name}: {state}>"

    def value(self, rank: int) -> Any:
        """Fetch the value of one rank that has finished.

        Raises:
            GroupError: The value was lost with the node that held it, or cannot be unpickled in this process.
            CallTimeoutError: The value did not arrive within `Timeouts.call_s`.
        """
        return self._unpacked(rank, self._sent[rank])

    def _unpacked(self, rank: int, sent: Sent) -> Any:
        packed: Any = sent
        try:
            if isinstance(sent, ray.ObjectRef):
                if not ray.is_initialized():  # `ray.get` would start another Ray
                    raise ray.exceptions.RaySystemError("Ray was shut down")
                packed = ray.get(sent, timeout=self._fetch_s)
        except ray.exceptions.GetTimeoutError as error:
            message = f"the result of {self.name} on rank {rank} did not arrive within {self._fetch_s:g} s"
            raise CallTimeoutError(message) from error
        except (ray.exceptions.RayError, ValueError) as error:  # `ValueError`: Ray was shut down before the fetch
            raise GroupError(f"the result of {self.name} on rank {rank} is lost: {error}") from error
        if not isinstance(packed, Packed):
            return packed
        try:
            return packed.unpack()
        except Exception as error:  # unpickling runs the value's own code, which may raise anything
            what = f"the result of {self.name} on rank {rank} cannot be unpickled on the driver"
            cure = "return tensors, numbers, strings or containers of them"
            raise GroupError(f"{what}: {type(error).__name__}: {error}; {cure}") from error

    def values(self) -> list[Any]:
        """Fetch the values of all ranks, by rank, once the call has ended. Raises as `value`."""
        return [self.value(rank) for rank in range(self._world_size)]

    def sent(self) -> Sequence[Sent]:
        """Return what the ranks sent, by rank, once the call has ended; fetch nothing."""
        return self._sent

    def keep_alive(self, owner: object) -> Self:
        """Keep a reference to the group until the call ends: a group without references is shut down with its calls."""
        with self._changed:
            if not self._ended.done():
                self._owner = owner
        return self

    def when_done(self, fn: Callable[[Call], None]) -> None:
        """Run `fn` with this call when the call has ended, with or without an error.

        `fn` runs on the thread that ends the call; if the call has already ended, it runs at once in this thread. The
        thread that ends calls runs all calls of the group, so `fn` must be quick. `fn` may use this call's result and
        begin calls by `.remote(...)`. A method that would wait raises a `GroupError` there, except `group.shutdown()`,
        which begins and returns. An error that `fn` raises is logged.
        """

        def run(_: object) -> None:
            if is_callback_thread():  # a `sys.exit()` in `fn` must not keep the calls behind this one from ending
                run_logged(lambda: fn(self))
            else:
                fn(self)

        self._ended.add_done_callback(run)

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that a running load or save has done, and its total; 0 before it runs and after its end."""
        return (0, 0) if self._group is None or self._ended.done() else self._group.progress(self.number)

    def end(self, error: BaseException | None, sent: Sequence[Sent] = ()) -> None:
        """Record that the whole call has ended, and what its ranks sent; called by the client."""
        self._sent = sent
        with self._changed:
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
            # Released at the end of this method, outside the lock: it may be the last reference to the group.
            owner, self._owner = self._owner, None
        del owner

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Call cannot leave its driver process; send its result()")

    def _refuse_to_wait(self) -> None:
        if not self.done():
            refuse_to_wait(f"the result of {self.name}, which has not ended")

    def _wait(self, timeout_s: float | None) -> None:
        self._refuse_to_wait()
        with nullcontext() if self._group is None else DeferredInterrupts(self._group):
            try:
                error = self._end_here().exception(timeout_s)
            except concurrent.futures.TimeoutError:
                raise self._too_slow(timeout_s) from None
            if error is not None:
                self.on_raise()
                # Without the frames of earlier calls, which would add up.
                raise error.with_traceback(None)

    def _end_here(self) -> concurrent.futures.Future[None]:
        """Return the future that ends with the call; raise in a forked child, where the future would never end."""
        refuse_in_fork(self.name)
        return self._ended

    def _too_slow(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"{self.name} has not finished after {timeout_s:g} s; it still runs: call again to wait")


collect_all = Collect(lambda call: call.values())
"""The values of all ranks, by rank."""
collect_rank0 = Collect(lambda call: call.value(0))
"""The value of rank 0."""


def collect_outputs(out: Out | None, rows: Sequence[int], dim: int) -> Collect:
    """Join the ranks' outputs of a forward or `generate`; `rows` and `dim` are those of `RankBatch`."""
    if out is not None and out.kind == "refs":
        return _collect_refs(rows)
    return Collect(lambda call: select_output(out, call.values(), rows, dim), lambda sent: sent.value)


def streamed(collect: Collect) -> Collect:
    """Collect tokens for `stream()`, too."""
    tokens = SimpleQueue[Any]()

    def keep(value: Any) -> None:
        if isinstance(value, Tokens):  # the last value is the result
            tokens.put(value)

    return replace(collect, keep=keep, tokens=tokens)


def collect_returns(out: Out | None, rows: Sequence[int]) -> Collect:
    """Return the return values of the user's function on the ranks: a list, unless `out` says otherwise.

    Raises:
        ValueError: `out` is `Out.gather()`: it is not known which of the returned values are rows.
    """
    kind = None if out is None else out.kind
    if kind == "gather":
        raise ValueError(
            "out=Out.gather(): return values of fn are not gathered; omit out= for a list by rank, and torch.cat it"
        )
    if kind == "refs":
        return _collect_refs(rows)
    if kind == "rank0":
        return collect_rank0
    if kind == "none":
        return Collect(lambda _: None)
    return Collect(lambda call: call.values() if kind is None else PerRank(call.values()))


def _collect_refs(rows: Sequence[int]) -> Collect:
    """Collect references to the values of the ranks with rows; `ray.get` fetches the values."""

    def join(call: Call) -> PerRank:
        return PerRank([None if rows and not rows[rank] else ref for rank, ref in enumerate(call.sent())])

    return Collect(join, as_refs=True)
