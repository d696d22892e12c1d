"""`CallQueue`: the calls of all drivers, from their arrival to their outcome; each driver's in its order.

Ray may bring the calls of one driver in another order than they were sent: `Drivers.turn` puts them back in order by
their numbers. Calls of several drivers run in the order in which they were accepted, the same for all ranks, because
`run` is the only task that sends them, one after the other.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from raysharding.errors import CallCancelledError, GroupError
from raysharding.group.controller.copy_pair import CopyPair
from raysharding.group.controller.drivers import Driver, Drivers
from raysharding.group.controller.members import start
from raysharding.group.controller.running_call import RunningCall
from raysharding.group.controller.state import GroupStatus
from raysharding.group.messages import Item, Joint, Outcome, Snapshot, Submission, closed, decoded, encoded


def _future() -> asyncio.Future[Outcome]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class QueuedCall:
    """A call that has arrived."""

    driver: Driver
    """The driver that submitted it."""
    submission: Submission
    """The call."""
    pair: CopyPair | None = None
    """The pair that it is a part of."""
    running: RunningCall | None = None
    """The call on the ranks; `None` before."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the ranks begin it."""
    ended: asyncio.Future[Outcome] = field(default_factory=_future)
    """Ends with the call."""

    def end(self, outcome: Outcome) -> None:
        """End the call, unless it has ended."""
        if not self.ended.done():
            self.ended.set_result(outcome)
        if self.pair is not None and outcome.error is not None:
            self.pair.withdraw(outcome.error.message)


