"""`Intake`: accepts the calls of all drivers in each driver's order, and knows them until their drivers have heard."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from raysharding.errors import GroupError
from raysharding.group.controller.copy_pair import CopyPair
from raysharding.group.controller.drivers import Driver, Drivers
from raysharding.group.controller.members import start
from raysharding.group.controller.queue import CallQueue, QueuedCall
from raysharding.group.controller.state import GroupStatus
from raysharding.group.messages import Item, Outcome, Submission, closed, decoded, encoded


class Intake:
    """The calls of one group, from their arrival to their outcome."""

    def __init__(self, name: str, drivers: Drivers, status: GroupStatus, queue: CallQueue) -> None:
        """Begin without calls.

        Args:
            name: Name of the group in errors.
            drivers: The group's drivers.
            status: The group's state.
            queue: Where accepted calls go.
        """
        self._name = name
        self._drivers = drivers
        self._status = status
        self._queue = queue
        self._calls: dict[tuple[str, int | str], QueuedCall] = {}
        self._pairs: dict[str, CopyPair] = {}
        self._accepting = asyncio.Lock()

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
                self._drivers.arrived(known)
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
        call = self._calls.get((driver, key))
        if call is None:
            return encoded(Outcome(error=unknown, follows=isinstance(key, str)), has_refs=False)
        try:
            outcome = await call.ended
        finally:
            self._calls.pop((driver, key), None)
        return encoded(outcome, has_refs=any(isinstance(one, ray.ObjectRef) for one in outcome.sent))

    async def copy_is_ready(self, key: str) -> tuple[bool, str]:
        """Wait until both calls of a pair are at the head of their queues; return if they begin, or why not."""
        pair = self._pairs.get(key)
        if pair is None:
            return False, "the copy was withdrawn"
        return await pair.other_is_ready(), pair.why

    async def copy_ended(self, key: str) -> str:
        """Wait for the end of a follower's call; return its error, for a leader that has not begun."""
        call = next((one for one in self._calls.values() if one.pair is not None and one.pair.joint.key == key), None)
        if call is None:
            return "it is not queued"
        error = (await call.ended).error
        return "" if error is None else error.message

    async def item(self, driver: str, number: int, index: int) -> Item:
        """Wait for one part of a call's result; see `RunningCall.item`."""
        await self._drivers.turn(self._drivers[driver], number + 1)  # Ray may have brought the call later than this
        call = self._calls.get((driver, number))
        if call is not None:
            await asyncio.wait([call.ended, start(call.began.wait())], return_when=asyncio.FIRST_COMPLETED)
        return Item(is_last=True) if call is None or call.running is None else await call.running.item(index)

    def progress(self, driver: str, number: int) -> tuple[int, int]:
        """Return the bytes that a running load or save has done, and its total; 0 before it runs."""
        call = self._calls.get((driver, number))
        return (0, 0) if call is None or call.running is None else call.running.progress

    async def _accept(self, driver: Driver, key: int | str, submission: Submission) -> None:
        """Queue a call; a call that is refused has ended."""
        call = QueuedCall(driver, submission)
        async with self._accepting:
            self._calls[driver.key, key] = call
            await self._queue_call(call)

    async def _queue_call(self, call: QueuedCall) -> None:
        submission = call.submission
        refused = self._refusal(call.driver, submission)
        if refused is not None:
            call.end(Outcome(error=refused))
            return
        joint = submission.joint
        if joint is not None:
            call.pair = self._pairs[joint.key] = CopyPair(joint)
            call.ended.add_done_callback(lambda _: self._pairs.pop(joint.key, None))
            if joint.is_leader:
                assert submission.other is not None, "the leader queues both parts"
                try:
                    await joint.other.submit_follower.remote(joint.driver, joint.before, submission.other)
                except ray.exceptions.RayError as error:
                    call.pair.withdraw(str(error).partition("\n")[0])
                call.pair.watch(joint.other.copy_ended.remote(joint.key))
        if submission.opens_claim is not None and self._drivers.claim is None:
            call.opened = submission.opens_claim[1]
            self._drivers.take_claim(call.driver, *submission.opens_claim)
        self._queue.add(call)

    def _refusal(self, driver: Driver, submission: Submission) -> GroupError | None:
        refused = self._status.refusal(driver.key)
        if refused is not None:
            return refused
        return self._drivers.refusal(driver, submission.method, submission.refused_beside)
