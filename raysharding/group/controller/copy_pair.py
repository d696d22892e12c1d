"""`CopyPair`: two calls of one `copy_to`, one in each of two groups, which begin together, or not at all.

Note [Order of copies]: a call of a pair waits at the head of its queue until the other is at the head of the other
queue. If two pairs stood in opposite orders in two queues, each group would wait for the other. Therefore the
controller with the smaller actor id, the leader, queues the pair: it accepts no other call until the follower has
queued its part, and the follower accepts none while it leads another pair. So every queue has the pairs in one order.
"""

from __future__ import annotations

import asyncio

import ray

from raysharding.errors import GroupError
from raysharding.group.controller.members import start
from raysharding.group.messages import Joint


class CopyPair:
    """One pair, on the controller of one of its groups."""

    def __init__(self, joint: Joint) -> None:
        """Begin before the call is at the head of the queue.

        Args:
            joint: The other group.
        """
        self.joint = joint
        self._begins: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ready: set[str] = set()
        self.why = ""
        """Why the pair does not begin."""

    async def may_begin(self) -> bool:
        """Wait at the head of the queue; return False if the other group cannot run its part."""
        if self.joint.is_leader:
            return await self.is_ready("leader")
        if not self._begins.done():
            start(self._ask_leader())
        return await self._begins

    async def is_ready(self, part: str) -> bool:
        """Note that a part is at the head of its queue, once or again; return True if both begin. On the leader."""
        self._ready.add(part)
        if len(self._ready) == 2 and not self._begins.done():
            self._begins.set_result(True)
        return await self._begins

    def watch(self, follower_ended: ray.ObjectRef) -> None:
        """Withdraw the pair if the follower's part ends before it has begun. On the leader."""
        start(self._watch(follower_ended))

    def withdraw(self, why: str) -> None:
        """Let the pair not begin, unless it has."""
        if not self._begins.done():
            self.why = why
            self._begins.set_result(False)

    def error(self) -> GroupError:
        """Return the error of a part that did not begin because the other could not."""
        return GroupError(f"copy_to did not begin: {self.joint.other_name} cannot run it: {self.why}")

    async def _ask_leader(self) -> None:
        try:
            begins, why = await self.joint.other.queue.remote("copy_is_ready", self.joint.key)
        except ray.exceptions.RayError as error:
            begins, why = False, str(error).partition("\n")[0]
        if begins and not self._begins.done():
            self._begins.set_result(True)
        self.withdraw(why)

    async def _watch(self, follower_ended: ray.ObjectRef) -> None:
        try:
            self.withdraw(await follower_ended)
        except ray.exceptions.RayError as error:
            self.withdraw(str(error).partition("\n")[0])