class CallQueue:
    """The calls of one group. They run one at a time, in the order in which they were accepted."""

    def __init__(
        self,
        name: str,
        drivers: Drivers,
        status: GroupStatus,
        run_call: Callable[[QueuedCall], Awaitable[None]],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        """Begin without calls.

        Args:
            name: Name of the group in errors.
            drivers: The group's drivers.
            status: The group's state.
            run_call: Runs one call on the ranks, and ends it; must not raise.
            snapshot: Returns the group's snapshot, for the driver of a call that is refused for the group's state.
        """
        self.current: QueuedCall | None = None
        """The call that the ranks run."""
        self._name = name
        self._drivers = drivers
        self._status = status
        self._run_call = run_call
        self._snapshot = snapshot
        self._known: dict[tuple[str, int | str], QueuedCall] = {}
        """(driver, number or key of a pair) → its call, until the driver has got its outcome."""
        self._pairs: dict[str, CopyPair] = {}
        """Key → pair, until this group's part has ended."""
        self._waiting: collections.deque[QueuedCall] = collections.deque()
        """Accepted calls that the ranks have not begun, in their order."""
        self._accepting = asyncio.Lock()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + (self.current is not None)

    async def submit(self, driver: str, number: int, sent: Any) -> Any:
        """Run a call, after those that were accepted before it; return the encoded `Outcome`.

        Args:
            driver: Its driver.
            number: Its place among the driver's calls, from 0.
            sent: The encoded `Submission`.
        """
        known = self._drivers[driver]
        if await self._drivers.turn(known, number):
            try:
                await self._accept(known, number, decoded(sent))
            finally:
                self._drivers.arrived(known)  # refused, too: the driver's later calls wait for this number
        return await self.outcome(driver, number, closed(self._name))

    async def submit_follower(self, driver: str, before: int, submission: Submission) -> None:
        """Queue a call that begins together with one of another group, whose controller asks for it.

        It has no number: if that controller died before it asked, the driver's later calls would wait for the number.

        Args:
            driver: The call's driver.
            before: Number of the driver's calls that come before it.
            submission: The call.
        """
        known = self._drivers[driver]
        if await self._drivers.turn(known, before):
            assert submission.joint is not None, "it is a part of a pair"
            await self._accept(known, submission.joint.key, submission)

    async def arrived(self, driver: str, number: int) -> None:
        """Wait until a call of a driver, and the part of its pair in the other group, are queued or have ended."""
        await self._drivers.turn(self._drivers[driver], number + 1)

    async def outcome(self, driver: str, key: int | str, unknown: GroupError) -> Any:
        """Return the encoded `Outcome` of a call.

        Args:
            driver: Its driver.
            key: Its number, or the key of the pair of which it is the follower's part.
            unknown: Error of a call that was not queued.
        """
        call = self._known.get((driver, key))
        if call is None:
            return encoded(Outcome(error=unknown, follows=isinstance(key, str)), has_refs=False)
        try:
            outcome = await call.ended
        finally:
            self._known.pop((driver, key), None)
        return encoded(outcome, has_refs=any(isinstance(one, ray.ObjectRef) for one in outcome.sent))

    async def copy_is_ready(self, key: str) -> tuple[bool, str]:
        """Wait until both calls of a pair are at the head of their queues; return if they begin, or why not."""
        pair = self._pairs.get(key)
        if pair is None:
            return False, "the copy was withdrawn"
        return await pair.is_ready("follower"), pair.why

    async def copy_ended(self, key: str) -> str:
        """Wait for the end of a follower's call; return its error, for a leader that has not begun."""
        call = next((one for one in self._known.values() if one.pair is not None and one.pair.joint.key == key), None)
        if call is None:
            return "it is not queued"
        error = (await call.ended).error
        return "" if error is None else error.message

    async def item(self, driver: str, number: int, index: int) -> Item:
        """Wait for one part of a call's result; `None` if the call has ended without it.

        To ask for a part says that those before it have arrived.
        """
        await self._drivers.turn(self._drivers[driver], number + 1)  # Ray may have brought the call later than this
        call = self._known.get((driver, number))
        if call is not None:
            beginning = start(call.began.wait())
            await asyncio.wait([call.ended, beginning], return_when=asyncio.FIRST_COMPLETED)
            beginning.cancel()
        return None if call is None or call.running is None else await call.running.item(index)

    async def cancel_call(self, driver: str, number: int) -> None:
        """End a call of a driver that no rank has begun, or that runs in steps; others run to their end."""
        await self._drivers.turn(self._drivers[driver], number + 1)
        call = self._known.get((driver, number))
        if call is not None and call.running is not None:
            call.running.cancel()
        elif call is not None and call in self._waiting:
            self._waiting.remove(call)
            call.end(Outcome(error=CallCancelledError(f"{call.submission.method}: cancelled before any rank began it")))

    async def progress(self, driver: str, number: int) -> tuple[int, int]:
        """Return the bytes that a running load or save has done, and its total; 0 before it runs."""
        call = self._known.get((driver, number))
        return (0, 0) if call is None or call.running is None else call.running.progress

    def cancel(self, outcome: Outcome, driver: Driver | None = None) -> int:
        """End the calls that no rank has begun, all or those of one driver; return their number."""
        cancelled = [call for call in self._waiting if driver is None or call.driver is driver]
        for call in cancelled:
            self._waiting.remove(call)
            call.end(outcome)
        return len(cancelled)

    async def run(self) -> None:
        """Run the calls, as long as the controller lives."""
        while True:
            if not self._waiting:
                self._added.clear()
                await self._added.wait()
                continue
            call = self._waiting[0]
            if (refused := self._drivers.refusal_of_turn(call.driver, call.submission)) is not None:
                self._waiting.popleft()
                call.end(Outcome(error=refused))
                continue
            if call.pair is not None and not await call.pair.may_begin():
                call.end(Outcome(error=call.pair.error(), follows=True))
            if call not in self._waiting:
                continue  # cancelled while it waited for the other group
            self._waiting.remove(call)
            if not call.ended.done():
                self.current = call
                await self._run_call(call)
                self.current = None

    async def _accept(self, driver: Driver, key: int | str, submission: Submission) -> None:
        """Queue a call; a call that is refused has ended."""
        call = QueuedCall(driver, submission)
        # Held while the leader of a pair waits for the follower's answer: another pair that was queued meanwhile could
        # stand before this one here and behind it there (Note [Order of copies]). Groups never wait for these locks in
        # a circle, because a leader has a smaller actor id than its follower.
        async with self._accepting:
            self._known[driver.key, key] = call
            if (refused := self._refusal(call)) is not None:
                call.end(refused)
                return
            if submission.joint is not None:
                await self._pair(call, submission.joint)
                if (refused := self._refusal(call)) is not None:  # the group broke meanwhile, or the driver is gone
                    call.end(refused)
                    return
            self._waiting.append(call)
            self._added.set()

    def _refusal(self, call: QueuedCall) -> Outcome | None:
        """Return the outcome of a call that is refused; `None` if it is accepted."""
        driver, submission = call.driver, call.submission
        if not self._drivers.has(driver):
            return Outcome(error=closed(self._name))
        if (refused := self._status.refusal(driver.key if submission.makes else "")) is not None:
            return Outcome(error=refused, snapshot=self._snapshot())
        changes = submission.refused_beside or submission.save is not None
        if changes and submission.generation != self._status.generation:
            return self._status.restarted()
        beside = self._drivers.refusal(driver, submission.method, submission.refused_beside)
        return None if beside is None else Outcome(error=beside)

    async def _pair(self, call: QueuedCall, joint: Joint) -> None:
        """Make a pair of a call and the one of another group; its leader queues that one first."""
        call.pair = self._pairs[joint.key] = CopyPair(joint)
        call.ended.add_done_callback(lambda _: self._pairs.pop(joint.key, None))
        if joint.is_leader:
            assert call.submission.other is not None, "the leader queues both parts"
            try:
                await joint.other.queue.remote("submit_follower", joint.driver, joint.before, call.submission.other)
            except ray.exceptions.RayError as error:
                call.pair.withdraw(str(error).partition("\n")[0])
            call.pair.watch(joint.other.queue.remote("copy_ended", joint.key))
