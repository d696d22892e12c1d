"""`CallQueue`: the calls of all drivers, run one at a time in the order in which they were accepted."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from raysharding.group.controller.copy_pair import CopyPair
from raysharding.group.controller.drivers import Driver
from raysharding.group.controller.running_call import RunningCall
from raysharding.group.messages import Outcome, Submission


def _future() -> asyncio.Future[Outcome]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class QueuedCall:
    """A call that was accepted."""

    driver: Driver
    """The driver that submitted it."""
    submission: Submission
    """The call."""
    pair: CopyPair | None = None
    """The pair that it is a part of."""
    opened: str | None = None
    """Key of the claim that began with this call."""
    running: RunningCall | None = None
    """The call on its way through the ranks; `None` before."""
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
    """A FIFO queue of calls."""

    def __init__(self, run_call: Callable[[QueuedCall], Awaitable[None]]) -> None:
        """Begin without calls.

        Args:
            run_call: Runs one call on the ranks, and ends it; must not raise.
        """
        self.current: QueuedCall | None = None
        """The call that the ranks run."""
        self._waiting: collections.deque[QueuedCall] = collections.deque()
        self._run_call = run_call
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + (self.current is not None)

    def add(self, call: QueuedCall) -> None:
        """Queue a call."""
        self._waiting.append(call)
        self._added.set()

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
            if call.pair is not None and not await call.pair.may_begin():
                call.end(Outcome(error=call.pair.error(), follows=True))
            if call not in self._waiting:
                continue  # cancelled while it waited for the other group
            self._waiting.remove(call)
            if not call.ended.done():
                self.current = call
                await self._run_call(call)
                self.current = None
